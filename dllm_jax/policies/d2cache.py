"""d2Cache: dual adaptive caching (arXiv:2509.23094)."""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NoneMeans, PositiveInt, TracedPositiveInt, TracedWidth
from dllm_jax.policies.base import Policy
from dllm_jax.policies.parts import d2cache_rollout
from dllm_jax.policies.parts.d2cache_sets import Salience, expected_masks, inflated, prior
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows
from dllm_jax.traced import Count, Number, Traced
from dllm_jax.xla.dependencies import after_on_tpu

MASKS = 32  # k by default


@dataclasses.dataclass(frozen=True)
class D2Cache(Policy):
    """Recomputes the masks most likely to be unmasked next and tokens of high attention rollout (d2Cache).

    Use it to compute the fewest tokens at any block length, with short to medium prompts.

    The first step is the only full step. A later step computes M* | X | U. M* are the k masks with the
    highest confidence times certainty density, those of the current block first (section 4.1). X are the
    tokens that the last step unmasked. U is the nucleus of the other positions by attention rollout (section
    4.2). Only computed tokens can be unmasked.

    Memory: Dense keys and values, and two numbers per position.

    Limits: Attention rollout grows with the square of the prompt and dominates above some thousand tokens.

    Attributes:
      k: Number of masks in M*. More are computed if the sampler's schedule needs them.
      sigma: Width of the certainty density, in positions. The sampler's own is independent of it.
      p: Fraction of the total influence that the nucleus U holds, in [0, 1].
      inflate: Maximum gap between two computed positions that is filled, in positions. The reference advises
        4 for parallel decoding in blocks.
      rollout_layers: Number of first layers in the rollout ("Rollout-5" of table 4); None uses all layers.

    Equals exact decoding when: p=1.
    Differences: Four slips of the reference are repaired as its comments intend. From its code, unlike the
      paper: the density is normalised, the nucleus stays within p, and M* ends with the block that holds the
      k-th mask. Beyond both: padding is never computed or counted, and negative scores ("entropy") are
      divided by the density.
    """

    k: TracedPositiveInt = MASKS
    sigma: TracedWidth = 10.0
    p: Annotated[Number, Interval(ge=0, le=1), Traced(unless=1)] = 0.1
    inflate: Annotated[Count, Ge(0), Traced(unless=0)] = 0
    rollout_layers: Annotated[PositiveInt | None, NoneMeans("all")] = None

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """Dense K and V, and the salience of every position."""
        if self.rollout_layers is not None and self.rollout_layers > spec.layers:
            raise ValueError(f"rollout_layers={self.rollout_layers}, but the model has {spec.layers} layers")
        zeros = jnp.zeros((batch, layout.length), jnp.float32)
        return Cache(super().init(spec, layout, batch, dtype).layers, Salience(zeros - jnp.inf, zeros, ()))

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in the first step, then M* | X | U."""
        # Section 4.1: M* by certainty prior, the confidence times the density of known tokens; and X.
        known: Salience = cache.shared
        score = prior(known.confidence, canvas, self.sigma)
        upcoming = canvas.predicting_positions(expected_masks(score, canvas, self.k)) | canvas.just_decoded

        # Section 4.2: U is the nucleus of everything else by influence. With a shifted head, the last prompt
        # position is a candidate for it even where it predicts a position of M*.
        others = canvas.valid & ~(upcoming & canvas.response)
        chosen = inflated(upcoming | d2cache_rollout.nucleus(known.influence, others, self.p), self.inflate)
        return chosen | canvas.first_step

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        """The rollout matrix C starts as the identity."""
        return cache._replace(shared=cache.shared._replace(rolled=d2cache_rollout.identity_rows(rows)))

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """The exact layer, whose head-averaged attention then multiplies the rollout matrix."""
        # As in `Policy.layer`, but the log-sum-exp is needed for the attention weights.
        q, k = layer.qk(x, rows.positions)
        cache, now = cache.update(rows, KV(k, layer.value(x)))
        mask = cache.attends(rows, canvas)
        o, lse = layer.attention(q, now.k, now.v, mask)

        # All layers roll out, or only the first ones ("Rollout-5" of table 4).
        roll = lambda c: d2cache_rollout.roll(c, layer.head_mean(q, now.k, lse, mask), rows, canvas.valid)
        known = cache.shared
        rolls = True if self.rollout_layers is None else layer.index < self.rollout_layers
        rolled = roll(known.rolled) if rolls is True else jax.lax.cond(rolls, roll, lambda c: c, known.rolled)
        return layer.finish(x, after_on_tpu(rolled, o)), cache._replace(shared=known._replace(rolled=rolled))

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """An eighth of the canvas; and a quarter besides the default masks of M*, at most a half.

        Narrower steps of a large model wait for the weights anyhow.
        """
        eighth, quarter, half = (-(-layout.length // part) for part in (8, 4, 2))
        return (eighth, min(quarter + MASKS, half))

    @property
    @override
    def scored(self) -> Literal["block", "response"]:
        """All of the response: confidence decides when a mask enters M*."""
        return "response"

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        """Updates the confidence where the step scored a position, and the influence in active sequences."""
        known: Salience = cache.shared
        predicted = rows.mask()
        if canvas.spec.shifted or canvas.spec.context.has_causal_passes:
            predicted = jnp.take_along_axis(predicted, canvas.predictor, axis=1)
        confidence = jnp.where(predicted & canvas.masked, proposal.score, known.confidence)
        influence = d2cache_rollout.column_sums(known.rolled, rows, canvas.valid)
        influence = jnp.where(canvas.active[:, None], influence, known.influence)
        return cache._replace(shared=Salience(confidence, influence, rolled=()))
