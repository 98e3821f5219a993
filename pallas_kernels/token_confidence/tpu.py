"""`token_confidence` for TPUs (Pallas, Mosaic): row tiles x vocabulary tiles, the sums in VMEM."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.token_confidence import online
from pallas_kernels.token_confidence.reference import TokenConfidence, product, vocabulary_size

LANES, SUBLANES = 128, 16  # 16 rows are one bfloat16 tile, two float32 tiles
TILE_BYTES = 2**22  # one tile of rows or of the head; each is held twice, to load the next one meanwhile
MOST_ROWS, MOST_TOKENS = 256, 1024
VMEM_BYTES = 48 * 2**20  # of 64 (v7x) or 128 MiB


def token_confidence(
    hidden: Float[Array, "b c m"],
    head: Float[Array, "v m"],
    valid: int | None = None,
    forbidden: int | None = None,
    interpret: bool = False,
) -> TokenConfidence:
    """As the reference; the head is read once per 256 rows (LLaDA-8B, float32: 256).

    Raises:
      NotImplementedError: no rows; the width is no multiple of 128, or 128 rows of it exceed 4 MiB; or other
        dtypes than float32 and bfloat16, or two of them.
    """
    valid = vocabulary_size(head, valid, forbidden)
    rows = hidden.reshape(-1, hidden.shape[-1])
    row_tile, tile = _tiles(rows, head, valid)
    count, width = rows.shape
    column = pl.BlockSpec((row_tile, 1), lambda i, j: (i, 0))
    outputs = [jax.ShapeDtypeStruct((count, 1), dtype) for dtype in (jnp.int32, *[jnp.float32] * 3)]
    outcome = pl.pallas_call(
        functools.partial(_kernel, valid=valid, forbidden=forbidden),
        grid=(pl.cdiv(count, row_tile), pl.cdiv(valid, tile)),
        in_specs=[
            pl.BlockSpec((row_tile, width), lambda i, j: (i, 0)),
            pl.BlockSpec((tile, width), lambda i, j: (j, 0)),
        ],
        out_specs=[column] * 4,
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in _state(row_tile)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="token_confidence",
    )(rows, head)
    return TokenConfidence(*(x.reshape(hidden.shape[:-1]) for x in outcome))


def _kernel(rows_ref, head_ref, token_ref, p_ref, margin_ref, entropy_ref, *running, valid, forbidden):
    tile = head_ref.shape[0]
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        _store(running, online.init(rows_ref.shape[0]))

    logits = product(rows_ref[...], head_ref[...])
    ids = j * tile + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    before = online.OnlineConfidence(*(ref[...] for ref in running))
    _store(running, online.update(before, logits, ids, 0, valid, forbidden))

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        outcome = online.finalize(online.OnlineConfidence(*(ref[...] for ref in running)))
        _store((token_ref, p_ref, margin_ref, entropy_ref), outcome)


def _store(refs, values):
    for ref, value in zip(refs, values, strict=True):
        ref[...] = value


def _state(rows: int) -> online.OnlineConfidence:
    return jax.eval_shape(functools.partial(online.init, rows))


def _tiles(rows: Float[Array, "r m"], head: Float[Array, "v m"], valid: int) -> tuple[int, int]:
    """Rows and tokens of a tile."""
    if rows.dtype != head.dtype or rows.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"hidden {rows.dtype} and head {head.dtype}: both float32 or both bfloat16")
    count, width = rows.shape
    if not count:
        raise NotImplementedError("no rows")
    most = TILE_BYTES // (width * rows.dtype.itemsize)
    if width % LANES or most < LANES:
        raise NotImplementedError(f"width {width}: a multiple of {LANES}, of {rows.dtype} up to {most} rows")
    tokens = min(most, MOST_TOKENS, pl.cdiv(valid, LANES) * LANES) // LANES * LANES
    fitting = min(most, MOST_ROWS) // SUBLANES * SUBLANES
    return min(fitting, pl.cdiv(count, SUBLANES) * SUBLANES), tokens
