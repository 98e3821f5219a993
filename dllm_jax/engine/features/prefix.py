"""Keys and values of a computed prefix, which several prompts of a block-causal model begin with.

Finished blocks attend to earlier ones alone: what a prompt begins with has the same keys and values whatever
follows. Where prompts attend causally, this holds for each token. Keys are stored before rotation, since left
padding moves a prefix on the canvas.
"""

import dataclasses
import functools
import weakref
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import override

from dllm_jax.engine.generation import Feature, Generation
from dllm_jax.engine.stats import Record
from dllm_jax.nn.layer import Layer, embed, walk
from dllm_jax.nn.mask import block_causal, key_mask
from dllm_jax.nn.mesh import current_mesh, over_mesh
from dllm_jax.nn.model import Model
from dllm_jax.nn.rope import Rope, rope_of, rotate
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy, for_model
from dllm_jax.samplers.base import Sampler
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.contexts import in_blocks
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, scatter
from dllm_jax.traced import fixed_at
from dllm_jax.xla.stacks import traced_once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredPrefix:
    """Keys and values of a prefix's whole blocks, or of all of its tokens if they attend causally; a pytree.

    Attributes:
      kv: Keys before rotation and values of one sequence, with room for more: one KV [s k d] per layer, or
        one KV [n s k d], in the form of the model's parameters.
      count: Number of stored positions, whole blocks.
      least: Lower bound of `count` (static), by which programs know how much a first step computes at most.
      causal: Whether each token attends to those in front of it alone (static).
    """

    kv: KV | list[KV]
    count: Int[Array, ""]
    least: int = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(metadata={"static": True})

    def first_width(self, spec: ModelSpec, layout: Layout) -> int:
        """Upper bound of the positions that a first step computes of a sequence."""
        spec = layout.fitted(spec)
        size = spec.context.unit
        least = self.least // size * size
        least = max(least - size, 0) if _computes_last(spec) else least
        return max((layout.prompt if spec.context.has_causal_passes else layout.length) - least, 1)

    @property
    def slots(self) -> int:
        """Number of positions that there is room for."""
        return jax.tree.leaves(self.kv)[0].shape[-3]


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A computed beginning of prompts; made by `prefill`.

    Attributes:
      tokens: Token ids of the prefix.
      computed_tokens: Number of tokens that `prefill` computed for it.
      stored: Its keys and values; the rest is computed with each prompt.
      spec: Description of the model that computed it.
      weights: References to its arrays, which it does not keep alive.
    """

    tokens: tuple[int, ...]
    computed_tokens: int
    stored: StoredPrefix = dataclasses.field(repr=False)
    spec: ModelSpec = dataclasses.field(repr=False)
    weights: PyTree[weakref.ref[Array]] = dataclasses.field(repr=False)

    def is_of(self, model: Model) -> bool:
        """Whether a model has the arrays that computed the prefix."""
        # The structure holds what no array does, such as the scale of adapters.
        if jax.tree.structure(self.weights) != jax.tree.structure(model.params):
            return False
        known = jax.tree.map(lambda weight, leaf: weight() is leaf, self.weights, model.params)
        return all(jax.tree.leaves(known))


@functools.partial(jax.jit, static_argnames="whole")
def compute_prefix(
    model: Model, stored: KV | list[KV], tokens: Int[Array, "1 q"], start, end, whole: bool
) -> KV | list[KV]:
    """The keys and values with those of positions `start` .. `end` - 1, which attend to what is stored.

    Args:
      model: Block-causal model.
      stored: Keys and values of positions before `start`, with room for the others (`StoredPrefix.kv`).
      tokens: Ids from position `start` on; those from `end` on are padding.
      start: int32, the beginning of a block.
      end: int32, the end of a block.
      whole: Whether `start` is 0.
    """

    def computed(model: Model, stored, tokens, start, end):
        spec = model.spec
        slots = jax.tree.leaves(stored)[0].shape[-3]
        position = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        rows, every = Rows(jnp.where(position < end, position, slots), slots), jnp.arange(slots)[None]
        mask = block_causal(key_mask(every < end), spec, rows.index, None, slots)
        rope = rope_of(spec, slots)

        def through(layer: Layer, x, view: LayerCache):
            q, _ = layer.qk(x, rows.index)
            _, k = dataclasses.replace(layer, rope=_not_rotated(rope)).qk(x, rows.index)
            view, now = view.update(rows, KV(k, layer.value(x)))
            keys = rotate(now.k, rope, every, spec.rope_in_f32)
            o, _ = layer.attention(q, keys, now.v, mask, spec.context.size if whole else None)
            return layer.finish(x, o), view

        through = traced_once(through, model.params)

        def run(layer: Layer, carry):
            x, cache = carry
            x, view = through(layer, x, LayerCache.of(cache, layer.index, model.kernels))
            return x, view.into(cache, layer.index)

        # One sequence: an axis of length 1 in front of the slots.
        start_of = (
            embed(model.params, tokens),
            Cache(jax.tree.map(lambda a: a[..., None, :, :, :], stored), ()),
        )
        _, cache = walk(model.params, spec, rope, run, start_of, model.kernels)
        return jax.tree.map(lambda a: jnp.squeeze(a, -4), cache.layers)

    return over_mesh(computed, model, stored, tokens, start, end, out=None)


def _not_rotated(rope: Rope) -> Rope:
    """Tables of angles that are all 0."""
    return rope._replace(cos=jnp.ones_like(rope.cos), sin=jnp.zeros_like(rope.sin))


def refusal(model: Model, policy: Policy, sampler: Sampler) -> str | None:
    """Why a model, policy or sampler cannot reuse a prefix; None if they can."""
    if reason := model_refusal(model, reads_causally(model.spec, sampler)):
        return reason
    runs = for_model(policy, model.spec)
    layers = jax.eval_shape(lambda: runs.init(model.spec, Layout.of(8, 8), 1, model.dtype)).layers
    if not runs._dense_pairs(layers):
        return (
            f"prefix= is not supported by {type(policy).__name__}: it does not keep the KV pairs of all "
            "positions as the default layer does. Use Policy() or MAGE()"
        )
    if sampler.procedure.draft_adapter:
        return (
            "prefix= is not supported with draft_adapter=True: adapters act in the prefix too. "
            "Use draft_adapter=False"
        )
    if not fixed_at(sampler.cfg_scale, 0):
        return (
            f"prefix= is not supported with cfg_scale={sampler.cfg_scale}: the second stream masks the prompt"
        )
    return None


def reads_causally(spec: ModelSpec, sampler: Sampler) -> bool:
    """Whether a prompt's tokens attend to those in front of them alone, not to their whole block."""
    context = spec.context
    by_sampler = context.has_blocks and (sampler.procedure.block == 1 or sampler.procedure.stores_causally)
    return context.has_causal_passes or by_sampler


def model_refusal(model: Model, causal: bool) -> str | None:
    """Why no prefix of a model can be computed, whose tokens attend causally or not; None if one can."""
    spec = model.spec
    if not spec.has_mask_token:
        return (
            f"prefill does not support {spec.family}: it denoises uniform noise and has no mask token. "
            "Pass the whole prompt"
        )
    if not spec.context.has_blocks:
        return (
            f"prefill does not support full attention ({spec.family}): prompt tokens attend to the response, "
            "so that their keys and values change with it. Use a block-causal model, or a cache policy"
        )
    if spec.context.from_response and not causal:
        return (
            f"prefill does not support {spec.family}: its blocks are counted from the response, and move "
            "with the length of the prompt"
        )
    if current_mesh(model.params) is not None:
        return "prefill does not support a model over a mesh yet. Pass the whole prompt to generate"
    if isinstance(model.params["embed"], Tracer):
        return "prefill cannot be traced: call it outside of jit, vmap and grad"
    return None


def _computes_last(spec: ModelSpec) -> bool:
    """Whether a first step computes the last position of the prompt, which predicts what follows it."""
    return spec.shifted or spec.context.has_causal_passes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReusedPrefix(Feature):
    """Begins with the keys and values of what all prompts begin with, and tells how much that is.

    Attributes:
      stored: Keys and values.
    """

    stored: StoredPrefix

    name: ClassVar[str] = "reused"

    @override
    def fill_cache(self, generation: Generation, cache: Cache, canvas: Canvas) -> tuple[Cache, Canvas]:
        """The cache with the prefix in every sequence, and the canvas that knows of it."""
        return reuse(cache, canvas, self.stored, generation.rope, generation.plan.policy)

    @override
    def begin(
        self, canvas: Canvas, generation: Generation, extra: Float[Array, "b n"]
    ) -> tuple[Int[Array, "b"], Float[Array, "b"]]:
        """Tokens and bytes, which no step changes."""
        return reused_of(canvas, generation.model)

    @override
    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """`Stats.reused_tokens` and `Stats.reused_bytes`."""
        return dict(zip(("reused_tokens", "reused_bytes"), record[self.name], strict=True))


def reuse(
    cache: Cache, canvas: Canvas, stored: StoredPrefix, rope: Rope, policy: Policy
) -> tuple[Cache, Canvas]:
    """The cache with the prefix's keys and values in every sequence, and the canvas that knows of them."""
    spec, size = canvas.spec, canvas.spec.context.unit
    count = jnp.broadcast_to(stored.count, canvas.step.shape) // size * size
    first, most = jnp.argmax(canvas.valid, axis=1).astype(jnp.int32), canvas.layout.length
    if _computes_last(spec):
        most = jnp.sum(canvas.prompt, axis=1, dtype=jnp.int32) - 1
    if not policy.only_sets:  # whose layers tell a step that enters a block by its width: more than a block
        most = jnp.minimum(most, canvas.layout.length - first - size - 1)
    count = jnp.minimum(count, jnp.maximum(most, 0) // size * size)
    slot = jnp.arange(stored.slots, dtype=jnp.int32)
    position = jnp.where(slot < count[:, None], first[:, None] + slot, canvas.layout.length)

    def filled(storage: PyTree, new: KV) -> PyTree:
        pairs = policy._dense_pairs(storage)
        assert pairs is not None, "a policy that `refusal` lets pass"
        every = lambda a: jnp.broadcast_to(a[None], (len(first), *a.shape))
        keys = rotate(every(new.k), rope, position, spec.rope_in_f32)
        now = KV(scatter(pairs.k, position, keys), scatter(pairs.v, position, every(new.v)))
        is_pairs = lambda part: part is pairs
        return jax.tree.map(lambda part: now if is_pairs(part) else part, storage, is_leaf=is_pairs)

    if isinstance(stored.kv, list):
        layers = [filled(layer, new) for layer, new in zip(cache.layers, stored.kv, strict=True)]
    else:
        layers = jax.lax.map(lambda both: filled(*both), (cache.layers, stored.kv))
    stored_until = first + count + spec.context.begun
    return cache._replace(layers=layers), dataclasses.replace(in_blocks(canvas), stored=stored_until)


def reused_of(canvas: Canvas, model: Model) -> tuple[Int[Array, "b"], Float[Array, "b"]]:
    """Tokens of each sequence whose keys and values are there before the first step, and their bytes."""
    spec = canvas.spec
    known = canvas.valid & (canvas.position < in_blocks(canvas).stored[:, None] - spec.context.begun)
    count = jnp.sum(known, axis=1, dtype=jnp.int32)
    per_token = 2.0 * spec.layers * spec.kv_heads * spec.head_dim * np.dtype(model.dtype).itemsize
    return count, count * jnp.float32(per_token)


def empty(model: Model, slots: int) -> KV | list[KV]:
    """Room for so many positions, in the form of the model's parameters."""
    zeros = lambda *n: jnp.zeros((*n, slots, model.spec.kv_heads, model.spec.head_dim), model.dtype)
    if model.layers_are_separate:
        return [KV(zeros(), zeros()) for _ in range(model.spec.layers)]
    return KV(zeros(model.spec.layers), zeros(model.spec.layers))


def resized(kv: KV | list[KV], slots: int) -> KV | list[KV]:
    """The same with room for another number of positions."""

    def fit(a: Float[Array, "*n s k d"]) -> Float[Array, "*n slots k d"]:
        more = max(slots - a.shape[-3], 0)
        return jnp.pad(a, [*[(0, 0)] * (a.ndim - 3), (0, more), (0, 0), (0, 0)])[..., :slots, :, :]

    return jax.tree.map(fit, kv)
