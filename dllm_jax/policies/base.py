"""The exact decoder, which is also the interface of all cache policies."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.nn.layer import Block
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Options
from dllm_jax.state.cache import KV, Cache, LayerView
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows


@dataclasses.dataclass(frozen=True)
class Policy(Options):
    """Exact decoding: every step recomputes every position.

    A cache policy is a frozen dataclass that overrides the methods in which it differs; its fields are the
    method's hyper-parameters, and their annotations say which values are allowed (`dllm_jax.options`). The
    methods are pure and traced once; state between steps is in the `Cache`.
    """

    foresees: ClassVar[bool] = False
    """`select` reads `canvas.planned`: needs a sampler whose order does not depend on the model."""

    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """Empty storage for a generation: dense K and V per layer, nothing if they would never be read."""
        return Cache(layers=KV.zeros(spec, batch, layout.length, dtype) if self.reuses else (), shared=())

    def survey(self, cache: Cache, canvas: Canvas, model: Model, tokens: Int[Array, "b l"]) -> Cache:
        """Called once, before the first step: may ask the model about the request.

        Args:
          cache: from `init`.
          canvas: the request, for the rows of all streams.
          model: the model.
          tokens: the inputs of the first step.
        """
        return cache

    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """The positions that go through the network in the coming step; called before every step."""
        return canvas.everything

    def prepare(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        """Called before the layers; may add arrays of the step's width to `shared`.

        The structure of a cache is the same between steps, so `observe` must remove them again.
        """
        return cache

    def layer(
        self,
        block: Block,
        x: Float[Array, "b q m"],
        kv: LayerView,
        shared: PyTree,
        rows: Rows,
        canvas: Canvas,
    ) -> tuple[Float[Array, "b q m"], LayerView, PyTree]:
        """One layer over the selected rows: fresh K/V overwrite the stored ones, then rows attend to all.

        Args:
          block: this layer's weights, see `Block`.
          x: the residual stream at the rows.
          kv: this layer's storage.
          shared: `Cache.shared`, threaded through the layers.
          rows: which positions x holds.
          canvas: state before the step.

        Returns:
          x after the layer, and the changed storage.
        """
        q, k = block.qk(x, rows)
        kv, now = kv.update(rows, KV(k, block.value(x)))
        o, _ = block.attention(q, now.k, now.v, canvas.attends(rows))
        return block.finish(x, o), kv, shared

    def judged(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Positions whose candidate and score `observe` sees if computed; the eligible ones at least.

        Only eligible positions are decoded. Logits are computed for all judged ones, so a policy that judges
        more than a block also overrides `most_judged`.
        """
        return self.eligible(canvas)

    def most_judged(self, layout: Layout) -> int:
        """How many positions of a row `judged` may return; the rightmost ones beyond it are left out."""
        return layout.block

    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        """Statistics for later steps; called after the network and before tokens are committed."""
        return cache

    def eligible(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """The positions that may be decoded in the coming step: a subset of `canvas.eligible`.

        Called with the same canvas as `select`, which has to cover the rows that predict them.
        """
        return canvas.eligible

    def most_eligible(self, layout: Layout) -> int | None:
        """How many masks of a row one step may decode, if `eligible` or `select` limits them; else None.

        A sampler that may have to decode more in a step is refused, since masks would remain.
        """
        return None

    def widened(self, cache: Cache, canvas: Canvas, computed: Bool[Array, "b l"]) -> Float[Array, "b"]:
        """Positions recomputed in addition to the selected ones, averaged over layers; only for statistics.

        Args:
          cache: after the step, for the rows of all streams.
          canvas: before the step.
          computed: the positions fed through the network.
        """
        return jnp.zeros(computed.shape[:1])

    def widths(self, layout: Layout) -> tuple[int, ...]:
        """Static widths to compile a partial step for; a step takes the narrowest that fits its rows.

        Affects only speed, provided that the widest holds every selection but the whole canvas; a step that
        fits no width computes the whole canvas. The default is a ladder of halvings of the canvas.
        """
        return halvings(layout.length) if self.reuses else ()

    @property
    def reuses(self) -> bool:
        """Whether a step may leave positions out. By default, whether `select` is overridden.

        False for the exact decoder, which therefore stores nothing.
        """
        return type(self).select is not Policy.select


def halvings(length: int, smallest: int = 8) -> tuple[int, ...]:
    """length, length/2, length/4, ... rounded up, down to `smallest`; ascending."""
    ladder = [length]
    while ladder[-1] > smallest:
        ladder.append(-(-ladder[-1] // 2))
    return tuple(reversed(ladder))
