"""Elastic-Cache's drift test in its two readings (arXiv:2510.14973, section 3.3): has attention moved?

Both compare the attention of the tracked (most attended) tokens before and after the step.
"""

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.layer import LayerIndex
from dllm_jax.options import Options
from dllm_jax.state.rows import Rows, compact
from dllm_jax.xla.stacks import of_layer

EPS = 1e-8  # norms below it count as it, as in torch's cosine_similarity


class Drift(NamedTuple):
    """State of the drift test.

    Attributes:
      attended: the positions each layer attended to most in the sequence's last step, l = none.
      coming: the same for the current step.
      start: the first layer that the sequence's last step computed for all positions; n = none.
      similarity: result of each layer's test in that step; infinity where the layer did not test.
    """

    attended: Int[Array, "b n track"]
    coming: Int[Array, "b n track"]
    start: Int[Array, "b"]
    similarity: Float[Array, "b n"]


@dataclasses.dataclass(frozen=True)
class DriftTest(Options, abc.ABC):
    """Selects tracked tokens and compares their attention before and after a step."""

    @abc.abstractmethod
    def tokens(self, attended: Int[Array, "b n track"], layer: LayerIndex, length: int) -> Int[Array, "b t"]:
        """The positions that a layer tests, l = none.

        Args:
          attended: the tracked tokens of every layer, l = none.
          layer: index of the layer.
          length: canvas positions l.
        """

    @abc.abstractmethod
    def cosine(
        self, old: Float[Array, "b h t s"], new: Float[Array, "b h t s"], keys: Bool[Array, "b s"]
    ) -> Float[Array, "b t"]:
        """Similarity of each tested token's attention weights before and after the step.

        Args:
          old: attention weights before the step.
          new: after it.
          keys: keys that are not padding.
        """

    def similarity(
        self,
        old: Float[Array, "b h t s"],
        new: Float[Array, "b h t s"],
        tested: Bool[Array, "b t"],
        keys: Bool[Array, "b s"],
    ) -> Float[Array, "b"]:
        """Mean similarity of the tested tokens; without any, infinity, which is below no threshold.

        Args:
          old: attention weights before the step.
          new: after it.
          tested: entries of t that are tokens.
          keys: keys that are not padding.
        """
        return _mean(self.cosine(old, new, keys), tested)


@dataclasses.dataclass(frozen=True)
class HeadCosine(DriftTest):
    """As released: every layer tests the tokens of all layers, by the cosine along the head axis.

    sigma(token, key) = cos over heads of (A_old, A_new), mean over keys. The vectors hold small positive
    numbers, so values are close to 1 and not comparable with `KeyCosine`.
    """

    @override
    def tokens(self, attended: Int[Array, "b n track"], layer: LayerIndex, length: int) -> Int[Array, "b t"]:
        """The tracked tokens of all layers, each once, in order of position."""
        # At most `track` tokens a layer, and no more than the canvas has: a static bound of the union's size.
        union = members(attended, length)
        return compact(union, min(length, attended.shape[1] * attended.shape[2]))

    @override
    def cosine(
        self, old: Float[Array, "b h t s"], new: Float[Array, "b h t s"], keys: Bool[Array, "b s"]
    ) -> Float[Array, "b t"]:
        """The mean over keys of the cosine along the head axis, whose vectors have one entry per head."""
        return _mean(_cosine(old, new, axis=1), keys[:, None, :])


@dataclasses.dataclass(frozen=True)
class KeyCosine(DriftTest):
    """As the paper words it (eq. 6): a layer tests its own tokens, by the cosine of their attention vectors.

    Weights are averaged over heads, the cosine is over keys.
    """

    @override
    def tokens(self, attended: Int[Array, "b n track"], layer: LayerIndex, length: int) -> Int[Array, "b t"]:
        """The tokens that this layer itself attended to most."""
        return of_layer(attended, layer, axis=1)

    @override
    def cosine(
        self, old: Float[Array, "b h t s"], new: Float[Array, "b h t s"], keys: Bool[Array, "b s"]
    ) -> Float[Array, "b t"]:
        """Equation 6: the cosine over keys of weights averaged over heads."""
        # Padding has weight 0 in both vectors, so `keys` changes nothing.
        return _cosine(jnp.mean(old, axis=1), jnp.mean(new, axis=1), axis=-1)


def members(attended: Int[Array, "b n track"], length: int) -> Bool[Array, "b l"]:
    """The tracked positions of all layers as a set."""
    return Rows(attended.reshape(attended.shape[0], -1), length).mask()


def most_attended(
    votes: Float[Array, "b l"], candidates: Bool[Array, "b l"], track: int
) -> Int[Array, "b track"]:
    """The candidates with most votes, ties to the lower position; l where there are too few."""
    # Of equal votes, `top_k` takes that of the lower index first.
    length = votes.shape[1]
    value, index = jax.lax.top_k(jnp.where(candidates, votes, -jnp.inf), min(track, length))
    return jnp.where(value > -jnp.inf, index, length)


def _cosine(x: Float[Array, "..."], y: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    # Each norm is bounded on its own, as torch does, rather than their product.
    norm = lambda v: jnp.maximum(jnp.sqrt(jnp.sum(v * v, axis=axis)), EPS)
    return jnp.sum(x * y, axis=axis) / (norm(x) * norm(y))


def _mean(x: Float[Array, "..."], where: Bool[Array, "..."]) -> Float[Array, "..."]:
    """The mean over the last axis of the marked entries, infinity without any."""
    where = jnp.broadcast_to(where, x.shape)
    # Not NaN: the result is in a cache, and `jax_debug_nans` looks at caches between programs.
    return jnp.where(jnp.any(where, axis=-1), jnp.mean(x, axis=-1, where=where), jnp.inf)
