"""`token_confidence` for TPUs (Pallas, Mosaic): tiles of logits, summed up in VMEM.

The grid is position tile, token tile. The latter runs in order, and the sums over tokens of one tile of
positions stay in VMEM meanwhile; logits never leave it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.token_confidence import online
from pallas_kernels.token_confidence.reference import TokenConfidence, product, vocabulary_size

LANES, SUBLANES = 128, 16  # of a tile in VMEM: 16 x 128 numbers are one bfloat16 tile, two float32 tiles
TILE_BYTES = (
    2**22
)  # one tile of hidden states or of the head; each is held twice, to load the next one meanwhile
MOST_POSITIONS, MOST_TOKENS = 256, 1024
VMEM_BYTES = 48 * 2**20  # of 64 (v7x) or 128 MiB


def token_confidence(
    hidden: Float[Array, "b c m"],
    head: Float[Array, "v m"],
    valid: int | None = None,
    forbidden: int | None = None,
    interpret: bool = False,
) -> TokenConfidence:
    """As the reference; the head is read once per 256 positions.

    Raises:
      NotImplementedError: no positions; the width is no multiple of 128, or 128 tokens of it exceed 4 MiB; or
        other dtypes than float32 and bfloat16, or two of them.
    """
    valid = vocabulary_size(head, valid, forbidden)
    flat = hidden.reshape(-1, hidden.shape[-1])
    position_tile, token_tile = _tiles(flat, head, valid)
    count, width = flat.shape
    # Results of the i-th tile of positions, a column each, written with the last tile of tokens.
    column = pl.BlockSpec((position_tile, 1), lambda i, j: (i, 0))
    outputs = [jax.ShapeDtypeStruct((count, 1), dtype) for dtype in (jnp.int32, *[jnp.float32] * 3)]
    outcome = pl.pallas_call(
        functools.partial(_kernel, valid=valid, forbidden=forbidden),
        grid=(pl.cdiv(count, position_tile), pl.cdiv(valid, token_tile)),
        in_specs=[
            # Hidden states of the i-th tile of positions, which stay for all tiles of tokens.
            pl.BlockSpec((position_tile, width), lambda i, j: (i, 0)),
            # The j-th tile of the head's tokens; the last one may jut out, and `valid` hides what it holds
            # there.
            pl.BlockSpec((token_tile, width), lambda i, j: (j, 0)),
        ],
        out_specs=[column] * 4,
        out_shape=outputs,
        # The sums over the tokens seen so far, for one tile of positions.
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in _state(position_tile)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="token_confidence",
    )(flat, head)
    return TokenConfidence(*(x.reshape(hidden.shape[:-1]) for x in outcome))


def _kernel(hidden_ref, head_ref, token_ref, p_ref, margin_ref, entropy_ref, *running, valid, forbidden):
    """The logits of one tile of positions and one of tokens go into the sums of the positions."""
    tile = head_ref.shape[0]
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        _store(running, online.init(hidden_ref.shape[0]))

    logits = product(hidden_ref[...], head_ref[...])
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


def _state(positions: int) -> online.OnlineConfidence:
    return jax.eval_shape(functools.partial(online.init, positions))


def _tiles(hidden: Float[Array, "c m"], head: Float[Array, "v m"], valid: int) -> tuple[int, int]:
    """Positions and tokens of a tile."""
    if hidden.dtype != head.dtype or hidden.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            f"hidden {hidden.dtype} and head {head.dtype}: both float32 or both bfloat16"
        )
    count, width = hidden.shape
    if not count:
        raise NotImplementedError("no positions")
    most = TILE_BYTES // (width * hidden.dtype.itemsize)
    if width % LANES or most < LANES:
        raise NotImplementedError(
            f"width {width}: a multiple of {LANES}, of {hidden.dtype} up to {most} tokens"
        )
    tokens = min(most, MOST_TOKENS, pl.cdiv(valid, LANES) * LANES) // LANES * LANES
    fitting = min(most, MOST_POSITIONS) // SUBLANES * SUBLANES
    return min(fitting, pl.cdiv(count, SUBLANES) * SUBLANES), tokens
