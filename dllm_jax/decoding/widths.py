"""Static widths: which ones a policy's partial steps are compiled for, and which one a step takes."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.policies.base import Policy
from dllm_jax.state.layout import Layout


def step_widths(
    policy: Policy, spec: ModelSpec, layout: Layout, override: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Static widths of the partial steps, ascending; none if the policy recomputes everything.

    Widths change speed, never what is computed. What fits no narrower width is computed in place on the full
    canvas. The default layer can do that for any set of positions; a policy with a `layer` of its own may
    treat a full step as one in which every sequence computes everything, so it also gets a partial step as
    wide as the canvas.

    Args:
      policy: proposes widths.
      spec: the model.
      layout: the geometry.
      override: the user's, in place of the policy's.

    Raises:
      ValueError: a width that is no whole number of at least 1; one beyond the canvas is the canvas.
    """
    if override is not None:
        override = check_argument("widths", override, tuple[PositiveInt, ...])
    if not policy.reuses:
        return ()
    # Widths of at least the canvas run no faster than the step over the canvas in place.
    proposed = policy.widths(spec, layout) if override is None else override
    check_argument("widths", tuple(proposed), tuple[PositiveInt, ...])
    partial = {int(width) for width in proposed if width < layout.length}
    if type(policy).layer is not Policy.layer:
        partial.add(layout.length)
    return tuple(sorted(partial))


def narrowest_variant(
    widths: tuple[int, ...], need: Bool[Array, "b l"], active: Bool[Array, "b"]
) -> Int[Array, ""]:
    """An index into the widths for a step over these positions, or their number for the full canvas.

    That is the narrowest width that holds what every sequence needs; the full canvas if nothing narrower does
    or every active sequence needs all of it. Either way a sequence computes what it needs and no more.
    """
    everything = jnp.all(need | ~active[:, None])
    widest = jnp.max(jnp.sum(need, axis=1))
    narrowest = sum(((widest > width).astype(jnp.int32) for width in widths), start=jnp.int32(0))
    return jnp.where(everything, len(widths), narrowest)
