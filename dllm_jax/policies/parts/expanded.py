"""Kept prompt pairs in canvas order: storage under eviction, for a layer that reads all positions."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree
from typing_extensions import override

from dllm_jax.eviction.pair_store import PairStore
from dllm_jax.nn.attention import Mask
from dllm_jax.nn.layer import Layer, LayerIndex
from dllm_jax.policies.base import Policy
from dllm_jax.policies.parts.control import REFRESH, when
from dllm_jax.policies.parts.prompt_eviction import Attention, PromptEviction
from dllm_jax.state.cache import KV, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, scatter


class Expanded(NamedTuple):
    """What an `ExpandedCache` has in the place of the policy's storage.

    Attributes:
      storage: the policy's own, whose k and v hold the canvas' last positions alone.
      prompt: K and V of the c positions before these; anything where no pair is kept.
      kept: pairs that each kv head may attend to; where the layer recomputes all of the prompt, all of them.
      real: positions of the c that are not padding.
      renewed: sequences whose layer has recomputed all of them.
    """

    storage: PyTree
    prompt: KV
    kept: Bool[Array, "b k c"]
    real: Bool[Array, "b c"]
    renewed: Bool[Array, "b 1"]


class ExpandedCache(LayerCache):
    """One layer's view of evicted storage that reads like the storage of a policy which evicts nothing.

    Only the layer that runs is expanded, from its packed pairs. What a layer writes to the prompt is seen
    until the layer ends; what of it is stored, its pairs say.
    """

    __slots__ = ()

    @classmethod
    def of_pairs(
        cls, cache: LayerCache, pairs: PairStore, layer: LayerIndex, width: int, columns: int, canvas: Canvas
    ) -> "ExpandedCache":
        """The view before the layer runs.

        Args:
          cache: this layer's view of the storage, whose k and v lack the first `columns` positions.
          pairs: the kept pairs of all layers.
          layer: index of the layer.
          width: upper bound of the pairs of a head.
          columns: c, the positions that are stored as pairs.
          canvas: state before the step.
        """
        # A pair's place among the columns is its position; padding of the packed pairs has the place c.
        k, v, real = pairs.read(layer, width)
        place = jnp.where(real[:, :, 0], pairs.positions(layer, width), columns)
        sequence, head = jnp.arange(len(k))[:, None, None], jnp.arange(k.shape[2])[:, None]
        kept = jnp.zeros((len(k), k.shape[2], columns), bool).at[sequence, head, place].set(True, mode="drop")

        def in_order(packed: Float[Array, "b w k d"]) -> Float[Array, "b c k d"]:
            by_head = jnp.zeros((*kept.shape, packed.shape[-1]), packed.dtype)
            by_head = by_head.at[sequence, head, place].set(jnp.swapaxes(packed, 1, 2), mode="drop")
            return jnp.swapaxes(by_head, 1, 2)

        none, in_prompt = jnp.zeros((len(k), 1), bool), canvas.prompt[:, :columns]
        expanded = Expanded(cache.layers, KV(in_order(k), in_order(v)), kept, in_prompt, none)
        return cls(expanded, cache.index, cache.shared, cache.kernels)

    @property
    def storage(self) -> LayerCache:
        """The layer's view of the storage itself, as the engine knows it."""
        return LayerCache(self.layers.storage, self.index, self.shared, self.kernels)

    @override
    def attends(self, rows: Rows, canvas: Canvas) -> Mask:
        """As always, but of the prompt only to the pairs that a head keeps."""
        behind = canvas.layout.length - self.layers.kept.shape[2]
        kept = jnp.pad(self.layers.kept, ((0, 0), (0, 0), (0, behind)), constant_values=True)[:, :, None]
        mask = canvas.attends(rows)
        return kept if mask is None else kept & mask

    @override
    def read(self) -> PyTree:
        """The policy's structure, with K and V of all positions."""
        own, prompt = self.storage.read(), self.layers.prompt
        k, v = (jnp.concatenate(parts, axis=1) for parts in zip(prompt, (own.k, own.v), strict=True))
        return own._replace(k=k, v=v)

    @override
    def update(self, rows: Rows, new: Any) -> tuple["ExpandedCache", PyTree]:
        """Writes new values of every array."""
        cache = self.write(rows, **new._asdict())
        return cache, cache.read()

    @override
    def write(self, rows: Rows, **parts: PyTree) -> "ExpandedCache":
        """Writes new values; K and V to the prompt and to the last positions, each where it is stored."""
        of_pairs = {name: parts.pop(name) for name in KV._fields if name in parts}
        storage = self.storage.write(rows, **parts) if parts else self.storage
        if not of_pairs:
            return self._replace(layers=self.layers._replace(storage=storage.layers))

        # Positions behind the prompt's columns are dropped by the one write, those before by the other.
        columns = self.layers.kept.shape[2]
        storage = storage.write(rows.last(rows.length - columns), **of_pairs)
        prompt = self.layers.prompt
        prompt = prompt._replace(
            **{name: scatter(getattr(prompt, name), rows.index, new) for name, new in of_pairs.items()}
        )
        layers = self.layers._replace(storage=storage.layers, prompt=prompt)

        # Where all of the prompt is new, all of it is attended to. That takes as many rows, which is static.
        if "k" in of_pairs and rows.index.shape[1] >= columns:
            new = jnp.all(rows.mask()[:, :columns] | ~layers.real, axis=1, keepdims=True)
            new &= jnp.any(layers.real, axis=1, keepdims=True)
            kept = layers.kept | (new & layers.real)[:, None]
            layers = layers._replace(kept=kept, renewed=layers.renewed | new)
        return self._replace(layers=layers)

    @override
    def write_next(self, rows: Rows, **parts: PyTree) -> "ExpandedCache":
        """Writes to the following layer's storage, of which K and V are no part."""
        storage = self.storage.write_next(rows, **parts)
        return self._replace(layers=self.layers._replace(storage=storage.layers))


def layer_over_kept(
    eviction: PromptEviction,
    policy: Policy,
    pairs: PairStore,
    layer: Layer,
    x: Float[Array, "b q m"],
    cache: LayerCache,
    rows: Rows,
    chooses: Bool[Array, "b 1"],
    canvas: Canvas,
) -> tuple[Float[Array, "b q m"], LayerCache, PairStore]:
    """The layer of a policy that has one, over kept pairs; where it recomputes the prompt, heads choose.

    Args:
      eviction: which pairs are kept.
      policy: what the layer computes, and where.
      pairs: the kept pairs of all layers.
      layer: this layer's weights.
      x: the residual stream at the rows.
      cache: the policy's view of this layer, whose storage of K and V holds the last positions.
      rows: the computed positions.
      chooses: sequences that choose anew if they recompute the prompt; the others renew what they have.
      canvas: state before the step.

    Returns:
      x after the layer, and the changed storage and pairs.
    """
    columns = canvas.layout.length - cache.read().k.shape[1]
    widest = eviction.widest_head(canvas.spec, canvas.layout)
    view = ExpandedCache.of_pairs(cache, pairs, layer.index, widest, columns, canvas)
    after, view = policy.layer(layer, x, view, rows, canvas)
    assert isinstance(view, ExpandedCache), "a layer returns the view that it is given, changed"

    # Of voters that are not masks all have to be computed; of masks, those that are computed vote.
    voters, computed = eviction.votes.voters(canvas), rows.mask()
    heard = jnp.all(computed | ~voters | canvas.masked, axis=1, keepdims=True)
    heard &= jnp.any(computed & voters, axis=1, keepdims=True)
    where = view.layers.renewed & heard & chooses

    def choose(pairs: PairStore) -> PairStore:
        (q, _), stored, mask = layer.qk(x, rows.index), view.read(), view.attends(rows, canvas)
        _, lse = layer.attention(q, stored.k, stored.v, mask)
        return eviction.evict(pairs, layer, Attention(q, stored.k, lse, mask), rows, columns, where, canvas)

    # In a full step XLA finds that the policy's layer has computed the same scores already.
    pairs = choose(pairs) if rows.full else when(jnp.any(where), choose, pairs, name=REFRESH)
    k, v = view.layers.prompt
    return after, view.storage, pairs.renew(layer, k, v, widest, jnp.ones_like(where))
