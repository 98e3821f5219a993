"""Query rows a chunk at a time, so that the scores of a long prompt are never all in memory at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Num, PyTree

SCORE_BYTES = 2**28  # float32 scores of a chunk: 256 MiB


def rows_at_once(batch: int, heads: int, slots: int) -> int:
    """Query rows whose scores fit into `SCORE_BYTES`: a power of two, at least 16."""
    fitting = SCORE_BYTES // max(4 * batch * heads * slots, 1)
    return max(16, 1 << max(fitting.bit_length() - 1, 0))


def over_chunks(
    function: Callable[..., PyTree[Array]],
    chunk: int,
    mask: Bool[Array, "#b #k #q s"] | None,
    *arrays: Num[Array, "b q ..."],
) -> Any:
    """`function(mask, *arrays)` for each chunk of the rows, results stacked [n ...].

    Args:
      function: of a mask and arrays that have `chunk` rows.
      chunk: rows at a time; the last chunk is padded with zeros, and with rows that may attend to nothing.
      mask: rows on axis 2, or 1 for all of them; None stays None.
      *arrays: rows on axis 1.
    """
    split = [_split(array, 1, chunk) for array in arrays]
    if mask is None or mask.shape[2] == 1:
        return jax.lax.map(lambda parts: function(mask, *parts), split)
    return jax.lax.map(lambda parts: function(*parts), [_split(mask, 2, chunk), *split])


def joined(stacked: Num[Array, "n *rest"], axis: int, rows: int) -> Array:
    """[n ... chunk ...] as [... rows ...], the rows on `axis`."""
    parts = jnp.moveaxis(stacked, 0, axis)
    whole = parts.reshape(*parts.shape[:axis], -1, *parts.shape[axis + 2 :])
    return jax.lax.slice_in_dim(whole, 0, rows, axis=axis)


def _split(array: Array, axis: int, chunk: int) -> Array:
    """[... rows ...] as [n ... chunk ...], padded with zeros."""
    n = -(-array.shape[axis] // chunk)
    widths = [(0, n * chunk - array.shape[axis] if i == axis else 0) for i in range(array.ndim)]
    parts = jnp.pad(array, widths).reshape(*array.shape[:axis], n, chunk, *array.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)
