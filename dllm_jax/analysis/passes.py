"""Full passes over canvases that keep a part of what the chosen layers compute, and nothing of the others."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from dllm_jax.nn.intervention import Intervention, embedded, for_sequences, intervened
from dllm_jax.nn.layer import Layer, embed, walk
from dllm_jax.nn.mask import Mask
from dllm_jax.nn.mesh import constrain, current_mesh, over_mesh
from dllm_jax.nn.model import Model, full_pass
from dllm_jax.state.rows import gather
from dllm_jax.xla.loops import when
from pallas_kernels.attention.xla import attention, weights

What = Literal["residual", "attention", "head_output", "attention_output", "mlp_output", "k", "v"]

AXES: Mapping[What, tuple[str, ...]] = {
    "residual": ("step", "layer", "batch", "position", "width"),
    "attention": ("step", "layer", "batch", "head", "position", "key"),
    "head_output": ("step", "layer", "batch", "position", "head", "head_width"),
    "attention_output": ("step", "layer", "batch", "position", "width"),
    "mlp_output": ("step", "layer", "batch", "position", "width"),
    "k": ("step", "layer", "batch", "position", "kv_head", "head_width"),
    "v": ("step", "layer", "batch", "position", "kv_head", "head_width"),
}

Pick = Callable[[Shaped[Array, "b l *rest"]], Shaped[Array, "b j *rest"]]
Stores = dict[What, Float[Array, "n b ..."]]


class CapturedParts(NamedTuple):
    """Where a pass looks; numbers, so that others do not compile again.

    Attributes:
      layers: layers, distinct.
      stream: places of the residual stream, 0 .. n, n being after the last layer, distinct.
      positions: Positions to capture of each sequence; None: all.
      interventions: Interventions of the pass.
      taken: denoising steps that each sequence of each canvas has taken part in before.
    """

    layers: Int[Array | np.ndarray, "i"]
    stream: Int[Array | np.ndarray, "r"]
    positions: Int[Any, "b j"] | None
    interventions: tuple[Intervention, ...]
    taken: Int[Any, "c b"]


@functools.partial(jax.jit, static_argnames="what")
def captured(
    model: Model,
    tokens: Int[Array, "c b l"],
    valid: Bool[Array, "b l"] | Bool[Array, "c b l"] | None,
    asked: CapturedParts,
    what: tuple[What, ...],
) -> dict[What, Float[Array, "c n b ..."]]:
    """Captures activations of a full forward pass over a chunk of canvases, by name.

    Nothing is kept of layers that were not chosen, nor computed for them that their successors do not need.

    Args:
      model: the model.
      tokens: the canvases.
      valid: False at padding, of all canvases or of each.
      asked: layers, places of the stream and positions.
      what: Names of the arrays to keep.
    """
    count, batch, length = tokens.shape
    spec = model.spec
    # Canvases are the sequences of one batch [b c], those of a sequence side by side: a mesh keeps them on
    # one device, so that taking them apart moves nothing.
    flat = lambda a: jnp.swapaxes(a, 0, 1).reshape(batch * count, *a.shape[2:])
    again = lambda a: None if a is None else jnp.repeat(a, count, axis=0)
    asked = asked._replace(
        positions=again(asked.positions),
        interventions=for_sequences(asked.interventions, batch, count),
        taken=flat(asked.taken),
    )

    def whole(model: Model, tokens, valid, asked: CapturedParts) -> Stores:
        tokens = constrain(tokens.astype(jnp.int32), model.rules, "bl")
        position, mask, rope = full_pass(spec, tokens, valid)
        x = embedded(asked.interventions, embed(model.params, tokens), position, asked.taken)
        at = asked.positions
        pick = lambda array: array if at is None else gather(array, at)

        # Stores have an entry for each chosen layer, or place of the stream, only.
        positions = length if at is None else at.shape[1]
        sizes = {"width": spec.width, "head": spec.heads, "kv_head": spec.kv_heads}
        sizes |= {"head_width": spec.head_dim, "position": positions, "key": length}

        def empty(name: What, entries: int) -> Array:
            dtype = jnp.float32 if name == "attention" else x.dtype
            return jnp.zeros((entries, len(tokens), *(sizes[axis] for axis in AXES[name][3:])), dtype)

        stream: Stores = {name: empty(name, len(asked.stream)) for name in what if name == "residual"}
        layers: Stores = {name: empty(name, len(asked.layers)) for name in what if name != "residual"}

        # What enters a layer is kept before it runs, what it computes afterwards.
        def run(layer: Layer, carry: tuple[Array, Stores, Stores]) -> tuple[Array, Stores, Stores]:
            x, stream, layers = carry
            layer = intervened(layer, asked.interventions, position, asked.taken)
            stream = _put(stream, asked.stream, layer.index, {"residual": lambda: pick(x)})
            after, seen = _pass(layer, x, position, mask, pick)
            return after, stream, _put(layers, asked.layers, layer.index, seen)

        x, stream, layers = walk(model.params, spec, rope, run, (x, stream, layers))
        return layers | _put(stream, asked.stream, spec.layers, {"residual": lambda: pick(x)})

    mesh = current_mesh((model, tokens))
    split = () if mesh is None else model.rules.axes(mesh, "b", batch)
    valid = flat(valid) if valid is not None and valid.ndim == 3 else again(valid)
    result = over_mesh(whole, model, flat(tokens), valid, asked, out=PartitionSpec(None, split or None))
    # Canvases get an axis of their own again, the first one.
    apart = lambda a: jnp.moveaxis(a.reshape(len(a), batch, count, *a.shape[2:]), 2, 0)
    return {name: apart(array) for name, array in result.items()}


def _pass(
    layer: Layer, x: Float[Array, "b l m"], position: Int[Array, "b l"], mask: Mask | None, pick: Pick
) -> tuple[Float[Array, "b l m"], dict[What, Callable[[], Array]]]:
    """`nn.model.exact_layer`, the same operations in the same order, and what it computes on the way."""
    q, k = layer.qk(x, position)
    v = layer.value(x)
    o, _ = attention(q, k, v, mask)
    branch = layer.out(o)
    after = x + branch
    mlp = layer.mlp(after)

    def of_queries() -> Float[Array, "b h j l"]:
        # Queries are chosen before scores are made: attention is j l numbers a head, not l l.
        rows = mask
        if rows is not None and rows.shape[2] > 1:
            rows = jnp.swapaxes(pick(jnp.swapaxes(rows, 1, 2)), 1, 2)
        return weights(pick(q), k, rows)

    seen: dict[What, Callable[[], Array]] = {
        "attention": of_queries,
        "head_output": lambda: pick(layer.head_output(o)),
        "attention_output": lambda: pick(branch),
        "mlp_output": lambda: pick(mlp),
        "k": lambda: pick(k),
        "v": lambda: pick(v),
    }
    return layer.residual(after + mlp), seen


def _put(
    stores: Stores,
    chosen: Int[Array | np.ndarray, "i"],
    index: Int[Array, ""] | int,
    make: Mapping[What, Callable[[], Array]],
) -> Stores:
    """The stores with what `make` returns in the entry of a layer; nothing is made for one not chosen."""
    if not stores:
        return stores
    # A conditional: what is not chosen is neither computed nor written.
    here = chosen == index
    put = lambda old: {name: a.at[jnp.argmax(here)].set(make[name]()) for name, a in old.items()}
    return when(jnp.any(here), put, stores, name="keep")
