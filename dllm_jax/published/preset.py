"""Published settings of decoding and of policies, and the files of the latter (`configs/policies/*.toml`)."""

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dllm_jax import expressions
from dllm_jax.options import Options, PositiveInt, shown
from dllm_jax.policies import Policy
from dllm_jax.samplers import Sampler
from dllm_jax.state.layout import Layout
from dllm_jax.state.sliding import Blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Options):
    """How a task was decoded: `dj.generate(model, prompt, **recipe.options())`.

    Attributes are None where the source does not say: pass your own besides.

    Attributes:
      sampler: Sampler.
      length: response positions.
      block: positions per block, or how it slides.
      steps: denoising steps in all.
    """

    sampler: Sampler | None = None
    length: PositiveInt | None = None
    block: Blocks | None = None
    steps: PositiveInt | None = None

    def __post_init__(self):
        super().__post_init__()

        # Blocks and steps are refused here and not at the first prompt, whose length they do not depend on.
        if self.length is not None:
            whole = self.sampler is None or self.sampler.whole_blocks
            Layout.of(1, self.length, self.block, self.steps, whole_blocks=whole)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate`, as far as they are published."""
        # Where a preset was printed is no option of `generate`.
        given = {name: value for name, value in vars(self).items() if name != "source"}
        return {name: value for name, value in given.items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset(Recipe):
    """Settings of a published experiment: `dj.generate(model, prompt, **preset.options())`.

    Attributes: besides those of `Recipe`,
      policy: the cache policy.
      source: where the settings are printed.
    """

    policy: Policy
    source: str


def read_preset(path: Path) -> Mapping[str, Preset]:
    """Reads the presets of a file, see `parse`."""
    return parse(path.read_text(encoding="utf-8-sig"), path.name)


@functools.lru_cache(maxsize=64)
def parse(text: str, name: str) -> Mapping[str, Preset]:
    """Reads the presets of a file's text, by "checkpoint/task".

    A file names its paper and holds a list of settings: each has `checkpoints`, fields of `Preset` (policy
    and sampler as constructor calls), and `tasks`, whose own fields come on top, unless the file has them.

    Args:
      text: TOML.
      name: Name of the file, for error messages.

    Raises:
      ValueError: a field or class that is not there, a value that is refused, a name given twice.
    """
    content = tomllib.loads(text)
    presets: dict[str, Preset] = {}
    for setting in content["settings"]:
        shared = {k: v for k, v in setting.items() if k not in ("checkpoints", "tasks")}

        # A setting's own tasks replace the file's, which its other settings share.
        tasks = setting.get("tasks", content.get("tasks", {}))
        for task, changes in tasks.items():
            preset = _preset(content["paper"], shared | changes, f"{name}, {task}")
            for known in (f"{checkpoint}/{task}" for checkpoint in setting["checkpoints"]):
                if known in presets:
                    raise ValueError(f"{name}: {known} is given twice")
                presets[known] = preset
    return MappingProxyType(presets)


def _preset(paper: str, fields: dict[str, Any], where: str) -> Preset:
    known = [field.name for field in dataclasses.fields(Preset)]
    if unknown := [name for name in fields if name not in known]:
        raise ValueError(f"{where}: {shown(unknown[0])} is not among the fields {', '.join(known)}")
    if missing := [name for name in ("policy", "source") if name not in fields]:
        raise ValueError(f"{where}: {shown(missing[0])} is missing")
    values: dict[str, Any] = fields | {"source": f"{paper}, {fields['source']}"}
    try:
        values["policy"] = expressions.policy(fields["policy"])
        if "sampler" in fields:
            values["sampler"] = expressions.sampler(fields["sampler"])
        if isinstance(fields.get("block"), str):
            values["block"] = expressions.block(fields["block"])
        return Preset(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
