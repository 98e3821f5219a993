"""`sparse_gather` for TPUs (Pallas, Mosaic): all slots of a head lie in VMEM, and are copied one by one.

A DMA per slot does not compile in bfloat16, two slots of which share each 32-bit word; a grid step per slot
moves little; and with one-hot products 0 times NaN is no zero. Here a head's K or V comes in as a whole, and
slots are read and written as words, bfloat16 cut out of its word: bits move, nothing is computed.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_gather.xla import check_shapes

LANES, SUBLANES = 128, 16  # of a tile in VMEM: 16 x 128 numbers are one bfloat16 tile, two float32 tiles
CHUNK = 256  # slots turned into words at a time
MOST_BYTES = 2**23  # of a head's slots, and of its copies: one to move, one to load or store, one of words
VMEM_BYTES = 56 * 2**20


def sparse_gather(
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    index: Int[Array, "b #k w"],
    interpret: bool = False,
) -> tuple[Float[Array, "b w k d"], Float[Array, "b w k d"]]:
    """As `xla.sparse_gather`; all of K and V is read once, and wanted heads first, see `attention/tpu.py`.

    Raises:
      NotImplementedError: a head's keys or its copies exceed 8 MiB (bfloat16, d = 128: 32 768 slots), no
        copies, or other dtypes than float32 and bfloat16.
    """
    check_shapes(k, v, index)
    _check_supported(k, index)
    of_each_head = lambda x: _gather(jnp.swapaxes(x, 1, 2), index.astype(jnp.int32), interpret)
    return jnp.swapaxes(of_each_head(k), 1, 2), jnp.swapaxes(of_each_head(v), 1, 2)


def _gather(x: Float[Array, "b k s d"], index: Int[Array, "b #k w"], interpret: bool):
    """The copies of keys or values [b k w d]; one program of the grid makes those of one KV head."""
    batch, heads, slots, head = x.shape
    count, per_word = index.shape[2], 4 // x.dtype.itemsize
    index = jnp.pad(index, ((0, 0), (0, 0), (0, -count % SUBLANES)), constant_values=slots)
    width = index.shape[2]
    chunk = min(CHUNK, pl.cdiv(slots, SUBLANES) * SUBLANES)
    filled = pl.cdiv(slots, chunk) * chunk

    # All slots of kv head h, filled up to whole chunks; and all its copies.
    of_head = lambda count: pl.BlockSpec((1, 1, count, head), lambda b, h: (b, h, 0, 0))
    # Which slots to copy, as scalars: a line per sequence and head, or one for all heads, since SMEM takes a
    # line as a whole.
    lines = index.shape[1]
    of_line = lambda b, h: (b * lines + (h if lines > 1 else 0), 0, 0)
    lists = pl.BlockSpec((1, 1, width), of_line, memory_space=pltpu.SMEM)
    return pl.pallas_call(
        functools.partial(_kernel, slots=slots, chunk=chunk),
        grid=(batch, heads),
        in_specs=[lists, of_head(filled)],
        out_specs=of_head(width),
        out_shape=jax.ShapeDtypeStruct((batch, heads, count, head), x.dtype),
        # The slots and the copies as words: of bfloat16, two slots share a word.
        scratch_shapes=[pltpu.VMEM((count // per_word, head), jnp.int32) for count in (filled, width)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="sparse_gather",
    )(index.reshape(-1, 1, width), x)


def _kernel(index_ref, x_ref, out_ref, source, target, *, slots, chunk):
    """Turns a head's slots into words, moves the words of each copy, and turns them back."""
    per_word = 4 // x_ref.dtype.itemsize

    # bitcast takes two neighboring bfloat16 slots into the low and the high half of a word.
    @pl.loop(0, x_ref.shape[2] // chunk)
    def _(i):
        part = x_ref[0, 0, pl.ds(pl.multiple_of(i * chunk, SUBLANES), chunk), :]
        words = pl.ds(pl.multiple_of(i * (chunk // per_word), SUBLANES // 2), chunk // per_word)
        source[words, :] = pltpu.bitcast(part, jnp.int32)

    # Copies j, or 2j and 2j + 1 in the halves of one word.
    @pl.loop(0, target.shape[0])
    def _(j):
        bits = [_slot(source, index_ref[0, 0, j * per_word + n], slots, per_word) for n in range(per_word)]
        target[pl.ds(j, 1), :] = bits[0] if per_word == 1 else bits[0] | (bits[1] << 16)

    out_ref[0, 0] = pltpu.bitcast(target[...], out_ref.dtype)


def _slot(source, place, slots, per_word):
    """The numbers of slot `place` of what `source` holds as words, in their low bits; 0 beyond the slots."""
    place, real = jnp.minimum(place, slots - 1), place < slots
    words = source[pl.ds(place >> (per_word - 1), 1), :]
    if per_word == 2:
        words = (words >> jnp.broadcast_to((place & 1) * 16, words.shape)) & 0xFFFF
    return jnp.where(real, words, 0)


def _check_supported(k: Float[Array, "b s k d"], index: Int[Array, "b #k w"]) -> None:
    if k.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"{k.dtype}: float32 or bfloat16")
    if not index.shape[2]:
        raise NotImplementedError("no copies")
    most = MOST_BYTES // (pl.cdiv(k.shape[3], LANES) * LANES * k.dtype.itemsize)
    if max(k.shape[1], index.shape[2]) > most:
        raise NotImplementedError(f"{k.shape[1]} slots, {index.shape[2]} copies: at most {most} of {k.dtype}")
