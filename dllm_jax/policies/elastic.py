"""Elastic-Cache (arXiv:2510.14973): a sliding window, and deep layers refreshed once attention drifts."""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.layer import Layer, LayerIndex
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt
from dllm_jax.policies.base import Policy, halvings
from dllm_jax.policies.parts.elastic_drift import Drift, DriftTest, HeadCosine, members, most_attended
from dllm_jax.policies.parts.elastic_widening import InputStore, compute_all, pass_layer
from dllm_jax.state.cache import Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.ends import behind_first_eos
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows, gather
from dllm_jax.state.selection import leftmost
from dllm_jax.traced import Number, Traced
from dllm_jax.xla.dependencies import after_on_cuda, read_before_write
from dllm_jax.xla.reductions import count_marked
from dllm_jax.xla.stacks import of_layer, put_of_layer
from pallas_kernels.attention.xla import weights


@dataclasses.dataclass(frozen=True)
class ElasticCache(Policy):
    """Recomputes a window of masks and tracked tokens; recomputes whole layers when attention drifts.

    Use it in one long block. It adapts the refreshes to the model's attention, and computed the fewest tokens
    of all caches on `tiny-llada`.

    Only the first `window` masks may be unmasked. Each layer tests whether the attention of the tracked
    tokens (the most attended ones of the last step) has changed. Where the similarity falls below `gamma`,
    the layers above recompute all positions from their stored inputs (algorithm 1). Layer 0 needs no refresh,
    because its keys and values depend on the tokens alone.

    Memory: Dense keys and values, and the input of every layer.

    Limits: A good `gamma` differs between models; a value too high recomputes most layers.

    Equals exact decoding when: the response takes one step. Without a shifted output head, also in one block
      when window and track cover the canvas.
    Differences: Old queries are recomputed from the stored inputs instead of being stored. Batches work, and
      each sequence refreshes on its own. A block smaller than the response limits the window.

    Attributes:
      window: Number of masks that are computed and may be unmasked (beta). A schedule that wants more in a
        step takes further steps.
      gamma: Similarity below which a layer has drifted. -1 never refreshes; values above 1 always do.
      track: Number of most attended tokens that each layer tracks.
      test: Drift test: `HeadCosine` (reference implementation) or `KeyCosine` (paper).
      block_caching: Whether masks outside the window stay cached. False computes all masks, which then vote
        too; only the window is unmasked in either case.
      cut_at_eos: Whether masks after the first end-of-text stay masked. Use it with
        `generate(stop_at_eos=True)`, which ends the sequence and fills them.
    """

    window: PositiveInt = 16
    gamma: Annotated[Number, Traced()] = 0.9
    track: PositiveInt = 1
    test: DriftTest = HeadCosine()
    block_caching: bool = True
    cut_at_eos: bool = False

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """Input, K and V of every layer and position."""
        tracked = (batch, spec.layers, min(self.track, layout.length))
        attended, start = jnp.full(tracked, layout.length, jnp.int32), jnp.zeros(batch, jnp.int32)
        similarity = jnp.full((batch, spec.layers), jnp.inf, jnp.float32)
        store = InputStore.zeros(spec, layout, batch, dtype)
        return Cache(store, Drift(attended, attended, start, similarity), jnp.zeros((batch, spec.layers)))

    @override
    def eligible(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """The window, in front of a stop."""
        return canvas.eligible & self.in_window(canvas)

    def in_window(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """The leftmost masks up to the end of the block; positions attend to those after a stop, too."""
        return leftmost(self.undecided(canvas) & (canvas.position < canvas.block_end), self.window)

    def undecided(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Masks that are still to be decoded."""
        return canvas.masked & ~behind_first_eos(canvas) if self.cut_at_eos else canvas.masked

    def voters(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Positions that predict masks."""
        return canvas.predicting_positions(
            self.in_window(canvas) if self.block_caching else self.undecided(canvas)
        )

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Selects everything at first; then new and tracked tokens, and what predicts the window."""
        tracked = members(cache.shared.attended, canvas.layout.length)
        return canvas.first_step | canvas.just_decoded | tracked | self.voters(canvas)

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """The selected positions, in a full step all of them after drift in a lower layer; test and votes.

        A partial step runs the layers above the drift again (`_repair`), after all layers: none waits.
        """
        drift, length = cache.shared, canvas.layout.length

        # Algorithm 1, line 2: the first step computes everything; else layers from `start` on do.
        begins = jnp.where(canvas.step == 0, 0, canvas.spec.layers)
        start = jnp.where(canvas.active & (layer.index == 0), begins, drift.start)
        wide = canvas.active & (start <= layer.index)

        # Line 4: attention of the tracked tokens before this step, from stored inputs and keys.
        # The stores are updated in place below: XLA must finish this read first.
        tested = Rows(self.test.tokens(drift.attended, layer.index, length), length)
        mask, stored = cache.attends(tested, canvas), cache.read()
        before = weights(layer.qk(tested.take(stored.x), tested.index)[0], stored.k, mask)
        index, wide = read_before_write(before, (rows.index, wide))
        rows = dataclasses.replace(rows, index=index)

        # Line 5: the layer itself, and attention of the tracked tokens after it.
        x, q, lse, cache = pass_layer(layer, x, cache, rows, wide, canvas)
        k = cache.read().k
        after = weights(gather(q, rows.slot(tested.index)), k, mask)

        # Lines 6-8, equation 6: where the two differ too much, the following layers recompute all positions.
        keys = canvas.valid if mask is None else jnp.any(mask, axis=(1, 2))
        similarity = self.test.similarity(before, after, tested.real, keys)
        drifted = canvas.active & ~wide & (similarity < self.gamma)
        votes = self.votes(layer, q, lse, cache, rows, canvas)

        # `attended` stays as it is until `observe`: all layers of a step test the same tokens.
        put = lambda array, new: put_of_layer(array, new, layer.index, axis=1)
        drift = Drift(
            drift.attended,
            put(drift.coming, self.top(votes, canvas)),
            jnp.where(drifted, layer.index + 1, start),
            put(drift.similarity, jnp.where(wide, jnp.inf, similarity)),
        )
        return after_on_cuda(votes, x), cache._replace(shared=drift)

    def votes(
        self,
        layer: Layer,
        q: Float[Array, "b q h d"],
        lse: Float[Array, "b h q"],
        cache: LayerCache,
        rows: Rows,
        canvas: Canvas,
    ) -> Float[Array, "b l"]:
        """Votes of equation 5, summed over heads and over the positions that predict the window."""
        voting = (rows.take(self.voters(canvas)) & rows.real).astype(jnp.float32)
        return jnp.sum(layer.received(q, cache.read().k, lse, voting, cache.attends(rows, canvas)), axis=1)

    def top(self, votes: Float[Array, "b l"], canvas: Canvas) -> Int[Array, "b track"]:
        """The most attended decoded tokens, which are tracked in the next step."""
        return most_attended(votes, canvas.valid & ~self.undecided(canvas), self.track)

    _runs_again: ClassVar[bool] = True

    @override
    def _repairs(self, cache: Cache, canvas: Canvas, layer: LayerIndex) -> Bool[Array, "b"]:
        """Sequences in which attention drifted in a lower layer."""
        return canvas.active & (cache.shared.start <= layer)

    @override
    def _repair(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """All positions from the stored inputs, where attention drifted in a lower layer; and new votes."""
        drift = cache.shared
        wide = canvas.active & (drift.start <= layer.index)
        keep = canvas.everything & wide[:, None]
        again, q, lse, cache = compute_all(layer, cache, rows, keep, wide, canvas)
        votes = self.votes(layer, q, lse, cache, rows, canvas)
        before = of_layer(drift.coming, layer.index, axis=1)
        coming = jnp.where(wide[:, None], self.top(votes, canvas), before)
        drift = drift._replace(coming=put_of_layer(drift.coming, coming, layer.index, axis=1))
        x = jnp.where(wide[:, None, None], again, x)
        return after_on_cuda(votes, x), cache._replace(shared=drift)

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        """The most attended tokens of this step are tracked from the next step on."""
        drift = cache.shared
        attended = jnp.where(canvas.active[:, None, None], drift.coming, drift.attended)

        # Layers from `start` on have computed what was not selected, too.
        further = count_marked(canvas.valid & ~rows.mask())[:, None]
        wide = canvas.active[:, None] & (jnp.arange(canvas.spec.layers) >= drift.start[:, None])
        extra = jnp.where(wide, further, 0).astype(jnp.float32)
        return cache._replace(shared=drift._replace(attended=attended), extra_positions=extra)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """Four windows, which usually hold the tracked tokens too; else halvings of the canvas.

        None of a small model: a layer that computes the selection alone is one more to compile, besides that
        which computes all positions after drift, and saves little.
        """
        if layout.compiles_longer_than_it_runs(spec):
            return ()
        return (min(4 * self.window, layout.length),) if self.block_caching else halvings(layout.length)[:-1]
