"""Eviction that goes on in block-causal models: a budget for all earlier blocks, chosen at each block."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax import eviction
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import key_mask
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt
from dllm_jax.options.hints import call
from dllm_jax.policies.base import Policy
from dllm_jax.policies.parts.block_votes import (
    check_voters,
    mean_attention,
    queries_of_block,
    rows_of_block,
)
from dllm_jax.policies.parts.prompt_eviction import PromptEviction
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, marked


class PlacedPairs(NamedTuple):
    """Storage of a layer: the kept pairs, and after them the block's own.

    Attributes:
      pairs: Keys and values.
      position: Canvas position of each kept pair.
    """

    pairs: KV
    position: Int[Array, "*n b s k"]

    @staticmethod
    def zeros(spec: ModelSpec, batch: int, slots: int, dtype: Any) -> "PlacedPairs":
        """Empty slots for every layer."""
        pairs = KV.zeros(spec, batch, slots, dtype, scattered=False)
        return PlacedPairs(pairs, jnp.zeros(pairs.k.shape[:-1], jnp.int32))

    @staticmethod
    def of_rows(new: KV, rows: Rows) -> "PlacedPairs":
        """The pairs of the computed rows."""
        return PlacedPairs(new, jnp.broadcast_to(rows.index[..., None], new.k.shape[:-1]))

    def first(self, slots: int, then: "PlacedPairs") -> "PlacedPairs":
        """The pairs of the first slots, and others after them."""
        return jax.tree.map(lambda stored, new: jnp.concatenate([stored[:, :slots], new], axis=1), self, then)

    def best(
        self, layer: Layer, score: Float[Array, "b k s"], count: Int[Array, "b"], slots: int, length: int
    ) -> "PlacedPairs":
        """The best-scored pairs in order of position; empty slots have the position `length`.

        Args:
          layer: this layer's weights.
          score: Scores of the pairs, per KV head.
          count: Number of pairs to keep.
          slots: Slots of the result.
          length: Length of the canvas.
        """
        index = layer.topk_evict(score, jnp.broadcast_to(count[:, None], score.shape[:2]), slots)
        padded = jnp.pad(self.position, ((0, 0), (0, 1), (0, 0)), constant_values=length)
        position = jnp.take_along_axis(padded, jnp.swapaxes(index, 1, 2), axis=1)
        return PlacedPairs(KV(*layer.sparse_gather(*self.pairs, index)), position)


def attend_to_kept(
    layer: Layer,
    q: Float[Array, "b q h d"],
    new: KV,
    cache: LayerCache,
    rows: Rows,
    occupied: Bool[Array, "b s"],
) -> tuple[Float[Array, "b q h d"], LayerCache]:
    """Attention within a block: the kept pairs lie in front of its own, which take the last slots."""
    cache, both = cache.write_last(new, part="pairs")
    pairs, real = both.pairs, rows.real
    filled = jnp.pad(occupied, ((0, 0), (0, pairs.k.shape[1] - occupied.shape[1] - real.shape[1])))
    o, _ = layer.attention(q, pairs.k, pairs.v, key_mask(jnp.concatenate([filled, real], axis=1)))
    return o, cache


@dataclasses.dataclass(frozen=True)
class RollingEviction(Policy):
    """Stores `budget` pairs of earlier blocks per layer and KV head, and the block: `EvictPrompt` there.

    The step that enters a block computes the finished one too. Its rows read the kept pairs and both blocks;
    the new block's votes then rank the kept pairs and those of the finished block, and the best ones stay.
    What is evicted is gone. The method is ours.

    Attributes:
      budget: Pairs of earlier blocks to keep, per layer and KV head.
      votes: Positions of the block whose attention scores the pairs.
    """

    budget: PositiveInt = 256
    votes: eviction.Voters = eviction.PredictingVotes()

    def __post_init__(self):
        super().__post_init__()
        check_voters(self.votes, "with reselect=True on block-causal models")

    def slots(self, spec: ModelSpec, layout: Layout) -> int:
        """Slots of a layer: the kept pairs, and after them the block's own."""
        return min(self.budget, layout.length) + spec.context.size

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        if spec.shifted:
            raise ValueError(
                f"reselect=True is not supported on {spec.family}: the step that enters a block unmasks a "
                "token that the block before it predicts. Use reselect=False, or MAGE()."
            )
        pairs = PlacedPairs.zeros(spec, batch, self.slots(spec, layout), dtype)
        return Cache(pairs, shared=jnp.zeros((batch, layout.length), bool))

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """None but those of every block-causal model: a block, and two of them."""
        return ()

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        """Forgets what was kept where layers choose again."""
        return cache._replace(shared=cache.shared & ~_enters(canvas))

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """Attention to kept and new pairs; and the choice, where a block is entered."""
        q, k = layer.qk(x, rows.positions)
        new, length = KV(k, layer.value(x)), canvas.layout.length
        mask, stored = cache.attends(rows, canvas), canvas.before_model_block

        # A step over the canvas is a first one, or the canvas is all that is read: nothing kept is needed.
        slots = cache.read().position.shape[1]
        room = slots - canvas.spec.context.size
        if rows.full:
            placed, seen, candidates = PlacedPairs.of_rows(new, rows), stored | canvas.in_model_block, stored
        elif rows.in_one_block:
            o, cache = attend_to_kept(layer, q, new, cache, rows, self._kept(canvas, room))
            return layer.finish(x, o), cache

        # Some sequences enter a block, and compute the finished one in front of it, which does not see it.
        else:
            finished = rows.take(stored) & rows.real
            occupied = self._kept(canvas, room, jnp.sum(finished, axis=1))
            placed, inside = cache.read().first(room, PlacedPairs.of_rows(new, rows)), rows.keys(mask)
            before = jnp.broadcast_to(occupied[:, None, None], (*inside.shape[:3], room))
            mask = jnp.concatenate([before, inside], axis=3)
            seen, candidates = (jnp.concatenate([occupied, part], axis=1) for part in (rows.real, finished))

        # The best candidates stay where a block is entered, and room for its own pairs after them.
        keys, values = placed.pairs
        o, lse = layer.attention(q, keys, values, mask, canvas.lookahead(rows))
        of_block, mask = rows_of_block(canvas), key_mask(seen)
        queries, lse = queries_of_block(layer, q, keys, lse, rows, of_block, mask)
        score = mean_attention(self.votes, layer, queries, keys, lse, mask, of_block, canvas)
        score = jnp.where(candidates[:, None], score, -jnp.inf)
        count = jnp.minimum(jnp.sum(candidates, axis=1), self.budget)
        best, enters = placed.best(layer, score, count, slots, length), _enters(canvas)
        cache = cache._replace(shared=cache.shared | (marked(best.position, length) & enters))
        return layer.finish(x, o), cache.replace(enters[:, 0], best)

    def _kept(
        self, canvas: Canvas, room: int, finished: Int[Array, "b"] | int = 0
    ) -> Bool[Array, "b {room}"]:
        """Marks the slots of `room` that hold pairs, before `finished` positions of the step join them."""
        before = jnp.sum(canvas.before_model_block, axis=1) - finished
        return jnp.arange(room) < jnp.minimum(before, self.budget)[:, None]

    @override
    def _evicted(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return canvas.before_model_block & ~cache.shared


def rolling(asked: PromptEviction, spec: ModelSpec) -> RollingEviction:
    """The policy of a policy's budgets, which are equal in all layers and heads.

    Raises:
      ValueError: they differ, or the prompt votes.
    """
    if not isinstance(asked.heads, eviction.EvenHeads) or asked.layers != eviction.UniformLayers():
        raise ValueError(
            "reselect=True on block-causal models retains as many KV pairs in every layer and head: "
            f"heads={call(asked.heads)}, layers={call(asked.layers)} are not supported. "
            f"{calls_in_blocks(asked, spec)}"
        )
    if asked.votes.of_prompt:
        raise ValueError(
            f"votes={call(asked.votes)} is not supported with reselect=True on block-causal models: steps of "
            f"later blocks compute no prompt position. {calls_in_blocks(asked, spec)}"
        )
    return RollingEviction(asked.budget, asked.votes)


def calls_in_blocks(asked: PromptEviction, spec: ModelSpec) -> str:
    """Returns advice for a refused policy: complete calls that the block-causal model supports."""
    exact = {"policy": Policy()} if hasattr(asked, "policy") else {}
    votes = eviction.MaskVotes() if asked.votes.of_prompt else asked.votes
    even = {"heads": eviction.EvenHeads(), "layers": eviction.UniformLayers(), "votes": votes}
    often, once = (call(dataclasses.replace(asked, **exact, **o)) for o in (even, {"reselect": False}))
    again = "" if spec.shifted else f"{often}, which selects again at each block, or "
    return f"Use {again}{once}, which selects once."


def _enters(canvas: Canvas) -> Bool[Array, "b 1"]:
    """Whether the coming step of a sequence chooses."""
    return canvas.enters_model_block & canvas.active[:, None]
