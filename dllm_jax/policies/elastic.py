"""Elastic-Cache (arXiv:2510.14973): a sliding window, and deep layers refreshed once attention drifts."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax.decoding.block_schedule import behind_first_eos
from dllm_jax.nn.attention import weights
from dllm_jax.nn.layer import Block
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt
from dllm_jax.policies.base import Policy, halvings
from dllm_jax.policies.parts.control import after
from dllm_jax.policies.parts.drift import Drift, DriftTest, HeadCosine, members, most_attended
from dllm_jax.policies.parts.widening import Stored, pass_layer
from dllm_jax.state.cache import KV, Cache, LayerView
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows, gather


@dataclasses.dataclass(frozen=True)
class ElasticCache(Policy):
    """Recomputes a window of masks, fresh tokens and tracked ones; after drift, all from some layer on.

    The first `window` masks are the only ones that may be decoded. Each layer tests whether the attention of
    the tracked tokens (the most attended ones of the last step) has changed; where the similarity falls below
    `gamma`, the following layers recompute all positions from the inputs they have stored (algorithm 1).
    Layer 0 needs no such refresh: its K/V depend on the token alone.

    Exact limit: a single step; unless the head is shifted, also any run with window and track that cover the
    canvas (the shifted window is of source rows and leaves out the last mask's own).
    Departures: old queries are recomputed from the stored inputs instead of being stored; batches work, each
    row with its own refreshes; a block smaller than the response limits the window to the block; see
    docs/departures.md.

    Attributes:
      window: masks that are computed and may be decoded (beta); a sampler that has to decode more in some
        step is refused.
      gamma: a layer whose similarity is below it has drifted; -1 never refreshes, above 1 always does.
      track: most attended tokens that each layer tracks.
      test: what is compared, `HeadCosine` (released code) or `KeyCosine` (paper).
      block_caching: False computes all masks, which then also vote; only the window is decoded in any case.
      cut_at_eos: leave the masks after the first decoded end-of-text masked. For use with
        `generate(stop_at_eos=True)`, which ends the row and fills them; else the row idles to its last step.
    """

    window: PositiveInt = 16
    gamma: float = 0.9
    track: PositiveInt = 1
    test: DriftTest = HeadCosine()
    block_caching: bool = True
    cut_at_eos: bool = False

    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """Input, K and V of every layer and position."""
        x = jnp.zeros((spec.layers, batch, layout.length, spec.width), dtype)
        attended = jnp.full((batch, spec.layers, min(self.track, layout.length)), layout.length)
        start, similarity = jnp.zeros(batch, jnp.int32), jnp.full((batch, spec.layers), jnp.nan)
        stored = Stored(x, KV.zeros(spec, batch, layout.length, dtype))
        return Cache(stored, Drift(attended, attended, start, similarity))

    def eligible(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """The window: the leftmost masks."""
        masks = canvas.eligible & self.undecided(canvas)
        return masks & (jnp.cumsum(masks, axis=1) <= self.window)

    def most_eligible(self, layout: Layout) -> int:
        """The window."""
        return self.window

    def undecided(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Masks that are still to be decoded."""
        return canvas.masked & ~behind_first_eos(canvas) if self.cut_at_eos else canvas.masked

    def voters(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Rows that predict masks."""
        return canvas.sources(self.eligible(canvas) if self.block_caching else self.undecided(canvas))

    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything at first; then the fresh, the tracked, and the rows that predict the window."""
        tracked = members(cache.shared.attended, canvas.layout.length)
        return canvas.first_step | canvas.fresh | tracked | self.voters(canvas)

    def layer(
        self,
        block: Block,
        x: Float[Array, "b q m"],
        kv: LayerView,
        shared: Drift,
        rows: Rows,
        canvas: Canvas,
    ) -> tuple[Float[Array, "b q m"], LayerView, Drift]:
        """The rows, or all positions where a lower layer has drifted; then this layer's test and votes."""
        begins = jnp.where(canvas.step == 0, 0, canvas.spec.layers)
        start = jnp.where(canvas.active & (block.layer == 0), begins, shared.start)
        wide = canvas.active & (start <= block.layer)
        tested = Rows(self.test.tokens(shared.attended, block.layer, canvas.layout.length), whole=False)
        mask, old = canvas.attends(tested), kv.read()
        before = weights(block.qk(tested.take(old.x), tested)[0], old.kv.k, mask)
        index, wide = after(before, (rows.index, wide))
        rows = rows._replace(index=index)
        x, q, lse, stored = pass_layer(block, x, kv, rows, wide, canvas)
        kv = kv._replace(stack=stored)
        k = kv.read().kv.k
        now = weights(gather(q, rows.slot(tested.index, canvas.layout.length)), k, mask)
        similarity = self.test.similarity(before, now, tested.index < canvas.layout.length, canvas.valid)
        drifted = canvas.active & ~wide & (similarity < self.gamma)
        voting = rows.take(self.voters(canvas)) & (rows.index < canvas.layout.length)
        votes = block.received(q, k, lse, voting.astype(jnp.float32), canvas.attends(rows))
        top = most_attended(jnp.sum(votes, axis=1), canvas.valid & ~self.undecided(canvas), self.track)
        shared = Drift(
            shared.attended,
            shared.coming.at[:, block.layer].set(top),
            jnp.where(drifted, block.layer + 1, start),
            shared.similarity.at[:, block.layer].set(jnp.where(wide, jnp.nan, similarity)),
        )
        return x, kv, shared

    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        """The most attended tokens of this step are tracked from the next step on."""
        drift = cache.shared
        attended = jnp.where(canvas.active[:, None, None], drift.coming, drift.attended)
        return cache._replace(shared=drift._replace(attended=attended))

    def widened(self, cache: Cache, canvas: Canvas, computed: Bool[Array, "b l"]) -> Float[Array, "b"]:
        """The positions that were not selected, in the layers from `start` on."""
        start, layers = cache.shared.start[: computed.shape[0]], canvas.spec.layers
        further = jnp.sum(canvas.valid & ~computed, axis=1) * (layers - start) / layers
        return jnp.where(canvas.active, further, 0.0)

    def widths(self, layout: Layout) -> tuple[int, ...]:
        """Four windows, which usually hold the tracked tokens too; the canvas, for the rare other steps."""
        if not self.block_caching:
            return halvings(layout.length)
        return tuple({min(4 * self.window, layout.length), layout.length})
