"""Choosing positions: the best by a score, scores of keys, pooling within a set, fractions of its size.

`dllm_jax.state.rows.compact` turns a chosen set into a list of positions.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.arithmetic import einsum
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import compact, gather, order_of
from dllm_jax.traced import Count, Number
from dllm_jax.xla.products import divided
from pallas_kernels.topk_evict import xla as topk
from pallas_kernels.topk_evict.xla import ranks as ranks


def best(priority: Float[Array, "b c"], count: Int[Array, "b"] | int) -> Bool[Array, "b c"]:
    """The `count` largest entries of each sequence, ties to the lower index, and never one of -inf or NaN."""
    count = jnp.broadcast_to(jnp.asarray(count, jnp.int32), len(priority))
    return topk.best(priority, count[:, None])


def leftmost(positions: Bool[Array, "b l"], count: Count) -> Bool[Array, "b l"]:
    """The first `count` positions of each sequence's set; all of it if it has no more."""
    return positions & (jnp.cumsum(positions, axis=1) <= count)


def mean_query_score(
    q: Float[Array, "b q h d"], k: Float[Array, "b s k d"], among: Bool[Array, "b q"]
) -> Float[Array, "b s"]:
    """Product of each key with the mean of the queries in `among`, mean over query heads; float32, no scale.

    Queries outside of `among` may hold anything, NaN included.
    """
    # The mean query first: q k^T is linear, so no [q s] scores are needed. Selected rather than multiplied by
    # 0, because 0 * NaN is NaN.
    b, _, heads, head = q.shape
    kv_heads = k.shape[2]
    wide = jnp.where(among[..., None, None], q, 0).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(among, axis=1), 1)[:, None, None]
    mean = jnp.sum(wide, axis=1) / count

    # The mean over query heads commutes with the product too: the queries of a kv head's group are summed.
    grouped = jnp.sum(mean.reshape(b, kv_heads, heads // kv_heads, head), axis=2) / heads
    return einsum("bkd,bskd->bs", grouped, k)


def max_pool(score: Float[Array, "b l"], among: Bool[Array, "b l"], kernel: int) -> Float[Array, "b l"]:
    """Maximum over `kernel` neighbors within `among`; positions outside of the set are skipped over.

    Args:
      score: may hold anything outside of `among`.
      among: the members; -inf is returned elsewhere.
      kernel: odd window; 1 does not pool. The window is cut off at the ends of the set.
    """
    # Members are packed side by side, so that those next to a gap are neighbors, pooled, and put back.
    # A window beyond both ends of the line holds all of it.
    length = score.shape[1]
    kernel = min(kernel, 2 * length - 1)
    index = compact(among, length)
    packed = jnp.where(index < length, gather(score, index), -jnp.inf)
    pooled = jax.lax.reduce_window(packed, -jnp.inf, jax.lax.max, (1, kernel), (1, 1), "SAME")
    return jnp.where(among, gather(pooled, jnp.maximum(order_of(among), 0)), -jnp.inf)


def fraction_of(
    size: Int[Array, "b"], ratio: float | tuple[float, ...], upper: int
) -> Int[Array, "*ratios b"]:
    """int(size * ratio) for sizes up to `upper`, the product rounded as Python rounds it (100 * 0.29 -> 28).

    Of several ratios, one after the other. Looked up in a table, because devices have no doubles.
    """
    of = lambda ratio: [int(n * ratio) for n in range(upper + 1)]
    table = [of(share) for share in ratio] if isinstance(ratio, tuple) else of(ratio)
    return jnp.asarray(table, jnp.int32)[..., size]


def certainty_density(canvas: Canvas, index: Int[Array, "b c"], sigma: Number) -> Float[Array, "b c"]:
    """Gaussian-weighted fraction of known tokens around each position, in [0, 1], float32.

    D(i) = sum_j phi(i - j) known(j) / Z, phi(x) = exp(-x^2 / 2 sigma^2), over the response (G positions), G
    virtual known positions to its left and G to its right, known iff the response's last position is. Z is
    the sum of phi(x) for x = -3G .. 3G - 1. The paper's eq. 3 has neither Z nor the virtual positions; the
    reference implementation does.
    """
    # The virtual positions: G known ones to the left; to the right G that are as the last response position.
    g, prompt = canvas.layout.response, canvas.layout.prompt
    known = ~canvas.masked[:, prompt:]
    ends = jnp.broadcast_to(known[:, -1:], known.shape)
    extended = jnp.concatenate([jnp.ones_like(known), known, ends], axis=1).astype(jnp.float32)

    # Summed directly in float32; the released code's FFT has noise of 1e-7 and may fall below 0.
    phi = lambda distance: jnp.exp(-divided(distance.astype(jnp.float32) ** 2, 2 * sigma**2))
    place, far = jnp.arange(-g, 2 * g), jnp.arange(-3 * g, 3 * g)
    total = jnp.sum(phi(far))
    if not prompt and canvas.layout.padded:  # G of a template is its own number of positions
        size = g - canvas.first_position[:, None]
        extended *= (place >= g - 2 * size) & (place < g + size)
        total = jnp.sum(phi(far) * ((far >= -3 * size) & (far < 3 * size)), axis=1, keepdims=True)
    distance = (index - prompt)[:, :, None] - place
    return jnp.einsum("bcj,bj->bc", phi(distance), extended, precision="highest") / total
