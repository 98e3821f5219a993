"""The shifted head: the output at position i predicts token i + 1 (Dream) rather than token i (LLaDA).

Dream was made from an autoregressive model and kept its head. Canvas, samplers, likelihoods and training ask
here which output predicts a token; no policy has to.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.spec import ModelSpec


def predictors(valid: Bool[Array, "b l"], spec: ModelSpec) -> Int[Array, "b l"]:
    """The position whose output predicts each position: its left neighbor where the head is shifted.

    A position without a left neighbor (the first one, or the first after padding) predicts itself, as in
    Dream's reference.

    Args:
      valid: False at padding.
      spec: the model.
    """
    places = jnp.broadcast_to(jnp.arange(valid.shape[1]), valid.shape)
    if not spec.shifted:
        return places
    return jnp.where(_has_left(valid), places - 1, places)


def predicts_itself(spec: ModelSpec) -> bool:
    """Whether each position's own output predicts it in every step (`Canvas.predictor`)."""
    return not spec.shifted and not spec.context.has_causal_passes


def predicting_positions(
    positions: Bool[Array, "b l"], valid: Bool[Array, "b l"], spec: ModelSpec
) -> Bool[Array, "b l"]:
    """The set of positions whose output predicts these positions; see `predictors`."""
    if not spec.shifted:
        return positions
    # The first token predicts itself, and its right neighbor.
    has_left = _has_left(valid)
    of_right = jnp.pad((positions & has_left)[:, 1:], ((0, 0), (0, 1)))
    return of_right | (positions & ~has_left)


def by_predictor(values: Float[Array, "b l"], spec: ModelSpec) -> Float[Array, "b l"]:
    """The value of the token that each position predicts, 0 where it predicts none: the right neighbor's.

    A first token that predicts itself has the value of its right neighbor, which it predicts too.
    """
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1))) if spec.shifted else values


def _has_left(valid: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
    """Marks positions whose left neighbor is on the canvas and no padding."""
    return jnp.pad(valid[:, :-1], ((0, 0), (1, 0)))


def first_predictor(position: int, spec: ModelSpec) -> int:
    """The position whose output predicts a token at `position` that has a left neighbor."""
    return position - int(spec.shifted)
