"""The exact decoder, which is also the interface of all cache policies."""

import dataclasses
from typing import Any, Literal, final

from jaxtyping import Array, Bool, Float

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Options
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows


@dataclasses.dataclass(frozen=True)
class Policy(Options):
    """Exact decoding: every denoising step recomputes every position.

    A cache policy is a frozen dataclass that overrides the members in which it differs; its fields are the
    method's hyper-parameters, and their annotations say which values are allowed (`dllm_jax.options`).
    Methods are pure and traced once; state between steps is in the `Cache`. The ten members below are all
    there are, in the order in which a generation uses them.
    """

    # -- what is stored -----------------------------------------------------------------------------

    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """Empty storage for a generation: dense K and V per layer, nothing if they would never be read."""
        layers = KV.zeros(spec, batch, layout.length, dtype) if self.stores(spec) else ()
        return Cache(layers, shared=())

    def before_first_step(
        self, cache: Cache, canvas: Canvas, model: Model, x: Float[Array, "b l m"]
    ) -> Cache:
        """Called once, before the first step; may run the model over the request and store what it finds.

        Args:
          cache: from `init`.
          canvas: the request, for the sequences of all streams.
          model: the model.
          x: the embedded inputs of the first step; with guidance, the second stream's prompt is masked.
        """
        return cache

    # -- one denoising step -------------------------------------------------------------------------

    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """The positions that go through the network in the coming step; called before every step."""
        return canvas.everything

    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """The positions that may be attended to in the coming step; `canvas.valid`, all but padding.

        Those that are computed attend to those that are read, by new keys and values where these are computed
        too, else by stored ones. What is not read is stored all the same, and may be read later.
        """
        return canvas.valid

    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        """Called before the layers; may add arrays of the step's width to `shared`.

        The structure of a cache is the same between steps, so `observe` must remove them again.
        """
        return cache

    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """One layer over the computed positions: new K/V overwrite stored ones, what is read is attended to.

        Args:
          layer: this layer's weights as functions, see `Layer`.
          x: the residual stream at the computed positions.
          cache: this layer's view of the storage, and `shared`.
          rows: which positions x holds.
          canvas: state before the step.

        Returns:
          x after the layer, and the changed cache.
        """
        # New K/V go into the cache first, so that computed positions attend to each other's new ones.
        q, k = layer.qk(x, rows.index)
        cache, now = cache.update(rows, KV(k, layer.value(x)))

        # Keys of all positions lie in canvas order, stored or new; the mask leaves the readable ones.
        mask = cache.attends(rows, canvas)
        o, _ = layer.attention(q, now.k, now.v, mask)
        return layer.finish(x, o), cache

    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        """Stores statistics for later steps; called after the network and before tokens are decoded.

        A policy whose layers compute more than the selection puts the number of these positions into
        `cache.extra_positions`, which statistics and trace count.

        Args:
          cache: after the last layer.
          canvas: state before the step, for the sequences of all streams.
          rows: the computed positions.
          proposal: candidate tokens and confidences of the scored positions.
        """
        return cache

    # -- what may be decoded ------------------------------------------------------------------------

    @property
    def scored(self) -> Literal["block", "response"]:
        """Masks that get a candidate token and a score if they can be predicted.

        The eligible ones of the block, or all of the response, for a policy whose `observe` ranks masks of
        later blocks too. Only eligible ones are decoded in either case; logits are computed for all scored
        ones.
        """
        return "block"

    def eligible(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """The positions that may be decoded in the coming step: a subset of `canvas.eligible`.

        Called with the same canvas as `select`, which has to cover the positions that predict them.
        """
        return canvas.eligible

    # -- speed --------------------------------------------------------------------------------------

    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """Static widths to compile a partial step for; a step takes the narrowest that holds its positions.

        What fits none of them is a full step: in place on the canvas, its rows padding where a sequence does
        not compute the position. So with the layer above widths affect speed only, whatever is returned. A
        layer that treats full steps (`Rows.full`) as ones in which every sequence computes everything has to
        return a width that holds whatever else is selected. The default is a ladder of halvings of the
        canvas, itself included.
        """
        return halvings(layout.length) if self.reuses else ()

    # -- derived ------------------------------------------------------------------------------------

    @property
    @final
    def reuses(self) -> bool:
        """Whether a step may leave positions out: whether `select` is overridden.

        False for the exact decoder, which therefore stores nothing.
        """
        return type(self).select is not Policy.select

    @final
    def stores(self, spec: ModelSpec) -> bool:
        """Whether keys and values are kept: whatever reuses them does, and all of a block-causal model."""
        return self.reuses or spec.block_size > 0

    @property
    @final
    def only_sets(self) -> bool:
        """Whether the layers are the default ones, so that two sets say it all: computed, and readable.

        Such a policy goes with whatever brings layers of its own: `EvictPrompt`, a sampler that verifies.
        """
        return type(self).layer is Policy.layer

    @final
    def readable(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"] | None:
        """`reads` without padding, as `LayerCache` has it; None where that is everything but padding."""
        read = self.reads(cache, canvas)
        return None if read is canvas.valid else read & canvas.valid


def halvings(length: int, smallest: int = 8) -> tuple[int, ...]:
    """length, length/2, length/4, ... rounded up, down to `smallest`; ascending."""
    ladder = [length]
    while ladder[-1] > smallest:
        ladder.append(-(-ladder[-1] // 2))
    return tuple(reversed(ladder))
