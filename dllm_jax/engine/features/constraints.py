"""Constraints of the answer: tokens that positions may take, from the start or by the canvas of each step."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.engine.features.counts import masks_left
from dllm_jax.engine.generation import Feature, Generation
from dllm_jax.engine.stats import Record
from dllm_jax.samplers.constraint import Constraint
from dllm_jax.state.canvas import Canvas


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AllowedTokens(Feature):
    """Rules out tokens by sets of the request (`Inputs.allowed`)."""

    name: ClassVar[str] = "allowed"

    @override
    def constrain(
        self, generation: Generation, canvas: Canvas, index: Int[Array, "b c"], logits: Float[Array, "b c v"]
    ) -> tuple[Float[Array, "b c v"], Bool[Array, "b c"] | None]:
        """The logits with -inf at tokens that are not allowed, in float32."""
        assert generation.allowed is not None, "sets of the request"
        return jnp.where(generation.allowed.at(index), logits.astype(jnp.float32), -jnp.inf), None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constrained(Feature):
    """Rules out tokens by the canvas of each step; counts the masks that it leaves without a token.

    Attributes:
      constraints: Constraints that look at the canvas of each step.
    """

    constraints: tuple[Constraint, ...]

    name: ClassVar[str] = "unfilled_tokens"

    @override
    def constrain(
        self, generation: Generation, canvas: Canvas, index: Int[Array, "b c"], logits: Float[Array, "b c v"]
    ) -> tuple[Float[Array, "b c v"], Bool[Array, "b c"] | None]:
        """The logits with -inf at tokens that are not allowed, and positions that no token is allowed to.

        Those wait (`Constraint.allowed`).
        """
        fixed = generation.allowed
        allowed = fixed.at(index) if fixed else jnp.ones(logits.shape, bool)
        for constraint in self.constraints:
            allowed &= constraint.allowed(canvas, index)
        # [MASK] decodes nothing, nor does an end-of-text that the sampler rules out.
        never = [canvas.spec.mask_id, *[canvas.spec.eos_id] * generation.plan.sampler.logits_eos_inf]
        of_text = jnp.all(jnp.arange(logits.shape[-1])[:, None] != jnp.asarray(never), axis=1)
        waits = ~jnp.any(allowed & of_text, axis=2)
        allowed |= waits[..., None]  # no proposal there is decoded
        return jnp.where(allowed, logits.astype(jnp.float32), -jnp.inf), waits

    @override
    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """`Stats.unfilled_tokens`."""
        left = masks_left(record, canvas, tokens)
        return {self.name: jnp.sum(left, axis=1, dtype=jnp.int32)}
