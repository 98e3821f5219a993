"""`experts` for NVIDIA GPUs (Pallas, Triton): grouped products, which read the experts that have tokens.

Rows, a token's once per choice, are sorted by expert and each expert's are divided into tiles, so that a tile
has one expert. A program makes some columns of one tile; its neighbors make the others, and after them
come the expert's further tiles, for which its matrices are in the L2 cache. Rows are read and written where
they lie, by their numbers: nothing is padded in memory. Which expert a tile has depends on the data, how many
tiles there can be at most does not; the programs of those that there are not end at once.

| kernel | grid | a program |
|---|---|---|
| `experts_gated` | columns, tile | walks over the tokens' width with its columns of gate and up |
| `experts_down` | columns, tile | walks over the experts' width with its columns of down |

Right on an H100 and an H200 with jax 0.11.2 at small shapes (`dllm_jax check --quick`), and faster than XLA's
form at every measured shape (bench/results/experts_h200.json).
Pallas' Triton backend is deprecated since jax 0.11, and Mosaic GPU, which replaces it, wants another kernel.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.experts.tiles import Tiles, tiles_of
from pallas_kernels.experts.xla import Back, BackScale, Into, IntoScale, check_shapes, weighted

LEAST_ROWS, MOST_ROWS = 16, 128  # of a tile; 16 is what tensor cores take at least
COLUMNS = 128  # of a program, of all its matrices together
WHOLE = pl.BlockSpec()  # an array that programs load parts of by themselves


class Block(NamedTuple):
    """Sizes that a program holds at once: rows, columns of each matrix, and depth of a product."""

    rows: int
    columns: int
    depth: int


def experts(
    tokens: Float[Array, "t m"],
    chosen: Int[Array, "t c"],
    weight: Float[Array, "t c"],
    gate: Into,
    up: Into,
    down: Back,
    gate_scale: IntoScale | None = None,
    up_scale: IntoScale | None = None,
    down_scale: BackScale | None = None,
    gelu: bool = False,
    interpret: bool = False,
) -> Float[Array, "t m"]:
    """As `xla.experts`; sums are float32, what lies between the two products is in the tokens' dtype.

    Raises:
      NotImplementedError: no tokens, other dtypes than float32 and bfloat16, matrices in another one than the
        tokens' or int8, or arrays of 2^31 numbers.
    """
    check_shapes(tokens, chosen, weight, gate, up, down, gate_scale, up_scale, down_scale)
    _check_supported(tokens, chosen, gate, up, down)
    count, choices = gate.shape[0], chosen.shape[1]
    rows = 1 << (pl.cdiv(chosen.size, count) - 1).bit_length()
    rows = min(max(rows, LEAST_ROWS), MOST_ROWS)
    tiles = tiles_of(chosen.reshape(-1), count, rows)
    product = functools.partial(_product, tiles=tiles, rows=rows, gelu=gelu, interpret=interpret)
    gated = (gate, up), (gate_scale, up_scale)
    hidden = product("experts_gated", tokens, *gated, choices=choices)
    out = product("experts_down", hidden, (down,), (down_scale,), choices=1)
    # Rows that are sent to no expert are in no tile, and nothing was written for them.
    return weighted(jnp.where((chosen < count)[..., None], out.reshape(*chosen.shape, -1), 0), weight)


def _check_supported(tokens: Array, chosen: Array, *matrices: Array):
    if not len(tokens):
        raise NotImplementedError("no tokens")
    if tokens.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"{tokens.dtype}: float32 or bfloat16")
    for matrix in matrices:
        if matrix.dtype not in (tokens.dtype, jnp.int8):
            raise NotImplementedError(f"a matrix in {matrix.dtype}: int8 or the tokens' {tokens.dtype}")
    most = max(chosen.size * max(tokens.shape[1], matrices[0].shape[2]), *(x.size for x in matrices))
    if most >= 2**31:
        raise NotImplementedError(f"an array of {most} numbers: fewer than 2^31")


def _product(
    name: str,
    x: Float[Array, "n i"],
    matrices: tuple[Into | Back, ...],
    scales: tuple[IntoScale | BackScale | None, ...],
    choices: int,
    tiles: Tiles,
    rows: int,
    gelu: bool,
    interpret: bool,
) -> Float[Array, "r o"]:
    """Each row times its expert's matrix, or silu (GELU) of that times its product with a second one.

    Row r of x serves the `choices` rows from r * choices on.
    """
    _, depth, width = matrices[0].shape
    # What is loaded ahead fits the shared memory of a processor: tiles of few rows wait for matrices alone.
    bytes_deep = 256 if rows == LEAST_ROWS else 128
    columns = min(COLUMNS // len(matrices), pl.next_power_of_2(max(width, 16)))
    deep = min(bytes_deep // x.dtype.itemsize, pl.next_power_of_2(max(depth, 16)))
    block = Block(rows, columns, deep)
    given = [scale for scale in scales if scale is not None]
    return pl.pallas_call(
        functools.partial(_kernel, block=block, choices=choices, matrices=len(matrices), gelu=gelu),
        grid=(pl.cdiv(width, columns), len(tiles.expert)),
        in_specs=[WHOLE] * (5 + len(matrices) + len(given)),
        out_specs=WHOLE,
        out_shape=jax.ShapeDtypeStruct((len(tiles.order), width), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=8 if rows == MOST_ROWS else 4, num_stages=3),
        interpret=interpret,
        name=name,
    )(*tiles, x, *matrices, *given)


def _kernel(order_ref, expert_ref, first_ref, end_ref, x_ref, *rest, block, choices, matrices, gelu):
    """Some columns of the products of one tile's rows with its expert's matrices."""
    matrix_refs, scale_refs, out_ref = rest[:matrices], rest[matrices:-1], rest[-1]
    (_, depth, width), start = matrix_refs[0].shape, pl.program_id(0) * block.columns
    tile = pl.program_id(1)
    first, end = first_ref[tile], end_ref[tile]

    @pl.when(first < end)
    def _():
        place, expert = first + jnp.arange(block.rows), expert_ref[tile]
        real = place < end
        row = plt.load(order_ref.at[place], mask=real, other=out_ref.shape[0])
        source = jnp.where(real, row, 0) // choices
        column = start + jnp.arange(block.columns)
        inside = column < width

        def add(j, sums):
            deep = j * block.depth + jnp.arange(block.depth)
            within = deep < depth
            load = lambda ref, mask, *index: plt.load(ref.at[index], mask=mask, other=0)
            x = load(x_ref, (real[:, None] & within[None]), source[:, None], deep[None])
            mask = within[:, None] & inside[None]
            y = (load(ref, mask, expert, deep[:, None], column[None]) for ref in matrix_refs)
            return tuple(total + _dot(x, part.astype(x.dtype)) for total, part in zip(sums, y, strict=True))

        zeros = jnp.zeros((block.rows, block.columns), jnp.float32)
        sums = jax.lax.fori_loop(0, pl.cdiv(depth, block.depth), add, (zeros,) * matrices)
        if scale_refs:
            scales = (plt.load(ref.at[expert, column], mask=inside, other=0) for ref in scale_refs)
            sums = tuple(total * scale[None] for total, scale in zip(sums, scales, strict=True))
        # GELU's tanh form is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
        wide = 2 * (2 / jnp.pi) ** 0.5 * (sums[0] + 0.044715 * sums[0] ** 3) if gelu else sums[0]
        out = sums[0] if matrices == 1 else sums[0] * jax.lax.logistic(wide) * sums[1]
        target = out_ref.at[row[:, None], column[None]]
        plt.store(target, out.astype(out_ref.dtype), mask=real[:, None] & inside[None])


def _dot(x: Float[Array, "n i"], y: Float[Array, "i o"]) -> Float[Array, "n o"]:
    """A product with float32 sums: float32 operands at full precision, narrower ones as the hardware does."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
