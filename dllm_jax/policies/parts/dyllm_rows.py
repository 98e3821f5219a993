"""Storage of DyLLM's layers, and the rows of which a step computes keys, values and MLP outputs."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.cache import KV, LayerCache
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows
from dllm_jax.xla.order import same_in_all_loops

NARROW, EVERY = "narrow", "every"  # phases: salient rows are gathered where they are few, or run in place


class SalienceStore(NamedTuple):
    """The layers' storage for all positions, stacked.

    Attributes:
      k: Rotated keys.
      v: Values.
      attention: Attention outputs of all heads, before the output projection; float32, as they are summed up.
      mlp: Outputs of the MLP branch.
    """

    k: Float[Array, "n b l k d"]
    v: Float[Array, "n b l k d"]
    attention: Float[Array, "n b l h d"]
    mlp: Float[Array, "n b l m"]

    @staticmethod
    def zeros(spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> "SalienceStore":
        """Empty storage."""
        places = spec.layers, batch, layout.length
        attention = jnp.zeros((*places, spec.heads, spec.head_dim), jnp.float32)
        pairs = KV.zeros(spec, batch, layout.length, dtype, scattered=False)
        attention = same_in_all_loops(attention, scattered=False)
        return SalienceStore(*pairs, attention, jnp.zeros((*places, spec.width), dtype))


def widths(rows: Rows) -> tuple[int, ...]:
    """Returns the widths that salient rows run in: a quarter of the step's too, where that saves time."""
    every = rows.index.shape[1]
    return (every // 4, every) if rows.phase == NARROW and every >= 4 else (every,)


def stored(cache: LayerCache, **parts: Float[Array, "b q *d"]) -> LayerCache:
    """Returns the cache with what a step's rows, the last of the canvas or all, store.

    Of rows that change nothing it is what was stored. So no single slots are written, and arrays lie in one
    order in the loops of full and of partial steps (`dllm_jax.xla.order.same_in_all_loops`).
    """
    for name, new in parts.items():
        cache, _ = cache.write_last(new, name)
    return cache


def salient(
    new: Float[Array, "b q h d"], old: Float[Array, "b q h d"], tau: Any, whole: Bool[Array, "b 1"]
) -> Bool[Array, "b q"]:
    """Returns the rows whose attention output has turned by more than tau; in whole steps all."""
    flat = lambda a: a.reshape(*a.shape[:2], -1)
    new, old = flat(new), flat(old)
    norms = jnp.maximum(jnp.sum(new * new, -1), 1e-8) * jnp.maximum(jnp.sum(old * old, -1), 1e-8)
    return (jnp.sum(new * old, axis=-1) / jnp.sqrt(norms) < tau) | whole
