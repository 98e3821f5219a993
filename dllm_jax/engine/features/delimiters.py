"""Blocks of `AdaBlock` (AdaBlock-dLLM, arXiv:2509.26432) end at a delimiter that their first step finds."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.engine.generation import Feature, Generation, Plan, Seen
from dllm_jax.samplers import scores
from dllm_jax.state.canvas import Canvas
from dllm_jax.xla.reductions import argmax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Delimiters(Feature):
    """Sets the end of each block in its first step, by the layout's schedule of such blocks."""

    name: ClassVar[str] = "delimiters"

    @override
    def scored(self, plan: Plan, canvas: Canvas) -> Bool[Array, "b l"]:
        """The masks that a block's first step may end the block after; none in later steps."""
        return canvas.masked & canvas.block & canvas.block_begins

    @override
    def find(self, generation: Generation, canvas: Canvas, seen: Seen) -> Int[Array, "b"]:
        """The end of each sequence's block, by the model's logits before constraints and filters."""
        layout, start = canvas.layout, canvas.block_start[:, None]
        rule = layout.adaptive
        assert rule is not None  # else there is no such feature
        index, logits = seen.candidates.index, seen.unconstrained.astype(jnp.float32)
        is_delimiter = np.zeros(canvas.spec.vocab, bool)
        is_delimiter[list(rule.delimiters)] = True
        token = argmax(logits)
        searched = (index >= start) & (index < start + rule.searched(layout.end - layout.prompt))
        delimits = searched & (index < layout.end) & jnp.asarray(is_delimiter)[token]

        # The most probable delimiter, of equal ones the first.
        probability = jnp.where(delimits, scores.probability(logits, token), -jnp.inf)
        highest = jnp.max(probability, axis=1, keepdims=True)
        place = jnp.min(jnp.where(probability == highest, index, layout.length), axis=1)
        otherwise = jnp.minimum(canvas.block_start + rule.block, layout.end)
        ends = jnp.where((highest[:, 0] > -jnp.inf) & (highest[:, 0] >= rule.threshold), place + 1, otherwise)
        return jnp.where(canvas.active & canvas.block_begins[:, 0], ends, canvas.block_until)

    @override
    def before_decision(self, canvas: Canvas, finding: Int[Array, "b"]) -> Canvas:
        """The canvas whose current blocks end there."""
        return dataclasses.replace(canvas, block_until=finding)
