"""One published setting of a policy, and the files that hold them (`configs/policies/*.toml`)."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from dllm_jax.policies import Policy
from dllm_jax.published import expressions
from dllm_jax.samplers import Sampler
from dllm_jax.state.layout import Layout


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings of a published experiment: `dj.generate(model, prompt, **preset.options())`.

    Attributes:
      policy: the cache policy.
      source: where the settings are printed.
      sampler: what is decoded when; this and the following are None where the source does not say.
      length: response positions.
      block: positions per block.
      steps: denoising steps in all.
    """

    policy: Policy
    source: str
    sampler: Sampler | None = None
    length: int | None = None
    block: int | None = None
    steps: int | None = None

    def __post_init__(self):
        if self.length is not None:
            Layout.of(1, self.length, self.block, self.steps)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate`, as far as they are published."""
        names = ("policy", "sampler", "length", "block", "steps")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def read(path: Path) -> dict[str, Preset]:
    """The presets of a file, by "checkpoint/task".

    A file names its paper and holds a list of settings: each has `checkpoints`, fields of `Preset` (policy
    and sampler as constructor calls), and `tasks`, whose own fields come on top, unless the file has them.

    Raises:
      ValueError: a field or class that is not there, a value that is refused, a name given twice.
    """
    content = tomllib.loads(path.read_text())
    found: dict[str, Preset] = {}
    for setting in content["settings"]:
        shared = {k: v for k, v in setting.items() if k not in ("checkpoints", "tasks")}
        tasks = setting.get("tasks", content.get("tasks", {}))
        for task, own in tasks.items():
            made = _preset(content["paper"], shared | own, f"{path.name}, {task}")
            for name in (f"{checkpoint}/{task}" for checkpoint in setting["checkpoints"]):
                if name in found:
                    raise ValueError(f"{path.name}: {name} is given twice")
                found[name] = made
    return found


def _preset(paper: str, fields: dict[str, Any], where: str) -> Preset:
    known = [field.name for field in dataclasses.fields(Preset)]
    for name in fields:
        if name not in known:
            raise ValueError(f"{where}: {name!r} is not among the fields {', '.join(known)}")
    for name in ("policy", "source"):
        if name not in fields:
            raise ValueError(f"{where}: {name!r} is missing")
    made: dict[str, Any] = fields | {"source": f"{paper}, {fields['source']}"}
    try:
        made["policy"] = expressions.policy(fields["policy"])
        if "sampler" in fields:
            made["sampler"] = expressions.sampler(fields["sampler"])
        return Preset(**made)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
