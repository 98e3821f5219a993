"""Published settings that ship with the package: shapes of real models and their decoding recipes.

The files are in `configs/` of the repository and in `dllm_jax/presets/` of an installed wheel.
"""

import dataclasses
import json
import tomllib
from pathlib import Path

from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.families import config_to_spec
from dllm_jax.samplers import Confidence, DreamSchedule, Sampler
from dllm_jax.spec import ModelSpec

INSTALLED = Path(__file__).parent / "presets"
CHECKOUT = Path(__file__).parents[1] / "configs"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to decode a task: `dj.generate(model, prompt, **recipe.options())`.

    Attributes:
      length: response positions.
      block: positions per block.
      steps: denoising steps in all.
      sampler: what the settings say beyond that.
    """

    length: int
    block: int
    steps: int
    sampler: Sampler

    def options(self) -> dict[str, int | Sampler]:
        """Keyword arguments of `generate`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def folder() -> Path:
    """Where the preset files are."""
    return INSTALLED if INSTALLED.is_dir() else CHECKOUT


def model_spec(name: str) -> ModelSpec:
    """The spec of a real model, "llada-8b" or "dream-7b", e.g. for random weights of its shape.

    Raises:
      ValueError: unknown name.
    """
    path = _find("models", name, ".json")
    return config_to_spec(Config(path.name, json.loads(path.read_text())))


def recipe(checkpoint: str, task: str) -> Recipe:
    """Published decoding settings, e.g. `recipe("llada-8b-instruct", "gsm8k")`.

    Raises:
      ValueError: unknown checkpoint or task; the message lists what there is.
    """
    tasks = tomllib.loads(_find("generation", checkpoint, ".toml").read_text())
    if task not in tasks:
        raise ValueError(f"task={task!r} is not among {checkpoint}'s: {', '.join(tasks)}")
    settings = dict(tasks[task])
    length, block, steps = (settings.pop(key) for key in ("length", "block", "steps"))
    sampler = DreamSchedule(**settings) if "alg" in settings else Confidence(**settings)
    return Recipe(length, block, steps, sampler)


def names(kind: str) -> list[str]:
    """Names of the presets of a kind, "models" or "generation"."""
    return sorted(path.stem for path in (folder() / kind).iterdir() if path.suffix in (".json", ".toml"))


def _find(kind: str, name: str, suffix: str) -> Path:
    if name not in names(kind):
        raise ValueError(f"{name!r} is not among the presets: {', '.join(names(kind))}")
    return folder() / kind / f"{name}{suffix}"
