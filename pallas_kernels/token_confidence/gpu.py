"""`token_confidence` for NVIDIA GPUs (Pallas, Triton): one program per tile of tokens, merged by XLA.

Never run on a GPU yet, only interpreted, and lowered for CUDA. Pallas' Triton backend is deprecated since jax
0.11; Mosaic GPU replaces it and wants another kernel, for Hopper and newer.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.token_confidence import online
from pallas_kernels.token_confidence.reference import TokenConfidence, product, vocabulary_size

TOKENS, DEPTH = 128, 64  # of a tile: tokens, and width read at a time
LEAST_POSITIONS, MOST_POSITIONS = 16, 64  # of a tile; 16 is what tensor cores take at least


def token_confidence(
    hidden: Float[Array, "b c m"],
    head: Float[Array, "v m"],
    valid: int | None = None,
    forbidden: int | None = None,
    interpret: bool = False,
) -> TokenConfidence:
    """As the reference; every tile of 128 tokens leaves 24 bytes per position for the merge.

    Triton does not check bounds, so positions are filled up, and the last tile begins early and skips what
    was seen.

    Raises:
      NotImplementedError: no positions, the width is no multiple of 64, the head has fewer than 128 tokens,
        or other dtypes than float32 and bfloat16, or two of them.
    """
    valid = vocabulary_size(head, valid, forbidden)
    flat = hidden.reshape(-1, hidden.shape[-1])
    tile = _tile(flat, head)
    padded = jnp.pad(flat, ((0, -flat.shape[0] % tile), (0, 0)))
    tiles = pl.cdiv(valid, TOKENS)
    state = jax.eval_shape(functools.partial(online.init, padded.shape[0]))
    parts = pl.pallas_call(
        functools.partial(_kernel, valid=valid, forbidden=forbidden),
        grid=(tiles, padded.shape[0] // tile),
        # The hidden states of the i-th tile of positions, in full width; and the head, of which a program
        # loads parts.
        in_specs=[pl.BlockSpec((tile, flat.shape[1]), lambda j, i: (i, 0)), pl.BlockSpec()],
        # What the j-th tile of tokens says about the i-th tile of positions, a column each.
        out_specs=[pl.BlockSpec((1, tile, 1), lambda j, i: (j, i, 0))] * len(state),
        out_shape=[jax.ShapeDtypeStruct((tiles, *x.shape), x.dtype) for x in state],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="token_confidence",
    )(padded, head)
    outcome = online.finalize(online.merge(online.OnlineConfidence(*parts)))
    return TokenConfidence(*(x[: flat.shape[0]].reshape(hidden.shape[:-1]) for x in outcome))


def _kernel(hidden_ref, head_ref, *parts, valid, forbidden):
    """The logits of one tile of positions and 128 tokens, summed over the width, and what they say."""
    shape = hidden_ref.shape[0], TOKENS
    first = pl.program_id(0) * TOKENS
    begin = jnp.minimum(first, head_ref.shape[0] - TOKENS)

    def add(step, logits):
        depth = pl.ds(step * DEPTH, DEPTH)
        return logits + product(hidden_ref[:, depth], head_ref[pl.ds(begin, TOKENS), depth])

    logits = jax.lax.fori_loop(0, hidden_ref.shape[1] // DEPTH, add, jnp.zeros(shape, jnp.float32))
    ids = begin + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    running = online.update(online.init(shape[0]), logits, ids, first, valid, forbidden)
    for ref, value in zip(parts, running, strict=True):
        ref[0] = value


def _tile(hidden: Float[Array, "c m"], head: Float[Array, "v m"]) -> int:
    """Positions of a tile."""
    if hidden.dtype != head.dtype or hidden.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            f"hidden {hidden.dtype} and head {head.dtype}: both float32 or both bfloat16"
        )
    if not hidden.shape[0]:
        raise NotImplementedError("no positions")
    if hidden.shape[1] % DEPTH:
        raise NotImplementedError(f"width {hidden.shape[1]}: a multiple of {DEPTH}")
    if head.shape[0] < TOKENS:
        raise NotImplementedError(f"head of {head.shape[0]} tokens: at least {TOKENS}")
    return min(MOST_POSITIONS, max(LEAST_POSITIONS, pl.next_power_of_2(hidden.shape[0])))
