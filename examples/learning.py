"""Shared parts of the three examples: data, the training of adapters by any loss, and the curve."""

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from transformers import AutoTokenizer

import dllm_jax as dj
from dllm_jax import lora
from dllm_jax.eval.run.files import write_json
from dllm_jax.provenance import measured_on, versions
from dllm_jax.tasks import Chain, Example, accuracy, encode_batch, examples
from dllm_jax.training import Batch, joined, split

# One task for all three, easy to check: to follow a chain for two look-ups and to stop. The bundled models
# know how to follow chains, but were never shown so short a one.
TASK, SIZE, LENGTH = Chain(), 2, 12
HELD_OUT = 99  # seed of the questions that accuracy is measured on
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")  # that are adapted


def pretrained(name: str) -> tuple[dj.Model, Any]:
    """A bundled model and its tokenizer."""
    path = dj.bundled.path(name)
    return dj.load(path), AutoTokenizer.from_pretrained(path)


def adapted(base: dj.Model, rank: int) -> dj.Model:
    """A model with fresh adapters."""
    return lora.attach(base, lora.LoRA(rank=rank, alpha=2.0 * rank, matrices=MATRICES), jax.random.key(0))


def adam(learning_rate: float) -> optax.GradientTransformation:
    """Adam at a constant rate, with clipped gradients."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))


def drawn(step: int, count: int) -> list[Example]:
    """Questions to learn from; none of them is ever among those that are held out."""
    return examples(TASK, (1, step), SIZE, count, "train")


def encoded(tokenizer: Any, spec: dj.ModelSpec, questions: list[Example]) -> Batch:
    """Questions with their answers as token ids."""
    return encode_batch(tokenizer, questions, LENGTH, spec)


def held_out(model: dj.Model, tokenizer: Any, count: int) -> float:
    """Fraction of held-out questions that the exact decoder answers exactly."""
    return accuracy(model, tokenizer, examples(TASK, HELD_OUT, SIZE, count, "held_out"), length=LENGTH)


class Learner(NamedTuple):
    """A model whose adapters are trained.

    Attributes:
      model: Model with adapters.
      moments: the optimizer's state.
    """

    model: dj.Model
    moments: Any


def learner(model: dj.Model, optimizer: optax.GradientTransformation) -> Learner:
    """A learner before its first step."""
    trained, _ = split(model.params, lora.trainable(model.params))
    return Learner(model, optimizer.init(trained))


def updating(
    loss: Callable[..., tuple[jax.Array, Any]], optimizer: optax.GradientTransformation
) -> Callable[..., tuple[Learner, Any]]:
    """A jitted step that changes a learner's adapters by the gradient of `loss(model, *args)`.

    Args:
      loss: gives the loss and what it reports.
      optimizer: sees the adapters alone.

    Returns:
      a function of the learner and the loss's arguments, which gives the learner and the report.
    """

    @jax.jit
    def step(state: Learner, *args: Any) -> tuple[Learner, Any]:
        trained, frozen = split(state.model.params, lora.trainable(state.model.params))

        def of(trained: Any) -> tuple[jax.Array, Any]:
            return loss(dataclasses.replace(state.model, params=joined(trained, frozen)), *args)

        gradient, report = jax.grad(of, has_aux=True)(trained)
        updates, moments = optimizer.update(gradient, state.moments, trained)
        params = joined(optax.apply_updates(trained, updates), frozen)
        return Learner(dataclasses.replace(state.model, params=params), moments), report

    return step


class Curve:
    """The measurements of a run: printed as they come, and written with what they were made with."""

    def __init__(self, out: Path | None, **options: Any):
        self.rows: list[dict[str, float]] = []
        self._out, self._start = out, time.monotonic()
        self._about = {
            "command": f"python examples/{Path(sys.argv[0]).stem}.py {' '.join(sys.argv[1:])}".strip(),
            "options": options,
            "versions": versions(("jax", "jaxlib", "optax", "dllm-jax")),
            **measured_on("float32"),
        }

    def add(self, step: int, **values: Any):
        """Adds the measurements after a step."""
        row = {"step": step} | {name: round(float(np.asarray(value)), 4) for name, value in values.items()}
        self.rows.append(row | {"seconds": round(time.monotonic() - self._start, 1)})
        print("  ".join(f"{name} {value:g}" for name, value in self.rows[-1].items()), flush=True)
        if self._out is not None:
            write_json(self._out, self._about | {"curve": self.rows})  # refuses NaN of a run that diverges
