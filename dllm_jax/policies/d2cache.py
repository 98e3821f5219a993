"""d2Cache: dual adaptive caching (arXiv:2509.23094)."""

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval
from jaxtyping import Array, Bool, Float, Int, PyTree
from typing_extensions import override

from dllm_jax.nn.arithmetic import einsum
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.shift import predicts_itself
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import LARGEST, NoneMeans, PositiveInt, TracedPositiveInt, TracedWidth
from dllm_jax.policies.base import Policy, as_kind
from dllm_jax.state.cache import KV, Cache, LayerCache, Proposal
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows
from dllm_jax.state.selection import best, certainty_density
from dllm_jax.traced import Count, Number, Traced, fixed_at
from dllm_jax.xla.dependencies import after_on_tpu
from dllm_jax.xla.products import few_rows_at_once_on_tpu
from dllm_jax.xla.reductions import count_marked

MASKS = 32  # k by default


@dataclasses.dataclass(frozen=True)
class D2Cache(Policy):
    """Recomputes the masks most likely to be unmasked next and tokens of highest attention rollout (d2Cache).

    Use it with short to medium prompts where computed tokens limit a step. On the GPU that was measured
    (random weights, blocks of 32), `DualCache` was faster and computed fewer tokens.

    The first step is a full step. A later step computes M* | X | U. M* are the k masks with the
    highest confidence times certainty density (section 4.1), those of the current block first. X are the
    tokens that the last step unmasked. U is the nucleus of the other positions by attention rollout (section
    4.2). Only masks that these positions predict can be unmasked.

    Memory: Dense keys and values, and two numbers per position.

    Limits: The attention rollout of the first step grows with the cube of the canvas.

    Attributes:
      k: Number of masks in M*. More are computed if the sampler's schedule needs them.
      sigma: Width of the certainty density, in positions. The sampler's own is independent of it.
      p: Fraction of the total influence that the nucleus U holds, in [0, 1].
      inflate: Maximum distance of two computed positions between which all others are computed too. The
        reference advises 4 for parallel decoding in blocks.
      rollout_layers: Number of first layers in the rollout ("Rollout-5" of table 4); None uses all layers.

    Equals exact decoding when: p=1.
    Differences: Four slips of the reference are repaired as its comments intend. From its code, unlike the
      paper: the density is normalized, the nucleus stays within p, and M* begins with the current block and
      ends with the block that holds the k-th mask. Beyond both: padding is in none of the sets and never
      counted, and negative scores ("entropy") are divided by the density. Without a mask token
      (DiffusionGemma) M* are the positions of the canvas that read another token than they predict, filled up
      to k by the largest entropy; `sigma` has no effect.
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
        chosen = inflated(upcoming | nucleus(known.influence, others, self.p), self.inflate)
        return chosen | canvas.first_step

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        """The rollout matrix C starts as the identity."""
        return cache._replace(shared=cache.shared._replace(rolled=identity_rows(rows)))

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
        rolled_by = lambda c: roll(c, layer.head_mean(q, now.k, lse, mask), rows, canvas.valid)
        known = cache.shared
        rolls = self._rolls(layer, rows, canvas)
        rolled = known.rolled
        rolled = rolled_by(rolled) if rolls is True else jax.lax.cond(rolls, rolled_by, lambda c: c, rolled)
        return layer.finish(x, after_on_tpu(rolled, o)), cache._replace(shared=known._replace(rolled=rolled))

    def _rolls(self, layer: Layer, rows: Rows, canvas: Canvas) -> Bool[Array, ""] | bool:
        """Whether a layer takes part in the rollout."""
        return True if self.rollout_layers is None else layer.index < self.rollout_layers

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
        if not predicts_itself(canvas.spec):
            predicted = jnp.take_along_axis(predicted, canvas.predictor, axis=1)
        confidence = jnp.where(predicted & canvas.masked, proposal.score, known.confidence)
        influence = column_sums(known.rolled, rows, canvas.valid)
        influence = jnp.where(canvas.active[:, None], influence, known.influence)
        return cache._replace(shared=Salience(confidence, influence, rolled=()))

    # -- the sets of the selection ---------------------------------------------------------------------

    @override
    def _in_blocks(self, spec: ModelSpec) -> Policy:
        return self if spec.has_mask_token else as_kind(self, InCanvas)


@dataclasses.dataclass(frozen=True)
class InCanvas(D2Cache):
    """d2Cache in the canvas of a model without a mask token: M* are the k positions of largest entropy.

    Positions that are certain hardly change from one step to the next, and take part by their influence.
    Those that read another token than they predict, noise for most, are computed until they read it.
    """

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        known: Salience = cache.shared
        uncertain = best(jnp.where(canvas.block, -known.confidence, -jnp.inf), self.k)
        uncertain |= canvas.block & (known.confidence == -jnp.inf)
        others = canvas.block & ~uncertain
        return inflated(uncertain | nucleus(known.influence, others, self.p), self.inflate)

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        """As in masks; a position that read another token than it predicts has no confidence."""
        after, computed = super().observe(cache, canvas, rows, proposal), rows.mask() & canvas.block
        score = jnp.where(canvas.tokens == proposal.token, proposal.score, -jnp.inf)
        confidence = jnp.where(computed, score, cache.shared.confidence)
        return after._replace(shared=after.shared._replace(confidence=confidence))

    @override
    def _rolls(self, layer: Layer, rows: Rows, canvas: Canvas) -> Bool[Array, ""] | bool:
        """Not where all sequences store their contexts: the next step computes all of the canvas."""
        rolls = super()._rolls(layer, rows, canvas)
        return rolls & jnp.any(canvas.active & ~canvas.causal[:, 0]) if rows.full else rolls

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """A quarter and half of a canvas, which the engine adds."""
        return tuple(-(-layout.block // part) for part in (4, 2))

    @property
    @override
    def scored(self) -> Literal["block", "response"]:
        return "block"


class Salience(NamedTuple):
    """Statistics that decide which positions the next step computes.

    Attributes:
      confidence: the sampler's, from the last step that computed the position while masked; -inf if none did,
        or no token was allowed there.
      influence: column sums of the last step's attention rollout.
      rolled: computed rows of the rollout matrix, [b q l] during a step and () between steps.
    """

    confidence: Float[Array, "b l"]
    influence: Float[Array, "b l"]
    rolled: PyTree


def prior(confidence: Float[Array, "b l"], canvas: Canvas, sigma: Number) -> Float[Array, "b l"]:
    """Confidence times the density of known tokens around each response position (section 4.1).

    Elsewhere it is -inf. A negative confidence is divided by the density, so that isolated positions rank
    lower here too.

    Args:
      confidence: the sampler's, -inf where no step computed the position while it was masked.
      canvas: state before the step.
      sigma: width of the density's Gaussian, in positions.
    """
    # The density is of the response alone: the prompt counts as known tokens, however long it is.
    prompt = canvas.layout.prompt
    batch = confidence.shape[0]
    index = jnp.broadcast_to(canvas.position[prompt:], (batch, canvas.layout.response))
    density = certainty_density(canvas, index, sigma)

    # Scores of "entropy" are negative. Far from known tokens the density underflows to 0.
    confidence = confidence[:, prompt:]
    weighed = jnp.where(confidence < 0, confidence / jnp.maximum(density, 1e-30), confidence * density)

    # Positions without a confidence stay without, also where the density is 0 and the product NaN.
    weighed = jnp.where(jnp.isfinite(confidence), weighed, -jnp.inf)
    return jnp.pad(weighed, ((0, 0), (prompt, 0)), constant_values=-jnp.inf)


def search_range(canvas: Canvas, count: Int[Array, "b"]) -> Bool[Array, "b l"]:
    """Everything up to the end of the block that holds the count-th mask from the left.

    Of a sequence with fewer masks it is the block of the last one.
    """
    # The rightmost of the first `count` masks decides; without any, the current block.
    masked = canvas.masked & canvas.response
    first, block = canvas.block_start, canvas.layout.block
    among_first = masked & (jnp.cumsum(masked, axis=1) <= count[:, None])
    last = jnp.max(jnp.where(among_first, canvas.position, first[:, None]), axis=1)
    return canvas.position < (first + ((last - first) // block + 1) * block)[:, None]


def expected_masks(score: Float[Array, "b l"], canvas: Canvas, k: Count) -> Bool[Array, "b l"]:
    """M*: the k masks of largest score within the search range, those of the current block first.

    There are more than k where the schedule has to decode more per step to finish the block in time.

    Args:
      score: certainty prior of each position, -inf where there is none.
      canvas: state before the step.
      k: masks per step.
    """
    # What is left of the block, spread over its remaining steps and rounded up.
    steps_left = jnp.maximum(canvas.steps_per_block - canvas.block_step, 1)
    per_step = -(-count_marked(canvas.eligible) // steps_left)
    count = jnp.maximum(k, per_step)

    # Eligible masks go first, at any score of the others (the released code adds the largest score to
    # them).
    # Masks without a confidence come last: they waited for others to be allowed a token.
    now = best(jnp.where(canvas.eligible, jnp.maximum(score, -LARGEST), -jnp.inf), count)
    later = canvas.masked & search_range(canvas, count) & ~canvas.eligible
    return now | best(jnp.where(later, score, -jnp.inf), count - count_marked(now))


def inflated(chosen: Bool[Array, "b l"], distance: Count) -> Bool[Array, "b l"]:
    """The set, and the positions between two neighbors of it that are at most `distance` apart."""
    if fixed_at(distance, 0):
        return chosen

    # Nearest members on either side, the position itself counting as both. Sentinels outside of the canvas
    # make every gap to a missing neighbor longer than the canvas.
    length = chosen.shape[1]
    position, distance = jnp.arange(length), jnp.minimum(distance, length)
    previous = jax.lax.cummax(jnp.where(chosen, position, -distance - 1), axis=1)
    following = jax.lax.cummin(jnp.where(chosen, position, length + distance), axis=1, reverse=True)
    return following - previous <= distance


# -- attention rollout over one step's computed positions ------------------------------------------
# Rollout (Abnar & Zuidema 2020; arXiv:2509.23094, section 4.2) multiplies the layers' averaged attention:
# C = W_n ... W_1, W = (E + I) / row sums, E being the identity with the computed rows replaced by their
# attention. A row that was not computed is an identity row in every W and so in C: only the q computed rows
# of C are kept, [b q l] for the duration of a step, and a layer costs q^2 l multiplications.
#
# The column sums alone could be had from the last layer down, one vector-matrix product per layer, but
# only after all n maps [b n q l] have been stored: a factor n in memory (2 GiB in the first step of a
# 32-layer model at 4096 positions, as much as its K/V cache, against 64 MiB here) to save 6 % of the
# arithmetic of that one step and 0.1 % of any other.


def identity_rows(rows: Rows) -> Float[Array, "b q l"]:
    """C before the first layer: the identity's rows at the computed positions, zero at padding."""
    return (rows.index[..., None] == jnp.arange(rows.length)).astype(jnp.float32)


def roll(
    c: Float[Array, "b q l"], attention: Float[Array, "b q l"], rows: Rows, valid: Bool[Array, "b l"]
) -> Float[Array, "b q l"]:
    """The computed rows of W C, for one layer's head-averaged attention.

    A row that attends to nothing stays unchanged; so does any row at padding.

    Args:
      c: computed rows of C, before this layer.
      attention: attention weights of the computed positions, averaged over query heads.
      rows: the computed positions.
      valid: positions that are not padding.
    """
    # Rows of E that were computed are attention, all others identity: E C = attention (C with the rows of
    # positions that were not computed replaced by the identity's).
    attention = jnp.where((rows.real & rows.take(valid))[..., None], attention, 0.0)

    # Rows of C that were not computed are the identity's: there the product is the attention itself. Only the
    # q computed columns need a multiplication.
    to_identity = jnp.where(rows.mask()[:, None], 0.0, attention)
    # Rows of padding read the attention of some position, but their C is zero.
    to_computed = jnp.swapaxes(rows.take(jnp.swapaxes(attention, 1, 2)), 1, 2)
    times = lambda attention, c: einsum("bqr,brl->bql", attention, c)
    product = to_identity + few_rows_at_once_on_tpu(times, to_computed, c)

    # W = (E + I) / row sums: the residual connection passes C on unchanged.
    return (product + c) / (jnp.sum(attention, axis=2, keepdims=True) + 1.0)


def column_sums(c: Float[Array, "b q l"], rows: Rows, valid: Bool[Array, "b l"]) -> Float[Array, "b l"]:
    """How much every position influences all of them: the column sums of C, padding left out.

    The sums of a row add up to the number of valid positions. A position that was not computed adds 1 to its
    own sum, so the recomputed set rotates.
    """
    # The identity rows of positions that were not computed are never stored: they add 1 on the diagonal.
    from_rows = jnp.sum(jnp.where(rows.take(valid)[..., None], c, 0.0), axis=1)
    return jnp.where(valid, from_rows + ~rows.mask(), 0.0)


def nucleus(weight: Float[Array, "b l"], among: Bool[Array, "b l"], p: Number) -> Bool[Array, "b l"]:
    """The heaviest positions whose summed weight stays within p of the total, and always the heaviest one.

    The paper takes the smallest set whose mass exceeds p, one position more. Ties go to the lower index; p =
    1 is all of them.

    Args:
      weight: influence of each position, not negative.
      among: positions to choose from.
      p: fraction of their total weight.
    """
    # Sums of fractions may end below 1: the exact limit must not depend on rounding.
    if fixed_at(p, 1):
        return among

    # Descending, those outside of `among` last.
    weight = jnp.where(among, weight, 0.0)
    order = jnp.argsort(-jnp.where(among, weight, -1.0), axis=1, stable=True)
    probability = jnp.take_along_axis(weight, order, axis=1) / (jnp.sum(weight, axis=1, keepdims=True) + 1e-9)

    # Inclusive: a position belongs to the nucleus if its own mass still fits.
    in_nucleus = (jnp.cumsum(probability, axis=1) <= p) | (jnp.arange(weight.shape[1]) == 0)
    sequence = jnp.arange(weight.shape[0])[:, None]
    return jnp.zeros_like(among).at[sequence, order].set(in_nucleus) & among
