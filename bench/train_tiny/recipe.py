"""What recipes of embedded models share: what `bench.train_tiny` asks of them, and how decoders begin."""

import abc
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from dllm_jax.nn.model import Model
from dllm_jax.nn.modules import INIT_STD, initialise
from dllm_jax.nn.parameters import Params
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.tasks import Stage
from dllm_jax.training import Run, TrainConfig

INIT_GAIN = 4.0  # std 0.08, about 1/sqrt(width): at the usual 0.02 so narrow a model learns far more slowly


@dataclasses.dataclass(frozen=True)
class Recipe(abc.ABC):
    """All that determines an embedded model, and what the card says of how the one that ships came about.

    Attributes:
      spec: of the model.
      stages: what it learns, in order.
      config: of a run from nothing.
      further: of a run that goes on from a model that has learnt the stages.
      history: for the card.
    """

    spec: ModelSpec
    stages: tuple[Stage, ...]
    config: TrainConfig
    further: TrainConfig
    history: str = "The same command makes the same parameters on the same device and software."

    @abc.abstractmethod
    def start(self) -> Model:
        """The model before its first step, a function of the recipe alone."""

    @abc.abstractmethod
    def write_assets(self, directory: Path):
        """Writes the tokenizer, and a config.json with the published keys."""

    @abc.abstractmethod
    def reader(self, directory: Path) -> Any:
        """The tokenizer, or the processor, of assets or of a checkpoint."""

    @abc.abstractmethod
    def measured(self, where: Path) -> dict[str, Any]:
        """Accuracy of a checkpoint on held-out prompts, as `held_out`, and what else its log is to hold."""

    @abc.abstractmethod
    def card(self, name: str, run: Run, measured: dict[str, Any]) -> str:
        """README.md of the model."""


def training(steps: int, decay: int) -> TrainConfig:
    """What all runs share; the rate falls over the last `decay` steps."""
    return TrainConfig(
        steps=steps, learning_rate=1e-3, muon=0.01, warmup=50, decay=decay, prompt_isolation=0.5,
        review_every=50, save_every=100,
    )  # fmt: skip


def decoder(spec: ModelSpec) -> Params:
    """Initial parameters; a direction common to all tokens lets heads attend by position from the start."""
    key, common = jax.random.split(jax.random.key(0))
    params = initialise(spec, key, gain=INIT_GAIN)
    shift = INIT_GAIN * INIT_STD * jax.random.normal(common, (spec.width,))
    return params | {"embed": params["embed"] + shift}


def write_config(directory: Path, config: dict[str, Any]):
    """Writes config.json, without a null that transformers warns of."""
    told = {name: value for name, value in config.items() if name != "rope_scaling"}
    (directory / "config.json").write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
