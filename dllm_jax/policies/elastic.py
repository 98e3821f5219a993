"""Elastic-Cache (arXiv:2510.14973): a sliding window, and deep layers refreshed once attention drifts."""

import abc
import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.layer import Layer, LayerIndex
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Options, PositiveInt
from dllm_jax.policies.base import BY_DECIDED, Layers, Policy, halvings, with_mask_token
from dllm_jax.state.cache import KV, Cache, LayerCache, Proposal
from dllm_jax.state.canvas import Canvas, behind_first_eos
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, compact, full_rows, gather
from dllm_jax.state.selection import leftmost
from dllm_jax.traced import Number, Traced
from dllm_jax.xla.dependencies import after_on_cuda, read_before_write
from dllm_jax.xla.reductions import count_marked
from dllm_jax.xla.stacks import of_layer, put_of_layer
from pallas_kernels.attention.xla import weights

# Both drift tests compare the attention of the tracked (most attended) tokens before and after the step.
EPS = 1e-8  # norms below it count as it, as in torch's cosine_similarity


class Drift(NamedTuple):
    """State of the drift test.

    Attributes:
      attended: the positions each layer attended to most in the sequence's last step, l = none.
      coming: the same for the current step.
      start: the first layer that the sequence's last step computed for all positions; n = none.
      similarity: result of each layer's test in that step; infinity where the layer did not test.
    """

    attended: Int[Array, "b n track"]
    coming: Int[Array, "b n track"]
    start: Int[Array, "b"]
    similarity: Float[Array, "b n"]


@dataclasses.dataclass(frozen=True)
class DriftTest(Options, abc.ABC):
    """Selects tracked tokens and compares their attention before and after a step."""

    @abc.abstractmethod
    def tokens(self, attended: Int[Array, "b n track"], layer: LayerIndex, length: int) -> Int[Array, "b t"]:
        """The positions that a layer tests, l = none.

        Args:
          attended: the tracked tokens of every layer, l = none.
          layer: index of the layer.
          length: canvas positions l.
        """

    @abc.abstractmethod
    def cosine(
        self, old: Float[Array, "b h t s"], new: Float[Array, "b h t s"], keys: Bool[Array, "b s"]
    ) -> Float[Array, "b t"]:
        """Similarity of each tested token's attention weights before and after the step.

        Args:
          old: attention weights before the step.
          new: after it.
          keys: keys that are not padding.
        """

    def similarity(
        self,
        old: Float[Array, "b h t s"],
        new: Float[Array, "b h t s"],
        tested: Bool[Array, "b t"],
        keys: Bool[Array, "b s"],
    ) -> Float[Array, "b"]:
        """Mean similarity of the tested tokens; without any, infinity, which is below no threshold.

        Args:
          old: attention weights before the step.
          new: after it.
          tested: entries of t that are tokens.
          keys: keys that are not padding.
        """
        return _mean(self.cosine(old, new, keys), tested)


@dataclasses.dataclass(frozen=True)
class HeadCosine(DriftTest):
    """As released: every layer tests the tokens of all layers, by the cosine along the head axis.

    sigma(token, key) = cos over heads of (A_old, A_new), mean over keys. The vectors hold small positive
    numbers, so values are close to 1 and not comparable with `KeyCosine`.
    """

    @override
    def tokens(self, attended: Int[Array, "b n track"], layer: LayerIndex, length: int) -> Int[Array, "b t"]:
        """The tracked tokens of all layers, each once, in order of position."""
        # At most `track` tokens a layer, and no more than the canvas has: a static bound of the union's size.
        union = members(attended, length)
        return compact(union, min(length, attended.shape[1] * attended.shape[2]))

    @override
    def cosine(
        self, old: Float[Array, "b h t s"], new: Float[Array, "b h t s"], keys: Bool[Array, "b s"]
    ) -> Float[Array, "b t"]:
        """The mean over keys of the cosine along the head axis, whose vectors have one entry per head."""
        return _mean(_cosine(old, new, axis=1), keys[:, None, :])


@dataclasses.dataclass(frozen=True)
class KeyCosine(DriftTest):
    """As the paper words it: a layer tests its own tokens, by the cosine of their attention vectors.

    Weights are averaged over heads, the cosine is over keys.
    """

    @override
    def tokens(self, attended: Int[Array, "b n track"], layer: LayerIndex, length: int) -> Int[Array, "b t"]:
        """The tokens that this layer itself attended to most."""
        return of_layer(attended, layer, axis=1)

    @override
    def cosine(
        self, old: Float[Array, "b h t s"], new: Float[Array, "b h t s"], keys: Bool[Array, "b s"]
    ) -> Float[Array, "b t"]:
        """The cosine over keys of weights averaged over heads."""
        # Padding has weight 0 in both vectors, so `keys` changes nothing.
        return _cosine(jnp.mean(old, axis=1), jnp.mean(new, axis=1), axis=-1)


def members(attended: Int[Array, "b n track"], length: int) -> Bool[Array, "b l"]:
    """The tracked positions of all layers as a set."""
    return Rows(attended.reshape(attended.shape[0], -1), length).mask()


def most_attended(
    votes: Float[Array, "b l"], candidates: Bool[Array, "b l"], track: int
) -> Int[Array, "b track"]:
    """The candidates with most votes, ties to the lower position; l where there are too few."""
    # Of equal votes, `top_k` takes that of the lower index first.
    length = votes.shape[1]
    value, index = jax.lax.top_k(jnp.where(candidates, votes, -jnp.inf), min(track, length))
    return jnp.where(value > -jnp.inf, index, length)


def _cosine(x: Float[Array, "..."], y: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    # Each norm is bounded on its own, as torch does, rather than their product.
    norm = lambda v: jnp.maximum(jnp.sqrt(jnp.sum(v * v, axis=axis)), EPS)
    return jnp.sum(x * y, axis=axis) / (norm(x) * norm(y))


def _mean(x: Float[Array, "..."], where: Bool[Array, "..."]) -> Float[Array, "..."]:
    """The mean over the last axis of the marked entries, infinity without any."""
    where = jnp.broadcast_to(where, x.shape)
    # Not NaN: the result is in a cache, and `jax_debug_nans` looks at caches between programs.
    return jnp.where(jnp.any(where, axis=-1), jnp.mean(x, axis=-1, where=where), jnp.inf)


@dataclasses.dataclass(frozen=True)
class ElasticCache(Policy):
    """Recomputes a window of masks and tracked tokens; recomputes whole layers when attention drifts.

    Use it in one long block. It adapts the refreshes to the model's attention. On the GPU that was measured
    (random weights, blocks of 32), `DualCache` was faster and computed fewer tokens.

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
      gamma: Similarity below which a layer has drifted. -1 never refreshes; values above 1 do where a token
        is tracked.
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
        """Positions that predict the window; without `block_caching`, all masks."""
        return canvas.predicting_positions(
            self.in_window(canvas) if self.block_caching else self.undecided(canvas)
        )

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Selects everything at first; then new and tracked tokens, and the voters."""
        tracked = members(cache.shared.attended, canvas.layout.length)
        return canvas.first_step | canvas.just_decoded | tracked | self.voters(canvas)

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """The selected positions, in a full step all of them after drift in a lower layer; test and votes.

        A partial step runs the layers above the drift again (`network`), after all layers: none waits.
        """
        drift, length, number = cache.shared, canvas.layout.length, layer.entry

        # Algorithm 1: the first step computes everything; else layers from `start` on do.
        begins = jnp.where(canvas.step == 0, 0, canvas.spec.layers)
        start = jnp.where(canvas.active & (layer.index == 0), begins, drift.start)
        wide = canvas.active & (start <= number)

        # Attention of the tracked tokens before this step, from stored inputs and keys.
        # The stores are updated in place below: XLA must finish this read first. Of the heads' weights the
        # largest show that in fewer kernels than all of them.
        tested = Rows(self.test.tokens(drift.attended, number, length), length)
        mask, stored = cache.attends(tested, canvas), cache.read()
        before = weights(layer.qk(tested.take(stored.x), tested.index)[0], stored.k, mask)
        index, wide = read_before_write(jnp.max(before, axis=1), (rows.index, wide))
        rows = dataclasses.replace(rows, index=index)

        # The layer itself, and attention of the tracked tokens after it.
        x, q, lse, cache = pass_layer(layer, x, cache, rows, wide, canvas)
        k = cache.read().k
        after = weights(gather(q, rows.slot(tested.index)), k, mask)

        # Where the two differ too much, the following layers recompute all positions.
        keys = canvas.valid if mask is None else jnp.any(mask, axis=(1, 2))
        similarity = self.test.similarity(before, after, tested.real, keys)
        drifted = canvas.active & ~wide & (similarity < self.gamma)
        votes = self.votes(layer, q, lse, cache, rows, canvas)

        # `attended` stays as it is until `observe`: all layers of a step test the same tokens.
        put = lambda array, new: put_of_layer(array, new, number, axis=1)
        drift = Drift(
            drift.attended,
            put(drift.coming, self.top(votes, canvas)),
            jnp.where(drifted, number + 1, start),
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
        """Votes summed over heads and over the voters."""
        voting = (rows.take(self.voters(canvas)) & rows.real).astype(jnp.float32)
        return jnp.sum(layer.received(q, cache.read().k, lse, voting, cache.attends(rows, canvas)), axis=1)

    def top(self, votes: Float[Array, "b l"], canvas: Canvas) -> Int[Array, "b track"]:
        """The most attended positions that are decided or cut off, which are tracked in the next step."""
        return most_attended(votes, canvas.valid & ~self.undecided(canvas), self.track)

    @override
    def network(
        self, layers: Layers, x: Float[Array, "b q m"], cache: Cache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], Cache]:
        """Runs the layers; after a partial step, those above a layer in which attention drifted again."""
        x, cache = layers.run(x, cache, rows)
        if rows.full:
            return x, cache
        drifted = lambda cache, layer: canvas.active & (cache.shared.start <= layer)
        return layers.rerun(x, cache, rows, self._repair, drifted)

    def _repair(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """All positions from the stored inputs, where attention drifted in a lower layer; and new votes."""
        drift, number = cache.shared, layer.entry
        wide = canvas.active & (drift.start <= number)
        keep = canvas.everything & wide[:, None]
        again, q, lse, cache = compute_all(layer, cache, rows, keep, wide, canvas)
        votes = self.votes(layer, q, lse, cache, rows, canvas)
        before = of_layer(drift.coming, number, axis=1)
        coming = jnp.where(wide[:, None], self.top(votes, canvas), before)
        drift = drift._replace(coming=put_of_layer(drift.coming, coming, number, axis=1))
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
        """Four windows, which usually hold the tracked tokens too; without `block_caching`, halvings.

        None of a small model: a layer that computes the selection alone is one more to compile, besides that
        which computes all positions after drift, and saves little.
        """
        if layout.compiles_longer_than_it_runs(spec):
            return ()
        return (min(4 * self.window, layout.length),) if self.block_caching else halvings(layout.length)[:-1]

    _in_blocks = with_mask_token(BY_DECIDED)


class InputStore(NamedTuple):
    """Storage from which a layer can be recomputed: its input and its K/V, for all positions."""

    x: Float[Array, "*n b l m"]
    k: Float[Array, "*n b l k d"]
    v: Float[Array, "*n b l k d"]

    @staticmethod
    def zeros(spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> "InputStore":
        """Empty storage of all layers."""
        x = jnp.zeros((spec.layers, batch, layout.length, spec.width), dtype)
        return InputStore(x, *KV.zeros(spec, batch, layout.length, dtype))


class LayerResult(NamedTuple):
    """Result of a layer at the computed positions.

    Attributes:
      x: the residual stream after the layer.
      q: rotated queries.
      lse: log-sum-exp of their attention scores.
      cache: the changed storage.
    """

    x: Float[Array, "b q m"]
    q: Float[Array, "b q h d"]
    lse: Float[Array, "b h q"]
    cache: LayerCache


def pass_layer(
    layer: Layer,
    x: Float[Array, "b q m"],
    cache: LayerCache,
    rows: Rows,
    wide: Bool[Array, "b"],
    canvas: Canvas,
) -> LayerResult:
    """One layer over the selected positions; in a full step, wide sequences compute all positions.

    New inputs are stored first.

    Args:
      layer: this layer's weights.
      x: the residual stream at the rows.
      cache: this layer's view of an `InputStore`.
      rows: the selected positions.
      wide: sequences that compute all positions, in a full step.
      canvas: state before the step.
    """
    cache = cache.write(rows, x=x)
    if rows.full:
        return compute_all(layer, cache, rows, rows.mask() | wide[:, None], wide, canvas)
    return _compute(layer, x, cache, rows, rows, canvas)


def compute_all(
    layer: Layer,
    cache: LayerCache,
    rows: Rows,
    keep: Bool[Array, "b l"],
    wide: Bool[Array, "b"],
    canvas: Canvas,
) -> LayerResult:
    """One layer over all positions from its stored inputs (algorithm 1), with the result at the rows.

    Args:
      layer: this layer's weights.
      cache: this layer's view of an `InputStore`.
      rows: the selected positions.
      keep: Positions whose keys and values are stored.
      wide: Sequences whose outputs become the next layer's inputs.
      canvas: state before the step.
    """
    every = full_rows(canvas.everything)
    x, q, lse, cache = _compute(layer, cache.read().x, cache, every, full_rows(keep), canvas)
    cache = cache.write(full_rows(canvas.everything & wide[:, None]), ahead=1, x=x)

    # Only the selected positions go on to the next layer's test and votes.
    lse = jnp.moveaxis(rows.take(jnp.moveaxis(lse, 2, 1)), 1, 2)
    return LayerResult(rows.take(x), rows.take(q), lse, cache)


def _compute(
    layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, keep: Rows, canvas: Canvas
) -> LayerResult:
    """The exact layer at the rows; only the K/V of `keep`, a subset in the same places, are stored."""
    layer = layer.at(rows.index)
    q, k = layer.qk(x, rows.positions)
    cache = cache.write(keep, k=k, v=layer.value(x))
    now = cache.read()
    o, lse = layer.attention(q, now.k, now.v, cache.attends(rows, canvas), reads_lse=True)
    return LayerResult(layer.finish(x, o), q, lse, cache)
