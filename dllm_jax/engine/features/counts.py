"""Counts of a run's steps: statistics that every run has, and those of some samplers and models."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.engine.branches import further_positions
from dllm_jax.engine.generation import Feature, Generation, Recorder, StepRecord
from dllm_jax.engine.stats import Record
from dllm_jax.samplers.free_dave import Drafting
from dllm_jax.state.canvas import Canvas, answer_end
from dllm_jax.state.contexts import in_blocks
from dllm_jax.state.growing import GrowingCanvas
from dllm_jax.xla.reductions import any_marked, count_marked


class Sums(NamedTuple):
    """Running sums for the `Stats` that every run has."""

    computed_tokens: Int[Array, "b"]
    executed_tokens: Float[Array, "b"]
    widened_tokens: Float[Array, "b"]
    refreshes: Int[Array, "b"]
    finite: Bool[Array, "b"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts(Recorder):
    """Counts forward passes and tokens."""

    name: ClassVar[str] = "counts"

    def begin(self, canvas: Canvas, generation: Generation, extra: Float[Array, "b n"]) -> Sums:
        """Nothing but what layers computed before the first step."""
        zeros = jnp.zeros(canvas.tokens.shape[0], jnp.int32)
        none = zeros.astype(jnp.float32)
        return Sums(zeros, none, jnp.mean(extra, axis=1), zeros, jnp.ones(zeros.shape, bool))

    def add(self, record: Record, step: StepRecord) -> Sums:
        """Counts the positions of a step; padding is counted in those that the program runs alone."""
        sums: Sums = record[self.name]
        before = step.before
        counted = step.computed & before.valid
        everything = before.active & ~any_marked(counted != before.valid)
        share = step.executed / jnp.maximum(jnp.sum(before.active), 1)
        return Sums(
            computed_tokens=sums.computed_tokens + count_marked(counted),
            executed_tokens=sums.executed_tokens + before.active * share,
            widened_tokens=sums.widened_tokens + jnp.mean(step.extra, axis=1),
            refreshes=sums.refreshes + everything.astype(jnp.int32),
            finite=sums.finite & step.decided.finite,
        )

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """The sums, and what follows from them and the last canvas."""
        # Exact decoding would compute all valid positions in every forward.
        sums: Sums = record["counts"]
        positions = exact_positions(canvas, passes_of(record, canvas))
        recomputed = (sums.computed_tokens + sums.widened_tokens) / jnp.maximum(positions, 1)

        # The answer ends before the first end-of-text, also where positions after it are decoded.
        end = answer_end(canvas)
        decoded = canvas.decoded
        if canvas.layout.end < canvas.layout.length:
            decoded &= canvas.position < canvas.layout.end
        # What a template holds besides its masks was given.
        generated = decoded if canvas.layout.prompt else decoded & (canvas.decoded_at >= 0)
        return sums._asdict() | {
            "nfe": passes_of(record, canvas),
            "cache_ratio": jnp.where(positions > 0, 1.0 - recomputed, 0.0).astype(jnp.float32),
            "decoded_tokens": count_marked(generated),
            "answer_tokens": count_marked(decoded & (canvas.position < end[:, None])),
        }


class Counter(Recorder):
    """Counts something of each sequence's steps, in the field of `Stats` that has its name."""

    def begin(self, canvas: Canvas, generation: Generation, extra) -> Int[Array, "b"]:
        """None yet."""
        return jnp.zeros_like(canvas.step)

    def add(self, record: Record, step: StepRecord) -> Int[Array, "b"]:
        """Adds the count of a step."""
        total: Int[Array, b] = record[self.name]
        return total + self.count(step)

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """The sum."""
        return {self.name: record[self.name]}

    def count(self, step: StepRecord) -> Int[Array, "b"] | Bool[Array, "b"]:
        """The count of one step."""
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IdleSteps(Counter):
    """Counts the steps that had nothing to decode although the block had masks for them.

    Attributes:
      may_miss: Whether the policy may compute no position that predicts a mask.
    """

    may_miss: bool = dataclasses.field(metadata={"static": True})

    name: ClassVar[str] = "idle"

    def count(self, step: StepRecord) -> Bool[Array, "b"]:
        """A block with fewer masks than steps, as templates have, is idle under every schedule."""
        before = step.before
        had_masks = before.schedule_step < before.block_masks
        masks = jnp.any(before.unanswered, axis=1)
        # A causal pass stores tokens, and may predict none.
        denoises = before.active & ~before.causal[:, 0]
        idle = ~masks & had_masks
        if self.may_miss:
            idle |= masks & ~jnp.any(step.decided.proposal.score > -jnp.inf, axis=1)
        return denoises & idle


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CausalPasses(Counter):
    """Counts the causal passes of models with a causal context."""

    name: ClassVar[str] = "causal_passes"

    def count(self, step: StepRecord) -> Bool[Array, "b"]:
        """The active sequences whose step was one."""
        return step.before.active & step.before.causal[:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AcceptedTokens(Recorder):
    """Counts the tokens that verifications of drafted blocks accepted."""

    name: ClassVar[str] = "accepted_tokens"

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """The tokens after the prompt whose keys and values are final: the pass over the prompt is none."""
        return {"accepted_tokens": jnp.maximum(in_blocks(canvas).stored - canvas.layout.prompt, 0)}


class Drafted(NamedTuple):
    """Canvases computed so far, and the forward passes that verified them."""

    branches: Int[Array, "b"]
    passes: Int[Array, "b"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftedSteps(Feature):
    """Drafts steps (`engine.drafts`), and counts canvases, passes, and the steps that these verified.

    Attributes:
      drafting: How steps are drafted.
    """

    drafting: Drafting = dataclasses.field(metadata={"static": True})

    name: ClassVar[str] = "drafted"

    @property
    @override
    def scores_response(self) -> bool:
        """Whether drafts reach into further blocks."""
        return self.drafting.eager

    @override
    def select(self, canvas: Canvas, selected: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
        """The selected positions, and those of further blocks that drafts reach into."""
        return selected | further_positions(self.drafting, canvas) if self.drafting.eager else selected

    def begin(self, canvas: Canvas, generation: Generation, extra) -> Drafted:
        """None yet."""
        return Drafted(jnp.zeros_like(canvas.step), jnp.zeros_like(canvas.step))

    def add(self, record: Record, step: StepRecord) -> Drafted:
        """Adds the branches of a step."""
        totals: Drafted = record[self.name]
        return Drafted(totals.branches + step.branches, totals.passes + step.before.active)

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """`Stats.branches` and `Stats.sampler_steps`."""
        return {"branches": record["drafted"].branches, "sampler_steps": canvas.step}


def passes_of(record: Record, canvas: Canvas) -> Int[Array, "b"]:
    """Forward passes that each sequence has taken part in: its steps, unless one verifies several."""
    return record["drafted"].passes if "drafted" in record else canvas.step


def exact_positions(canvas: Canvas, passes: Int[Array, "b"]) -> Int[Array, "b"]:
    """Positions that exact decoding would have computed in the sequence's passes so far."""
    growing = isinstance(canvas, GrowingCanvas)
    return canvas.growth.positions if growing else count_marked(canvas.valid) * passes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedTokens(Recorder):
    """Counts the masks that are left although nothing explains them.

    Attributes:
      leaves_ends: Whether the policy has eligible positions of its own, and may leave what follows an end.
    """

    leaves_ends: bool = dataclasses.field(metadata={"static": True})

    name: ClassVar[str] = "masked_tokens"

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """Those of the answer."""
        left = masks_left(record, canvas, tokens)
        if canvas.layout.prompt and self.leaves_ends:
            left &= canvas.position < answer_end(canvas)[:, None]
        return {"masked_tokens": jnp.sum(left, axis=1, dtype=jnp.int32)}


def masks_left(record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> Bool[Array, "b l"]:
    """Masks of the response that are left although the logits were finite."""
    left = canvas.spec.undecided(tokens) & canvas.valid & canvas.response
    return left & (canvas.position < canvas.layout.end) & record["counts"].finite[:, None]
