"""Options of a training run, and the optimiser they describe."""

import dataclasses
import math
from typing import Any

import optax

from dllm_jax.parameters import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a run; frozen and hashable, a static jit argument.

    Attributes:
      steps: optimiser steps in all.
      learning_rate: the peak.
      warmup: steps of linear growth from 0 to the peak.
      decay: steps of linear decline to 0 at the end; between the two the rate is constant, so a run can be
        made longer without changing what came before.
      weight_decay: AdamW's, on matrices and tables only (norms and biases have none).
      beta1: AdamW's first moment.
      beta2: AdamW's second moment.
      clip: largest norm of the gradient; larger ones are scaled down to it.
      remat: see `masked_diffusion_loss`.
      seed: of the masks drawn.
      review_every: steps between calls of the source's `review`.
      save_every: steps between checkpoints, a multiple of review_every; one is also written at the end.
    """

    steps: int
    learning_rate: float = 1e-3
    warmup: int = 100
    decay: int = 0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    remat: bool = False
    seed: int = 0
    review_every: int = 50
    save_every: int = 200

    def __post_init__(self):
        for name in ("steps", "review_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("warmup", "decay", "weight_decay", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.warmup + self.decay > self.steps:
            raise ValueError(
                f"warmup={self.warmup} and decay={self.decay} must fit into steps={self.steps} together"
            )
        if self.save_every % self.review_every:
            raise ValueError(
                f"save_every={self.save_every} must be a multiple of review_every={self.review_every}"
            )
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be positive and finite")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1)")


def schedule(config: TrainConfig) -> optax.Schedule:
    """Learning rate by step: warm-up, constant, decay."""
    up = optax.linear_schedule(0.0, config.learning_rate, max(config.warmup, 1))
    flat = optax.constant_schedule(config.learning_rate)
    down = optax.linear_schedule(config.learning_rate, 0.0, max(config.decay, 1))
    return optax.join_schedules([up, flat, down], [config.warmup, config.steps - config.decay])


def optimiser(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with clipping and the schedule."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule(config),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=is_matrix,
        ),
    )


def is_matrix(params: Params) -> dict[str, Any]:
    """True at the parameters that weight decay acts on: everything but norms and biases, by name."""
    return {
        name: is_matrix(value) if isinstance(value, dict) else not name.endswith(("norm", "_bias"))
        for name, value in params.items()
    }
