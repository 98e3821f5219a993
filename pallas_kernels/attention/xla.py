"""Attention that returns its log-sum-exp, and statistics of its weights recomputed from that, by XLA.

These functions define the meaning of the operations; the kernels of the other files compute the same.
One boolean array that broadcasts to [b k q s] serves every mask: full bidirectional, padding, block-causal,
per head. Weights are not returned: a caller that needs them recomputes its part from `lse` (`received`,
`head_mean`). Where the scores of all queries would take more room than the platform has for them
(`SCORE_BYTES`, `SCORE_BYTES_ON_CUDA`), they are computed for a chunk of queries at a time, each of which
reads keys and values again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int, Num, PyTree

Mask = Bool[Array, "#b #k #q s"]

TURNS = 16  # into which a batch is divided at most: each adds to the program
SCORE_BYTES = 2**25  # float32 scores of a chunk of queries: 32 MiB fit the VMEM of TPUs
SCORE_BYTES_ON_CUDA = 2**28  # no L2 holds scores, pairs and results at once: the fewer chunks, the better
COPIED_BYTES = 2**26  # of pairs: copying fewer takes no longer than a branch, for which a GPU waits
FEW_QUERIES = 64  # those of partial steps, which read their pairs about once
AS_NAMED, HEADS_FIRST = Layout((0, 1, 2, 3)), Layout((0, 2, 1, 3))
AGAIN = "zeroed_again"  # name scope of what only hidden slots that are not finite run


def attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """Softmax attention with grouped query heads; scale 1/sqrt(d), scores and softmax in float32.

    Args:
      q: queries; head i reads KV head i // (h // k). No query influences another.
      k: keys, rotated.
      v: values.
      mask: True where a query may attend; None means everywhere. A slot that no query may attend to can
        hold anything, NaN included.
      lengths: each KV head may read its first `lengths` slots; None means all. With a mask, both must allow.
      chunk: queries at a time; None means as many as `queries_at_once` says.

    Returns:
      out in q's dtype, and lse = log sum exp of the scaled scores, float32. A query that may attend to
      nothing gives 0 and -inf.
    """
    mask, queries = both(mask, lengths, k), q.shape[1]
    if not k.shape[1]:
        return jnp.zeros_like(q), jnp.full((q.shape[0], q.shape[2], queries), -jnp.inf)
    on_tpu = _in_one_product if read_in_turns(q, k) else _products
    join = lambda out, lse: (_joined(out, 1, queries), _joined(lse, 2, queries))

    def attended(values):
        def attend(mask, q):
            # The division comes after the values: it is of [q d] then, not of [q s].
            weights, top = _exponentials(_scores(q, k, mask))
            out, total = jax.lax.platform_dependent(weights, values, tpu=on_tpu, default=_products)
            total, lse = _normalizer(top, total)
            out = jnp.moveaxis(out / total, 3, 1).reshape(q.shape).astype(q.dtype)
            return out, lse.reshape(q.shape[0], q.shape[2], q.shape[1])

        return _in_chunks(attend, lambda parts: join(*parts), chunk, k, mask, q)

    # Heads first, as a branch would read them from memory.
    seen = None if mask is None else jnp.any(mask, axis=2)[..., None]
    out, lse = without_hidden(attended, seen, queries, jnp.swapaxes(v, 1, 2))
    return out, lse


def without_hidden(
    attended: Callable[..., tuple[Array, ...]],
    seen: Bool[Array, "..."] | None,
    queries: int,
    *pairs: Float[Array, "b ..."],
) -> tuple[Array, ...]:
    """`attended(*pairs)` with zeros where no query may attend to a slot, as 0 * NaN is NaN.

    GPU programs write the zeroed pairs to memory before they read them. A few queries therefore attend to
    long lists of pairs as they are, and once more to zeroed ones if a result is not finite. Over a mesh pairs
    are always zeroed: devices would have to agree.

    Args:
      attended: Function of keys, values, or both, whose first result is their weighted mean. Other results
        do not depend on hidden slots.
      seen: True where a query may attend, shaped as `pairs` or broadcast to them; None means everywhere.
      queries: Number of queries per sequence.
      *pairs: Arguments of `attended`.
    """
    if seen is None:
        return attended(*pairs)
    zeroed = lambda *pairs: attended(*(jnp.where(seen, x, 0) for x in pairs))
    copied = sum(x.size * x.dtype.itemsize for x in pairs)
    if queries > FEW_QUERIES or copied < COPIED_BYTES or not jax.sharding.get_abstract_mesh().empty:
        return zeroed(*pairs)
    return jax.lax.platform_dependent(
        *pairs, cuda=functools.partial(_as_they_are, attended, zeroed), default=zeroed
    )


def _as_they_are(
    attended: Callable[..., tuple[Array, ...]], zeroed: Callable[..., tuple[Array, ...]], *pairs: Array
) -> tuple[Array, ...]:
    """`attended(*pairs)` if its first result is finite, else that of `zeroed(*pairs)`."""
    # The others stay out of the branch: who reads a log-sum-exp alone computes no weighted mean.
    output, *others = attended(*pairs)

    def again():
        with jax.named_scope(AGAIN):
            return zeroed(*pairs)[0]

    return jax.lax.cond(jnp.all(jnp.isfinite(output)), lambda: output, again), *others


def attention_by_sequence(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """`attention`, on TPUs in turns where all pairs take more than `SCORE_BYTES`.

    A turn is a sequence, of which many queries take as many KV heads at a time as have room: their pairs stay
    on the chip for all of its queries, and scores are not written. GPUs have no memory for them that
    programs can name: there, all sequences are computed at once. Over a mesh this is for a device's own
    sequences, and all of their heads: the partitioner would gather those of all devices. Arguments and
    results are those of `attention`; with a `chunk`, all sequences are computed at once too.
    """
    mask, all_heads = both(mask, lengths, k), k.shape[2]
    if chunk or _pair_bytes(k) <= SCORE_BYTES:
        return attention(q, k, v, mask, chunk=chunk)
    few = q.shape[1] <= _chunk(q[:1], k[:1], SCORE_BYTES)
    heads = all_heads if few or not jax.sharding.get_abstract_mesh().empty else _heads_at_once(k)
    if len(k) == 1 and heads == all_heads:
        return attention(q, k, v, mask)
    arrays = (q, k, v) if mask is None else (q, k, v, jnp.broadcast_to(mask, (len(q), *mask.shape[1:])))
    in_turn = _few_in_turn if few else functools.partial(_heads_in_turn, heads=heads)
    return jax.lax.platform_dependent(*arrays, tpu=in_turn, default=attention)


def _few_in_turn(*arrays: Array) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """`attention` of q, k, v and maybe a mask [b ...], sequence by sequence, of a few queries.

    Their pairs are read straight out of the stacked cache, if nothing makes XLA take those of all sequences
    out of it at once. So each turn waits for the one before it.
    """
    batch = len(arrays[0])
    done: list[tuple[Array, Array]] = []
    for part in np.array_split(np.arange(batch), min(batch, TURNS)):
        start = jnp.int32(part[0])
        if done:
            start, _ = jax.lax.optimization_barrier((start, done[-1]))
        q, k, v, *mask = (jax.lax.dynamic_slice_in_dim(x, start, len(part)) for x in arrays)
        done.append(attention(q, k, v, mask[0] if mask else None))
    return jnp.concatenate([out for out, _ in done]), jnp.concatenate([lse for _, lse in done])


def _heads_in_turn(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None = None,
    *,
    heads: int,
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """`attention` of a mask [b ...], `heads` KV heads of a sequence at a time."""
    (batch, queries, all_heads, head), turns = q.shape, k.shape[2] // heads
    group = heads * all_heads // k.shape[2]
    chunk = _chunk(q[:1, :, :group], k[:1, :, :heads], SCORE_BYTES)
    if turns > 1:
        # Else XLA turns the cache of all layers, from which a layer's pairs come, heads first in each layer:
        # LLaDA-8B at prompt 8192 on a v6e (jaxlib 0.10.2), a full step: 265 GB and 4.6 GB of memory more;
        # with it 124 GB.
        stated = lambda x: with_layout_constraint(with_layout_constraint(x, AS_NAMED), HEADS_FIRST)
        q, k, v = stated(q), stated(k), stated(v)

    def of_turn(turn):
        sequence, part = turn // turns, turn % turns

        def cut(x: Array, axis: int, size: int) -> Array:
            of_sequence = jax.lax.dynamic_slice_in_dim(x, sequence, 1)
            return jax.lax.dynamic_slice_in_dim(of_sequence, part * size, size, axis)

        masks = None
        if mask is not None:
            masks = cut(mask, 1, heads) if mask.shape[1] > 1 else mask[sequence][None]
        return attention(cut(q, 2, group), cut(k, 2, heads), cut(v, 2, heads), masks, chunk=chunk)

    out, lse = jax.lax.map(of_turn, jnp.arange(batch * turns))
    out = jnp.moveaxis(out.reshape(batch, turns, queries, group, head), 1, 2)
    return out.reshape(q.shape), lse.reshape(batch, all_heads, queries)


def _heads_at_once(k: Float[Array, "b s k d"]) -> int:
    """The most KV heads, a divisor of all, of which a sequence's pairs take no more than `SCORE_BYTES`."""
    heads, of_one = k.shape[2], _pair_bytes(k) // (k.shape[0] * k.shape[2])
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * of_one <= SCORE_BYTES))


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    chunk: int | None = None,
) -> Float[Array, "b k s"]:
    """Attention that each key receives from the weighted queries, summed over a KV head's query heads.

    Query positions of weight 0 may hold anything, NaN included, and so may slots that no query may attend to,
    which receive 0.

    Args:
      q: Queries given to `attention`.
      k: Keys given to `attention`.
      lse: log-sum-exp of the scaled scores, from `attention`.
      weight: Weight of each query position, float32.
      mask: Mask given to `attention`.
      lengths: Lengths given to `attention`.
      chunk: queries at a time; None means as many as `queries_at_once` says.
    """

    def send(mask, q, lse, weight):
        weights = _probabilities(q, k, jnp.swapaxes(lse, 1, 2), mask)

        # Chosen, not multiplied away: a query of weight 0 may hold NaN.
        weights = jnp.where(weight[:, None, None, :, None] != 0, weights, 0.0)
        return _einsum("bkgqs,bq->bks", weights, weight)

    add = functools.partial(jnp.sum, axis=0)
    return _in_chunks(send, add, chunk, k, both(mask, lengths, k), q, jnp.swapaxes(lse, 1, 2), weight)


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    chunk: int | None = None,
) -> Float[Array, "b q s"]:
    """Attention weights averaged over all query heads (attention rollout), float32.

    Arguments as of `received`. Slots that no query may attend to can hold anything and have weight 0.
    """

    def mean(mask, q, lse):
        weights = _probabilities(q, k, jnp.swapaxes(lse, 1, 2), mask)
        return jnp.mean(jax.lax.platform_dependent(weights, cpu=_apart, default=lambda x: x), axis=(1, 2))

    join = lambda parts: _joined(parts, 1, q.shape[1])
    return _in_chunks(mean, join, chunk, k, both(mask, lengths, k), q, jnp.swapaxes(lse, 1, 2))


def weights(
    q: Float[Array, "b q h d"], k: Float[Array, "b s k d"], mask: Mask | None = None
) -> Float[Array, "b h q s"]:
    """All attention weights of a few queries, float32; 0 for a query that may attend to nothing."""
    b, queries, heads = q.shape[:3]
    exponentials, top = _exponentials(_scores(q, k, mask))
    total, _ = _normalizer(top, jnp.sum(exponentials, axis=-1, keepdims=True))
    return (exponentials / total).reshape(b, heads, queries, k.shape[1])


def length_mask(lengths: Int[Array, "b k"], slots: int) -> Mask:
    """Each KV head may read its first `lengths` of `slots` cached pairs."""
    return jnp.arange(slots) < lengths[:, :, None, None]


def check_shapes(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    mask: Mask | None,
    lengths: Int[Array, "b k"] | None,
) -> None:
    """Refuses arrays whose shapes do not fit together.

    Raises:
      ValueError: query heads that are not a multiple of the KV heads, or a mask or lengths of another shape.
    """
    batch, slots, kv_heads, head = k.shape
    if q.shape[0] != batch or q.shape[3] != head or q.shape[2] % kv_heads:
        raise ValueError(f"queries {q.shape} do not go with keys {k.shape}")
    full = batch, kv_heads, q.shape[1], slots
    if mask is not None and (
        len(mask.shape) != 4
        or mask.shape[3] != slots
        or any(size not in (1, wanted) for size, wanted in zip(mask.shape, full, strict=True))
    ):
        raise ValueError(f"mask {mask.shape} must be {full}, or 1 along any axis but the last")
    if lengths is not None and lengths.shape != (batch, kv_heads):
        raise ValueError(f"lengths {lengths.shape} must be {(batch, kv_heads)}")


def queries_at_once(queries: int, batch: int, heads: int, slots: int, score_bytes: int = SCORE_BYTES) -> int:
    """How many queries to take at a time so that their scores take no more than `score_bytes`.

    All of them if there is room; else chunks of nearly the same size, multiples of 16, so that little is
    padding.

    Args:
      queries: Number of queries per sequence.
      batch: sequences.
      heads: query heads.
      slots: Number of slots per sequence.
      score_bytes: Maximum bytes of the float32 scores.
    """
    # float32 scores: 4 bytes for each head, query and slot.
    room = score_bytes // max(4 * batch * heads * slots, 1)
    if queries <= room:
        return queries
    # No chunk is larger than a power of two: the hardware multiplies tiles.
    largest = max(16, 1 << max(room.bit_length() - 1, 0))
    chunks = -(-queries // largest)
    return 16 * -(-queries // (16 * chunks))


def read_in_turns(q: Float[Array, "b q h d"], k: Float[Array, "b s k d"]) -> bool:
    """Whether chunks of the queries read the same pairs in turn, and a TPU's VMEM holds all of these."""
    scores = 4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1]
    return _pair_bytes(k) <= SCORE_BYTES < scores


def _chunk(q: Float[Array, "b q h d"], k: Float[Array, "b s k d"], score_bytes: int) -> int:
    # Scores as large as all pairs cost less where they lie in main memory than in another chunk.
    return queries_at_once(q.shape[1], q.shape[0], q.shape[2], k.shape[1], max(score_bytes, _pair_bytes(k)))


def _pair_bytes(k: Float[Array, "b s k d"]) -> int:
    return 2 * k.size * k.dtype.itemsize


def both(mask: Mask | None, lengths: Int[Array, "b k"] | None, k: Float[Array, "b s k d"]) -> Mask | None:
    """Combines the mask and the lengths; None if neither is given."""
    if lengths is None:
        return mask
    within = length_mask(lengths, k.shape[1])
    return within if mask is None else mask & within


def _scores(q, k, mask) -> Float[Array, "b k g q s"]:
    """Scaled products of the g query heads of each KV head; -inf where masked."""
    # Heads first, written out: else XLA's CPU compiler turns the scores around instead of q and k.
    b, queries, heads, head = q.shape
    kv_heads = k.shape[2]
    grouped = jnp.moveaxis(q.reshape(b, queries, kv_heads, heads // kv_heads, head), 1, 3)
    scores = _einsum("bkgqd,bksd->bkgqs", grouped, jnp.swapaxes(k, 1, 2), out=jnp.float32) * head**-0.5
    return scores if mask is None else jnp.where(mask[:, :, None], scores, -jnp.inf)


def _exponentials(
    scores: Float[Array, "b k g q s"],
) -> tuple[Float[Array, "b k g q s"], Float[Array, "b k g q 1"]]:
    """Softmax before its division: exp(score - top), 0 where the score is -inf; and top, the best score."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    return jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), top


def _normalizer(
    top: Float[Array, "b k g q 1"], total: Float[Array, "b k g q 1"]
) -> tuple[Float[Array, "b k g q 1"], Float[Array, "b k g q 1"]]:
    """Returns the divisor and the log-sum-exp of the scores: 1 and -inf where all of them are -inf."""
    safe = jnp.where(total > 0, total, 1.0)
    return safe, jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)


def _products(
    weights: Float[Array, "b k g q s"], values: Float[Array, "b k s d"]
) -> tuple[Float[Array, "b k g q d"], Float[Array, "b k g q 1"]]:
    """The values added up by their weights, and the weights added up, float32."""
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return _einsum("bkgqs,bksd->bkgqd", weights.astype(values.dtype), values, out=jnp.float32), total


def _in_one_product(
    weights: Float[Array, "b k g q s"], values: Float[Array, "b k s d"]
) -> tuple[Float[Array, "b k g q d"], Float[Array, "b k g q 1"]]:
    """`_products` by one product, with the values and a column of ones: TPUs add along the slots slowly.

    The sum is then of the weights as they meet the values, in the dtype of these. Of few queries it gains
    little, and stored values would be copied to the order in which it reads them.
    """
    with_ones = jnp.concatenate([values, jnp.ones_like(values[..., :1])], axis=-1)
    both = _einsum("bkgqs,bksd->bkgqd", weights.astype(values.dtype), with_ones, out=jnp.float32)
    return both[..., :-1], both[..., -1:]


def _apart(weights: Float[Array, "b k g q s"]) -> Float[Array, "b k g q s"]:
    """The same weights, computed before they are reduced.

    XLA's CPU compiler would fuse exp into a reduction over heads, which is ten times slower.
    """
    return jax.lax.optimization_barrier(weights)


def _probabilities(q, k, lse, mask) -> Float[Array, "b k g q s"]:
    """exp(score - lse); 0 for a query that may attend to nothing."""
    scores = _scores(q, k, mask)
    lse = lse.reshape(*scores.shape[:4], 1)
    return jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, jnp.inf))


def _einsum(formula: str, x: Float[Array, "..."], y: Float[Array, "..."], out=None) -> Float[Array, "..."]:
    """`jnp.einsum`, float32 at full precision (no TF32), narrower types at the hardware's default."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(formula, x, y, precision=precision, preferred_element_type=out)


def _in_chunks(
    function: Callable[..., PyTree[Array]],
    combine: Callable[[PyTree[Array]], PyTree[Array]],
    chunk: int | None,
    k: Float[Array, "b s k d"],
    mask: Mask | None,
    q: Float[Array, "b q h d"],
    *arrays: Num[Array, "b q ..."],
) -> Any:
    """`function(mask, q, *arrays)`, or `combine` of its results for chunks of the queries.

    Args:
      function: Function of a mask and arrays of some queries.
      combine: takes the results of all chunks, stacked [n ...].
      chunk: queries at a time; None means as many as the platform has room for.
      k: keys that every query reads.
      mask: queries on axis 2, or 1 for all of them; None stays None.
      q: queries.
      *arrays: more of them, queries on axis 1.
    """

    def by(size: int) -> Callable[..., Any]:
        if q.shape[1] <= size:
            return function
        return lambda *parts: combine(_over_chunks(function, size, *parts))

    usual, on_cuda = (chunk or _chunk(q, k, room) for room in (SCORE_BYTES, SCORE_BYTES_ON_CUDA))
    if usual == on_cuda:
        return by(usual)(mask, q, *arrays)
    return jax.lax.platform_dependent(mask, q, *arrays, cuda=by(on_cuda), default=by(usual))


def _over_chunks(
    function: Callable[..., PyTree[Array]],
    chunk: int,
    mask: Mask | None,
    *arrays: Num[Array, "b q ..."],
) -> Any:
    """`function(mask, *arrays)` for each chunk of the queries, results stacked [n ...].

    Args:
      function: Function of a mask and arrays of `chunk` queries.
      chunk: queries at a time; the last chunk is padded with zeros that may attend to nothing.
      mask: queries on axis 2, or 1 for all of them; None stays None.
      *arrays: queries on axis 1.
    """
    split = [_split(array, 1, chunk) for array in arrays]
    if mask is None or mask.shape[2] == 1:
        return jax.lax.map(lambda parts: function(mask, *parts), split)
    return jax.lax.map(lambda parts: function(*parts), [_split(mask, 2, chunk), *split])


def _joined(stacked: Num[Array, "n *rest"], axis: int, queries: int) -> Array:
    """[n ... chunk ...] as [... queries ...], the queries on `axis`."""
    parts = jnp.moveaxis(stacked, 0, axis)
    whole = parts.reshape(*parts.shape[:axis], -1, *parts.shape[axis + 2 :])
    return jax.lax.slice_in_dim(whole, 0, queries, axis=axis)


def _split(array: Array, axis: int, chunk: int) -> Array:
    """[... queries ...] as [n ... chunk ...], padded with zeros."""
    n = -(-array.shape[axis] // chunk)
    widths = [(0, n * chunk - array.shape[axis] if i == axis else 0) for i in range(array.ndim)]
    parts = jnp.pad(array, widths).reshape(*array.shape[:axis], n, chunk, *array.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)
