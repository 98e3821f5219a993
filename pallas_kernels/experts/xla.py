"""The experts of a mixture by XLA: TPUs' ragged products, CPUs' tiles of rows, elsewhere all by all."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from pallas_kernels.experts.tiles import most_tiles, tiles_of

# Rows of a tile of a TPU's ragged product: the largest power of two up to this that divides all rows. Eight
# times an odd number of positions would be tiles of 8.
TILE = 256
# Of what all experts make of the tokens at once, gate, up or their product: 2048 tokens of LLaDA2-mini's 256
# experts in bfloat16, of which a product reads the matrices far faster than it multiplies.
WIDE_BYTES = 2**29
# Fewest and most rows of one expert that a CPU multiplies at once, and those whose products take as long as
# the rest of a turn of the loop, which copies the expert's matrices.
LEAST_ROWS, MOST_ROWS, TURN = 8, 96, 24
SMALL = 2**14  # numbers of an expert's matrix below which CPUs multiply all tokens with all experts

# Into an expert's width, and back; in `_ragged` either of the two. Scales are of an int8 matrix, by output.
Into = Float[Array, "e m i"] | Int8[Array, "e m i"]
Back = Float[Array, "e i m"] | Int8[Array, "e i m"]
Matrix = Float[Array, "e i o"] | Int8[Array, "e i o"]
IntoScale, BackScale, Scale = Float[Array, "e i"], Float[Array, "e m"], Float[Array, "e o"]


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
) -> Float[Array, "t m"]:
    """The weighted sums of what each token's experts make of it, down(silu(gate x) * up x), in float32.

    Args:
      tokens: inputs.
      chosen: each token's experts; their number in place of one that is not here.
      weight: theirs, float32.
      gate: Gate matrices of all experts; like `up` and `down` in the tokens' dtype or int8.
      up: Up matrices of all experts.
      down: Down matrices of all experts, from the experts' width to the model's.
      gate_scale: Float32 scales of an int8 `gate`; None otherwise.
      up_scale: Float32 scales of an int8 `up`; None otherwise.
      down_scale: Float32 scales of an int8 `down`; None otherwise.
      gelu: Whether GELU's tanh form takes the place of SiLU (Gemma).

    Raises:
      ValueError: shapes or dtypes that do not go together.
    """
    arrays = tokens, chosen, weight, gate, up, down, gate_scale, up_scale, down_scale
    check_shapes(*arrays)
    # Only TPUs have a ragged product. Elsewhere XLA makes it of a dense one of every row, a token's once per
    # choice, with every expert, which takes c times as much as every token with every expert.
    of = lambda form: functools.partial(form, gelu=gelu) if gelu else form
    on_cpu = {"cpu": of(by_tiles)} if _tiles_pay(chosen, gate) else {}
    return jax.lax.platform_dependent(*arrays, tpu=of(by_expert), default=of(by_all_experts), **on_cpu)


def activated(x: Float[Array, "..."], gelu: bool) -> Float[Array, "..."]:
    """SiLU of a gate, or GELU in its tanh form."""
    return jax.nn.gelu(x, approximate=True) if gelu else jax.nn.silu(x)


def _tiles_pay(chosen: Int[Array, "t c"], gate: Into) -> bool:
    """Whether a CPU takes less time for tiles than for all tokens with all experts.

    With small matrices a turn of the loop takes longer still than `TURN` rows.
    """
    count, of_expert = gate.shape[0], gate.shape[1] * gate.shape[2]
    rows = _rows_of_a_tile(chosen.size, count)
    tiles = most_tiles(chosen.size, count, rows)
    return of_expert >= SMALL and tiles * (rows + TURN) < count * (TURN + len(chosen))


def _rows_of_a_tile(rows: int, count: int) -> int:
    """Rows that a CPU multiplies at once: half as many again as an expert is sent on average, by eights."""
    return min(max(-(-3 * rows // (16 * count)) * 8, LEAST_ROWS), MOST_ROWS)


def check_shapes(
    tokens: Array,
    chosen: Array,
    weight: Array,
    gate: Array,
    up: Array,
    down: Array,
    *scales: Array | None,
    gelu: bool = False,
):
    """Refuses arrays whose shapes or dtypes do not fit together.

    Raises:
      ValueError: choices and weights of different shape or of other tokens, matrices that are not of the same
        experts from the tokens' width to the experts' and back, or a scale where there is no int8 matrix, or
        none where there is one.
    """
    if chosen.shape != weight.shape or chosen.shape[0] != tokens.shape[0]:
        raise ValueError(f"choices {chosen.shape} and weights {weight.shape} must be of {len(tokens)} tokens")
    count, width, hidden = gate.shape
    if width != tokens.shape[1] or up.shape != gate.shape or down.shape != (count, hidden, width):
        shapes = f"gate {gate.shape}, up {up.shape} and down {down.shape}"
        raise ValueError(f"{shapes} must be [e m i], [e m i] and [e i m] for tokens {tokens.shape}")
    for matrix, scale in zip((gate, up, down), scales or (None,) * 3, strict=True):
        if (matrix.dtype == jnp.int8) != (scale is not None):
            raise ValueError(f"a matrix in {matrix.dtype}: int8 ones have a scale, others none")
        if scale is not None and scale.shape != (count, matrix.shape[2]):
            raise ValueError(f"a scale {scale.shape} must be {(count, matrix.shape[2])}")


def by_expert(
    tokens, chosen, weight, gate, up, down, gate_scale=None, up_scale=None, down_scale=None, gelu=False
):
    """As `experts`: rows sorted by expert, in ragged products."""
    count, expert = gate.shape[0], chosen.reshape(-1)

    # Sorted by expert, the tokens that one expert is sent are neighbors, each token once per choice.
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=count + 1)[:count].astype(jnp.int32)
    # More rows than a tile are filled up to whole tiles, with rows of no expert.
    spare = -len(order) % TILE if len(order) > TILE else 0
    sent = jnp.pad(tokens[order // chosen.shape[1]], ((0, spare), (0, 0)))
    of = jnp.pad(expert[order], (0, spare))
    product = functools.partial(_ragged, sizes=sizes, expert=of)
    hidden = activated(product(sent, gate, gate_scale), gelu) * product(sent, up, up_scale)
    # What is sent to no expert comes back as anything.
    out = jnp.where((of < count)[:, None], product(hidden, down, down_scale), 0)
    return weighted(out[_back(order)].reshape(*weight.shape, -1), weight)


def _back(order: Int[Array, "n"]) -> Int[Array, "n"]:
    """Where each choice, in the order of tokens, stands among the sorted ones."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))


def weighted(of_choice: Float[Array, "t c m"], weight: Float[Array, "t c"]) -> Float[Array, "t m"]:
    """The sums of what a token's choices gave, in float32."""
    return jnp.sum(weight[..., None] * of_choice.astype(jnp.float32), axis=1)


def _ragged(
    x: Float[Array, "r i"],
    matrix: Matrix,
    scale: Scale | None,
    sizes: Int[Array, "e"],
    expert: Int[Array, "r"],
) -> Float[Array, "r o"]:
    """Each row times the matrix of its expert; rows are sorted by expert, `sizes` of each.

    Of int8 matrices, the sums are scaled in float32 by their expert's scales.
    """
    whole = matrix if scale is None else matrix.astype(x.dtype)
    sums = _ragged_dot(x, whole, sizes, x.dtype if scale is None else jnp.float32)
    return sums if scale is None else (sums * scale[expert]).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _ragged_dot(x: Array, matrix: Array, sizes: Array, out: DTypeLike) -> Array:
    """`jax.lax.ragged_dot`; under `jax.vmap` one after the other, as JAX maps over no shared matrix."""
    return jax.custom_batching.sequential_vmap(_dot_of_jax(x, out))(x, matrix, sizes)


@_ragged_dot.defjvp
def _of_ragged_dot(out, arrays, tangents):
    return jax.jvp(_dot_of_jax(arrays[0], out), arrays, tangents)


def _dot_of_jax(x: Array, out: DTypeLike) -> Callable[..., Array]:
    return functools.partial(jax.lax.ragged_dot, precision=_precision(x), preferred_element_type=out)


@functools.partial(jax.custom_jvp, nondiff_argnums=(9,))
def by_tiles(
    tokens, chosen, weight, gate, up, down, gate_scale=None, up_scale=None, down_scale=None, gelu=False
):
    """As `experts`: sorted rows in a loop over the tiles that there are; gradients are `by_all_experts`'."""
    count, of = gate.shape[0], chosen.reshape(-1)
    rows = _rows_of_a_tile(len(of), count)
    tiles = tiles_of(of, count, rows)
    token = jnp.pad(tiles.order // chosen.shape[1], (0, rows))
    matrices = (gate, gate_scale), (up, up_scale), (down, down_scale)

    def of_tile(tile: Int[Array, ""], out: Float[Array, "r m"]) -> Float[Array, "r m"]:
        first = tiles.first[tile]
        of_expert = lambda array: jax.lax.dynamic_index_in_dim(array, tiles.expert[tile], keepdims=False)
        into, through, back = jax.tree.map(of_expert, matrices)
        x = tokens[jax.lax.dynamic_slice_in_dim(token, first, rows)]
        wide = activated(_product("ti,io->to", x, *into), gelu) * _product("ti,io->to", x, *through)
        # Rows after the tile's end are of the next tiles, which write them later, or of no expert.
        made = _product("ti,im->tm", wide, *back)
        return jax.lax.dynamic_update_slice_in_dim(out, made, first, axis=0)

    out = jnp.zeros((len(token), tokens.shape[1]), tokens.dtype)
    out = jax.lax.fori_loop(0, jnp.sum(tiles.first < tiles.end), of_tile, out)
    # One choice after the other: CPUs take three times as long to gather all and reduce over the choices. The
    # barrier is for the router's top-k, whose results XLA would cut out of those of a sort.
    back, here = jax.lax.optimization_barrier((_back(tiles.order).reshape(chosen.shape), chosen < count))
    row = lambda i: jnp.where(here[:, i, None], out[back[:, i]], 0).astype(jnp.float32)
    return functools.reduce(jnp.add, (weight[:, i, None] * row(i) for i in range(chosen.shape[1])))


@by_tiles.defjvp
def _of_all_experts(gelu, arrays, tangents):
    return jax.jvp(functools.partial(by_all_experts, gelu=gelu), arrays, tangents)


def by_all_experts(
    tokens,
    chosen,
    weight,
    gate,
    up,
    down,
    gate_scale=None,
    up_scale=None,
    down_scale=None,
    wide_bytes=WIDE_BYTES,
    gelu=False,
):
    """As `experts`: every expert over every token, whose weight is 0 where it is not sent.

    So many tokens at a time that what all experts make of them takes no more than `wide_bytes`.
    """
    count, _, hidden = gate.shape
    rows, token = len(tokens), jnp.arange(len(tokens))[:, None]
    share = jnp.zeros((rows, count), jnp.float32).at[token, chosen].set(weight, mode="drop")
    # XLA would make one product of a shared expert's and of all others', and copy these for it.
    tokens = jax.lax.optimization_barrier(tokens)

    def of_chunk(tokens: Float[Array, "t m"], share: Float[Array, "t e"]) -> Float[Array, "t m"]:
        wide = activated(_product("ti,eio->eto", tokens, gate, gate_scale), gelu)
        wide = wide * _product("ti,eio->eto", tokens, up, up_scale)
        if down_scale is not None:  # each expert's sums have scales of their own
            back = functools.partial(_product, "eti,eim->etm")
            # XLA's CPU compiler has no batched product of bfloat16 with float32 sums.
            in_float32 = lambda wide, *matrix: back(wide.astype(jnp.float32), *matrix).astype(wide.dtype)
            of_expert = jax.lax.platform_dependent(wide, down, down_scale, cpu=in_float32, default=back)
            return weighted(jnp.swapaxes(of_expert, 0, 1), share)
        wide = wide * share.T[..., None].astype(wide.dtype)
        return _product("eti,eim->tm", wide, down, out=jnp.float32)

    # Chunks of nearly equal size, the last of them filled up with tokens that no expert counts.
    chunks = max(1, -(-rows * count * hidden * tokens.dtype.itemsize // wide_bytes))
    each = -(-rows // chunks)
    if each == rows:
        return of_chunk(tokens, share)
    chunks = -(-rows // each)
    split = lambda x: jnp.pad(x, ((0, chunks * each - rows), (0, 0))).reshape(chunks, each, -1)
    out = jax.lax.map(lambda parts: of_chunk(*parts), (split(tokens), split(share)))
    return out.reshape(chunks * each, -1)[:rows]


def _product(formula: str, x: Array, matrix: Array, scale: Scale | None = None, out=None) -> Array:
    """A product with all experts' matrices; of int8 ones the sums are scaled in float32."""
    if scale is None:
        return jnp.einsum(formula, x, matrix, precision=_precision(x), preferred_element_type=out)
    # The conversion is all that stands between the values and the product: compilers then fuse the two.
    matrix = matrix.astype(x.dtype)
    sums = jnp.einsum(formula, x, matrix, precision=_precision(x), preferred_element_type=jnp.float32)
    return (sums * scale[..., None, :]).astype(x.dtype)


def _precision(x: Array) -> jax.lax.Precision:
    """Full precision for float32, the hardware's default for narrower types."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
