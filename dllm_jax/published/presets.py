"""Published settings that ship with the package, as `dj.presets`: policies, decoding recipes, models.

The files are in `configs/`, of the repository or of the installed package.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from dllm_jax import expressions
from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.families import config_to_spec
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import shown
from dllm_jax.published.preset import Preset, Recipe, read_preset
from dllm_jax.samplers import Confidence, DreamSchedule

INSTALLED = Path(__file__).parents[1] / "configs"
CHECKOUT = Path(__file__).parents[2] / "configs"


class UnknownPreset(ValueError, KeyError):
    """No preset of that name; the message lists what there is."""

    __str__ = Exception.__str__  # a KeyError quotes its message


class Presets(Mapping[str, Preset]):
    """Policies of the literature by "method/checkpoint/task"; methods give decoding recipes and models.

    A method is a file of `configs/policies`: "x", or "x-by-y" for what the paper of y printed for x.
    """

    def __getitem__(self, name: str) -> Preset:
        """Looks up settings of a policy, e.g. `presets["sparse-dllm/llada-8b-instruct/gsm8k"]`.

        Raises:
          UnknownPreset: unknown method, checkpoint or task; the message lists what there is.
        """
        if not isinstance(name, str):
            raise UnknownPreset(f"{shown(name)} is not the name of a preset, such as {next(iter(self))!r}")
        method, _, rest = name.partition("/")
        known = read_preset(self._find("policies", method, ".toml"))
        if rest not in known:
            # If the checkpoint is known, its tasks say more than a list of everything.
            checkpoint = rest.partition("/")[0] + "/"
            near = [other for other in known if other.startswith(checkpoint)]
            among = f"{shown(rest)} is not among {method}'s presets: {', '.join(near or known)}"
            close = difflib.get_close_matches(rest, known, 1)
            raise UnknownPreset(f"{among}. Did you mean {f'{method}/{close[0]}'!r}?" if close else among)
        return known[rest]

    def __iter__(self) -> Iterator[str]:
        for method in self.names("policies"):
            yield from (f"{method}/{rest}" for rest in read_preset(self._find("policies", method, ".toml")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Presets({', '.join(self.names('policies'))})"

    def model_spec(self, name: str) -> ModelSpec:
        """Reads the spec of a published model ("llada-8b", "dream-7b"), e.g. for random weights of its shape.

        Raises:
          UnknownPreset: unknown name.
        """
        path = self._find("models", name, ".json")
        return config_to_spec(Config(path.name, json.loads(path.read_text(encoding="utf-8-sig"))))

    def recipe(self, checkpoint: str, task: str) -> Recipe:
        """Reads published decoding settings, e.g. `recipe("llada-8b-instruct", "gsm8k")`.

        Raises:
          UnknownPreset: unknown checkpoint or task; the message lists what there is.
        """
        tasks = tomllib.loads(self._find("generation", checkpoint, ".toml").read_text(encoding="utf-8-sig"))
        if not isinstance(task, str) or task not in tasks:
            raise UnknownPreset(f"task={shown(task)} is not among {checkpoint}'s: {', '.join(tasks)}")
        settings = dict(tasks[task])
        geometry = {key: settings.pop(key) for key in ("length", "block", "steps") if key in settings}

        # Dream's recipes name an `alg`; those of LLaDA and LLaDA-V are of LLaDA's sampler, others say which.
        if "sampler" in settings:
            return Recipe(sampler=expressions.sampler(settings["sampler"]), **geometry)
        sampler = DreamSchedule(**settings) if "alg" in settings else Confidence(**settings)
        return Recipe(sampler=sampler, **geometry)

    def names(self, kind: str) -> list[str]:
        """Names of the files of a kind.

        Kinds: "models", "generation" (checkpoints), "policies" (methods), "questions" (about images).
        """
        files = (self.folder() / kind).iterdir()
        return sorted(path.stem for path in files if path.suffix in (".json", ".toml"))

    def folder(self) -> Path:
        """The directory of the files: that of the installed package, or of the repository."""
        return INSTALLED if INSTALLED.is_dir() else CHECKOUT

    def _find(self, kind: str, name: str, suffix: str) -> Path:
        if name not in self.names(kind):
            raise UnknownPreset(f"{shown(name)} is not among the presets: {', '.join(self.names(kind))}")
        return self.folder() / kind / f"{name}{suffix}"


presets = Presets()
