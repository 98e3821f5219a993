"""The trace of a run: every denoising step of every sequence.

While a run goes on it is one array of integers, in which a step of a sequence is one row: XLA writes each
array at scattered places by a kernel of its own, and on CPUs by a loop.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.features.counts import passes_of
from dllm_jax.engine.features.growth import answer_length
from dllm_jax.engine.generation import Generation, Recorder, StepRecord
from dllm_jax.engine.stats import Record
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.growing import GrowingCanvas


class Trace(NamedTuple):
    """History of every step, by each sequence's own count of steps.

    From `generate` outside jit, t is the largest number of steps of a sequence; inside jit, an upper bound.
    After a sequence's last step its tokens stay, and nothing is computed.

    Attributes:
      tokens: Token ids before step 0 and after every step.
      computed: Computed positions.
      read: Positions that some of them attended to, in some layer and head; never padding.
      proposed: Candidate token of each scored position (`Policy.scored`); mask_id elsewhere.
      score: Confidence of each candidate; -inf elsewhere.
      active: Steps in which the sequence took part.
      widened: Layers that computed every position (`Cache.extra_positions`).
      steps: Largest number of steps of a sequence.
      causal: Steps that were causal passes of a model with a causal context. All False of other models, where
        the sampler reads or verifies tokens causally (`Autoregressive`, `S2D2`); None where it does not.
      length: Tokens of the answer before step 0 and after every step; of `infill`, of the template. None
        unless answers grow (`max_length`), as are the following.
      end: Position after the answer, before step 0 and after every step; from there on `tokens` are masked.
      inserted: Mask that became several, by its place in the answer before the step; -1 where none did.
      moved: Number of positions by which what follows it moved to the right.
      removed: Positions that the step removed, where they were before it; what follows moved to the left.
      start: First position of each sequence that is no padding; None where a trace does not say it.
      sampler_steps: Denoising steps of the sampler, of which a step of the trace may verify several; None
        unless the sampler drafts (`FreeDave`).
    """

    tokens: Int[Array, "t_plus_1 b l"]
    computed: Bool[Array, "t b l"]
    read: Bool[Array, "t b l"]
    proposed: Int[Array, "t b l"]
    score: Float[Array, "t b l"]
    active: Bool[Array, "t b"]
    widened: Bool[Array, "t b n"]
    steps: Int[Array, ""]
    causal: Bool[Array, "t b"] | None = None
    length: Int[Array, "t_plus_1 b"] | None = None
    inserted: Int[Array, "t b"] | None = None
    moved: Int[Array, "t b"] | None = None
    end: Int[Array, "t_plus_1 b"] | None = None
    removed: Bool[Array, "t b l"] | None = None
    start: Int[Array, "b"] | None = None
    sampler_steps: Int[Array, "b"] | None = None


# A row holds, one after the other: tokens [l], proposed tokens with three flags in their lowest bits [l], the
# bits of the scores [l], and of each layer whether it was widened, with two flags in its lowest bits: that
# the step was taken, and that it was a causal pass [n]. Of answers that grow their end, the mask that became
# several, and by how much others moved [3]. The sequences are those of the whole batch, of which a step may
# take a group.
Steps = Int[Array, "t_plus_1 everyone _"]
OF_GROWTH = "length", "inserted", "moved", "end", "removed"  # fields that only answers that grow have


def no_steps(canvas: Canvas, limit: int) -> Steps:
    """Room for `limit` steps after the canvas before the first one."""
    b, length = canvas.tokens.shape
    rest = jnp.zeros((b, 2 * length + canvas.spec.layers), jnp.int32)
    first = jnp.concatenate([canvas.tokens, rest, *_lengths(canvas)], axis=1)[None]
    return jnp.concatenate([first, jnp.zeros((limit, *first.shape[1:]), jnp.int32)])


def add(steps: Steps, number: Int[Array, "b"], step: StepRecord) -> Steps:
    """The steps and one more of each active sequence, written in place since the loop carries them.

    Args:
      steps: Steps recorded so far.
      number: Number of forward passes that each sequence had taken part in before.
      step: The step.
    """
    before, after, proposal = step.before, step.left, step.decided.proposal
    widened = step.extra >= jnp.sum(before.valid & ~step.computed, axis=1, keepdims=True)
    removed = after.growth.removed if isinstance(after, GrowingCanvas) else jnp.zeros_like(step.computed)
    flagged = proposal.token << 3 | removed << 2 | step.attended() << 1 | step.computed
    score = jax.lax.bitcast_convert_type(proposal.score, jnp.int32)
    layers = widened << 2 | before.causal << 1 | 1
    row = jnp.concatenate([after.tokens, flagged, score, layers, *_lengths(after)], axis=1)
    # Of a sequence that takes no part the step is beyond the trace, and nothing is written.
    row_of_each = jnp.where(before.active, number + 1, len(steps))
    return steps.at[row_of_each, step.sequences].set(row, mode="drop")


def completed(steps: Steps, canvas: Canvas, passes: Int[Array, "b"], causal: bool) -> Trace:
    """The trace, in which the last tokens of a sequence stay after its last step.

    Args:
      steps: Recorded steps.
      canvas: Canvas after them.
      passes: Number of forward passes of each sequence.
      causal: Whether tokens are read causally.
    """
    length, mask_id = canvas.layout.length, canvas.spec.mask_id
    parts = length, 2 * length, 3 * length, 3 * length + canvas.spec.layers
    tokens, flagged, bits, layers, lengths = jnp.split(steps, parts, axis=2)
    ran = jnp.arange(len(steps))[:, None] <= passes
    flagged, bits, layers = flagged[1:], bits[1:], layers[1:]
    active = (layers[..., 0] & 1) == 1
    score = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return Trace(
        tokens=jnp.where(ran[..., None], tokens, canvas.tokens),
        computed=(flagged & 1) == 1,
        read=(flagged & 2) == 2,
        proposed=jnp.where(active[..., None], flagged >> 3, mask_id),
        score=jnp.where(active[..., None], score, -jnp.inf),
        active=active,
        widened=layers > 3,
        steps=jnp.max(passes),
        causal=(layers[..., 0] & 2) == 2 if causal else None,
        start=canvas.first_position,
        **_completed_lengths(lengths, (flagged & 4) == 4, ran, active, canvas),
    )


def _lengths(canvas: Canvas) -> list[Int[Array, "b 3"]]:
    """End of the answer, the mask that became several in the last step, and by how much others moved."""
    if not isinstance(canvas, GrowingCanvas):
        return []
    growth, last = canvas.growth, canvas.layout.length - 1
    return [jnp.stack([growth.end, growth.inserted, last - growth.source[:, -1]], axis=1)]


def _completed_lengths(
    lengths: Int[Array, "t_plus_1 b _"],
    removed: Bool[Array, "t b l"],
    ran: Bool[Array, "t_plus_1 b"],
    active: Bool[Array, "t b"],
    canvas: Canvas,
) -> dict[str, Array]:
    """Fields of the trace of answers that grow; none of others."""
    if not isinstance(canvas, GrowingCanvas):
        return {}
    growth = canvas.growth
    end, inserted, moved = (lengths[..., i] for i in range(3))
    start = growth.end - answer_length(canvas)  # of the response, or of a template after its padding
    end = jnp.where(ran, end, growth.end)
    return {
        "length": end - start,
        "inserted": jnp.where(active & (inserted[1:] >= 0), inserted[1:] - start, -1),
        "moved": jnp.where(active, moved[1:], 0),
        "end": end,
        "removed": removed & active[..., None],
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordedSteps(Recorder):
    """Keeps the trace: every step of every sequence (`engine.features.trace`).

    Attributes:
      limit: Number of steps that there is room for.
      causal: Whether tokens are read causally, by the model or the sampler.
    """

    limit: int = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(default=False, metadata={"static": True})

    name: ClassVar[str] = "trace"
    axis: ClassVar[int] = 1
    of_group: ClassVar[bool] = False

    def begin(self, canvas: Canvas, generation: Generation, extra) -> Steps:
        """Room for all steps."""
        return no_steps(canvas, self.limit)

    def add(self, record: Record, step: StepRecord) -> Steps:
        """Writes the step in place, since the loop carries the trace."""
        return add(record[self.name], passes_of(record, step.before), step)

    def output(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> Trace:
        """The trace of the steps so far."""
        trace = completed(record[self.name], canvas, passes_of(record, canvas), self.causal)
        return trace._replace(sampler_steps=canvas.step) if "drafted" in record else trace
