"""Full passes over canvases that keep a part of what the chosen layers compute, and nothing of the others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from dllm_jax.nn.attention import attention
from dllm_jax.nn.intervened import embedded, intervened
from dllm_jax.nn.intervention import Intervention
from dllm_jax.nn.layer import Layer, embed, walk
from dllm_jax.nn.mask import Mask
from dllm_jax.nn.mesh import constrain, current_mesh, over_mesh
from dllm_jax.nn.model import Model, full_pass
from dllm_jax.nn.places import Indices, distinct, indices, within
from dllm_jax.policies.parts.control import when


class Seen(NamedTuple):
    """What one layer computes in a pass over whole canvases.

    Attributes:
      residual: the stream that enters the layer.
      q: rotated queries.
      k: rotated keys.
      v: values.
      attention_output: what the attention branch adds to the stream.
      mlp_output: what the MLP branch adds.
      mask: which keys each query may attend to; None means all.
    """

    residual: Float[Array, "b l m"]
    q: Float[Array, "b l h d"]
    k: Float[Array, "b l k d"]
    v: Float[Array, "b l k d"]
    attention_output: Float[Array, "b l m"]
    mlp_output: Float[Array, "b l m"]
    mask: Mask | None


class Kept(NamedTuple):
    """What a pass keeps.

    Attributes:
      layers: of the chosen layers, stacked in the order in which they were chosen.
      stream: of the residual stream that enters the chosen layers, n being behind the last one; likewise.
    """

    layers: PyTree
    stream: PyTree


class Changed(NamedTuple):
    """Interventions in a pass.

    Attributes:
      interventions: for all sequences of the pass.
      step: denoising steps that each of them has taken part in before.
    """

    interventions: tuple[Intervention, ...]
    step: Int[Array, "b"]


class Chosen(NamedTuple):
    """Where a pass looks; numbers, so that other layers do not compile anew.

    Attributes:
      layers: layers, distinct.
      stream: places of the residual stream, 0 .. n, distinct.
    """

    layers: Int[Array | np.ndarray, "i"]
    stream: Int[Array | np.ndarray, "r"]


def chosen_layers(layers: Indices | None, count: int) -> Int[np.ndarray, "n"]:
    """The chosen ones of `count` layers; None for all."""
    if layers is None:
        return np.arange(count, dtype=np.int32)
    found = np.asarray(indices("layers", layers))
    distinct("layers", found)
    within("layers", found, count, "the model has layers")
    return found


def in_one_batch(tokens: Int[Array, "c b l"], *of_sequences: Any) -> tuple[Any, ...]:
    """Canvases as the sequences of one batch [b c], those of a sequence side by side, as a mesh splits them.

    Args:
      tokens: the canvases.
      *of_sequences: arrays [b ..], each repeated for all canvases of a sequence; None stays None.
    """
    flat = jnp.swapaxes(tokens, 0, 1).reshape(-1, tokens.shape[2])
    again = lambda a: None if a is None else jnp.repeat(a, len(tokens), axis=0)
    return flat, *map(again, of_sequences)


def by_canvas(array: Shaped[Array, "n bc *rest"], count: int) -> Shaped[Array, "c n b *rest"]:
    """What `in_one_batch` put into one batch, with an axis of its own for canvases, the first one."""
    return jnp.moveaxis(array.reshape(len(array), -1, count, *array.shape[2:]), 2, 0)


def keep(
    model: Model,
    tokens: Int[Array, "b l"],
    valid: Bool[Array, "b l"] | None,
    chosen: Chosen,
    of_layer: Callable[[Seen], PyTree],
    of_stream: Callable[[Float[Array, "b l m"]], PyTree],
    changed: Changed,
    canvases: int,
) -> Kept:
    """Runs the exact decoder's pass and keeps parts of it. Nothing is computed for layers not chosen.

    Args:
      model: the model.
      tokens: canvases, one after another as sequences of a batch.
      valid: False at padding.
      chosen: layers and places of the stream; none of either keeps nothing of it.
      of_layer: what is kept of a chosen layer: any pytree of arrays.
      of_stream: what is kept of the residual stream.
      changed: interventions.
      canvases: how many of each sequence there are, one after another; a mesh keeps them together, so that
        `by_canvas` can take them apart.
    """
    spec = model.spec

    def whole(model: Model, tokens, valid, chosen: Chosen, changed: Changed) -> Kept:
        tokens = constrain(tokens.astype(jnp.int32), model.rules, "bl")
        position, mask, rope = full_pass(spec, tokens, valid)
        x = embedded(changed.interventions, embed(model.params, tokens), position, changed.step)

        # Stores have an entry for each chosen layer only; the shapes of what is kept are found by a dry run.
        seen = jax.eval_shape(lambda x: _shapes(model, x, mask), x)
        empty = lambda entries, one: jax.tree.map(lambda a: jnp.zeros((entries, *a.shape), a.dtype), one)
        layers, stream = jax.eval_shape(of_layer, seen), jax.eval_shape(of_stream, x)
        stores = Kept(empty(len(chosen.layers), layers), empty(len(chosen.stream), stream))

        # What enters a layer is kept before it runs, what it computes behind it.
        def run(layer: Layer, carry: tuple[Array, Kept]) -> tuple[Array, Kept]:
            x, kept = carry
            layer = intervened(layer, changed.interventions, position, changed.step)
            stream = _put(kept.stream, chosen.stream, layer.index, lambda: of_stream(x))
            x, seen = _pass(layer, x, position, mask)
            return x, Kept(_put(kept.layers, chosen.layers, layer.index, lambda: of_layer(seen)), stream)

        x, kept = walk(model.params, spec, rope, run, (x, stores))
        return kept._replace(stream=_put(kept.stream, chosen.stream, spec.layers, lambda: of_stream(x)))

    # Canvases of a sequence stay on one device, so that `by_canvas` moves nothing.
    mesh = current_mesh((model, tokens))
    split = () if mesh is None else model.rules.axes(mesh, "b", tokens.shape[0] // canvases)
    return over_mesh(whole, model, tokens, valid, chosen, changed, out=PartitionSpec(None, split or None))


def _pass(
    layer: Layer, x: Float[Array, "b l m"], position: Int[Array, "b l"], mask: Mask | None
) -> tuple[Float[Array, "b l m"], Seen]:
    """`nn.model.exact_layer`, the same operations in the same order, and what it computes on the way."""
    q, k = layer.qk(x, position)
    v = layer.value(x)
    o, _ = attention(q, k, v, mask)
    branch = layer.out(o)
    after = x + branch
    mlp = layer.mlp(after)
    return layer.residual(after + mlp), Seen(x, q, k, v, branch, mlp, mask)


def _shapes(model: Model, x: Float[Array, "b l m"], mask: Mask | None) -> Seen:
    """Arrays of the shapes and dtypes that any layer computes."""
    spec, (b, length, _) = model.spec, x.shape
    q = jnp.zeros((b, length, spec.heads, spec.head), x.dtype)
    k = jnp.zeros((b, length, spec.kv_heads, spec.head), x.dtype)
    return Seen(x, q, k, k, x, x, mask)


def _put(
    store: PyTree, chosen: Int[Array | np.ndarray, "i"], index: Int[Array, ""] | int, make: Callable
) -> PyTree:
    """The store with what `make` returns in the entry of a layer; nothing is made for one not chosen."""
    if not chosen.shape[0]:
        return store
    # A conditional: what is not chosen is neither computed nor written.
    here = chosen == index
    put = lambda store: jax.tree.map(lambda a, new: a.at[jnp.argmax(here)].set(new), store, make())
    return when(jnp.any(here), put, store, name="keep")
