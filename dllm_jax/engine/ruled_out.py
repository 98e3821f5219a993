"""Constrained logits: every token that a request does not allow is ruled out before the sampler sees them."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.generation import Generation
from dllm_jax.state.canvas import Canvas


def constrain_logits(
    generation: Generation, canvas: Canvas, index: Int[Array, "b c"], logits: Float[Array, "b c v"]
) -> tuple[Float[Array, "b c v"], Bool[Array, "b c"]]:
    """The logits with -inf at tokens that are not allowed, in float32; unchanged without constraints.

    Args:
      generation: the constants.
      canvas: state before the step.
      index: Canvas positions of the logits, l = padding.
      logits: guided logits.

    Returns:
      the logits, and positions that no token is allowed to: they wait (`Constraint.allowed`).
    """
    fixed, constraints = generation.allowed, generation.plan.constraints
    waits = jnp.zeros(index.shape, bool)
    if not (fixed or constraints):
        return logits, waits
    allowed = fixed.at(index) if fixed else jnp.ones(logits.shape, bool)
    for constraint in constraints:
        allowed &= constraint.allowed(canvas, index)
    if constraints:
        # [MASK] decodes nothing, nor does an end-of-text that the sampler rules out.
        never = [canvas.spec.mask_id, *[canvas.spec.eos_id] * generation.plan.sampler.logits_eos_inf]
        of_text = jnp.all(jnp.arange(logits.shape[-1])[:, None] != jnp.asarray(never), axis=1)
        waits = ~jnp.any(allowed & of_text, axis=2)
        allowed |= waits[..., None]  # no proposal there is decoded
    return jnp.where(allowed, logits.astype(jnp.float32), -jnp.inf), waits
