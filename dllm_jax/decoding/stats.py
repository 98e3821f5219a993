"""Statistics of a run per sequence, and its optional trace."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.state.canvas import Canvas, first_eos
from dllm_jax.state.proposal import Proposal


class Stats(NamedTuple):
    """Cost of a run, per sequence; padding is not counted.

    Attributes:
      nfe: network forwards the sequence took part in.
      computed: positions fed through the network, summed over forwards.
      executed: positions that the device ran for it, selected ones and those that a program of static shape
        runs along: the rows of each forward, shared among the sequences that took part. It depends on the
        batch, as nothing else here does.
      widened: positions recomputed beyond those selected (`Cache.extra_positions`), averaged over layers,
        summed over forwards.
      cache_ratio: fraction of positions that were *not* recomputed, mean over forwards (0 = exact decoding).
      refreshes: forwards that recomputed every position.
      decoded: response positions that are not masked at the end, without a suffix.
      answer: decoded tokens before the first end-of-text, and before a stop.
      finite: False if the sequence ended early because a step's logits held NaN or infinity; what was not
        decoded by then is still masked. Its batch mates are as they would be without it.
    """

    nfe: Int[Array, "b"]
    computed: Int[Array, "b"]
    executed: Float[Array, "b"]
    widened: Float[Array, "b"]
    cache_ratio: Float[Array, "b"]
    refreshes: Int[Array, "b"]
    decoded: Int[Array, "b"]
    answer: Int[Array, "b"]
    finite: Bool[Array, "b"]


class Trace(NamedTuple):
    """Every step, of each sequence by its own count, whatever step its batch mates are at.

    From `generate` outside jit, t is the largest number of steps of a sequence; inside jit, an upper bound.
    Where a sequence takes no more steps, its tokens stay, and nothing is computed.

    Attributes:
      tokens: the sequence before step 0 and after every step.
      computed: positions fed through the network.
      read: positions that those attended to (`Policy.reads`); never padding.
      proposed: candidate token of each scored position (see `Policy.scored`), mask_id elsewhere.
      score: its confidence, -inf elsewhere.
      active: steps that the sequence took.
      widened: layers that computed every position, be it in `computed` or not (`Cache.extra_positions`).
      steps: largest number of steps of a sequence.
    """

    tokens: Int[Array, "t_plus_1 b l"]
    computed: Bool[Array, "t b l"]
    read: Bool[Array, "t b l"]
    proposed: Int[Array, "t b l"]
    score: Float[Array, "t b l"]
    active: Bool[Array, "t b"]
    widened: Bool[Array, "t b n"]
    steps: Int[Array, ""]


class Record(NamedTuple):
    """Running sums for `Stats`, and the trace.

    Attributes:
      computed: see `Stats`.
      executed: see `Stats`.
      widened: see `Stats`.
      refreshes: see `Stats`.
      finite: see `Stats`.
      trace: None if no trace is recorded.
      confidence: with which each position was decoded, NaN where no step did; None if it is not recorded.
    """

    computed: Int[Array, "b"]
    executed: Float[Array, "b"]
    widened: Float[Array, "b"]
    refreshes: Int[Array, "b"]
    finite: Bool[Array, "b"]
    trace: Trace | None
    confidence: Float[Array, "b l"] | None

    @staticmethod
    def begin(
        canvas: Canvas, limit: int | None, confidence: bool, extra: Float[Array, "b n"] | None
    ) -> "Record":
        """An empty record.

        Args:
          canvas: before the first step.
          limit: steps of trace that are allocated; None records no trace.
          confidence: whether the confidences of decoded positions are recorded.
          extra: positions that layers computed before the first step (`Cache.extra_positions`).
        """
        zeros = jnp.zeros(canvas.tokens.shape[0], jnp.int32)
        trace = None if limit is None else _empty_trace(canvas, limit)
        finite = jnp.ones(zeros.shape, bool)
        unknown = jnp.full(canvas.tokens.shape, jnp.nan, jnp.float32) if confidence else None
        widened = zeros.astype(jnp.float32) if extra is None else jnp.mean(extra, axis=1)
        return Record(zeros, zeros.astype(jnp.float32), widened, zeros, finite, trace, unknown)

    def add(
        self,
        before: Canvas,
        after: Canvas,
        computed: Bool[Array, "b l"],
        rows: Int[Array, ""] | int,
        read: Bool[Array, "b l"],
        extra: Float[Array, "b n"] | None,
        finite: Bool[Array, "b"],
        proposal: Proposal,
        who: Int[Array, "b"] | None = None,
    ) -> "Record":
        """Counts one step of the sequences that were active.

        Args:
          before: the canvas before the step.
          after: the canvas after it.
          computed: positions fed through the network.
          rows: that the program ran, of all sequences.
          read: positions that those attended to.
          extra: positions that layers computed beyond the selection (`Cache.extra_positions`).
          finite: sequences whose logits were finite in this step.
          proposal: what the sampler was offered.
          who: their places in the trace, which is that of the whole batch; None where these are all.
        """
        # Padding is never counted, though a full step computes it along.
        counted = computed & before.valid
        everything = before.active & jnp.all(counted == before.valid, axis=1)
        if extra is None:
            extra = jnp.zeros((len(counted), before.spec.layers))
        return Record(
            computed=self.computed + jnp.sum(counted, axis=1, dtype=jnp.int32),
            executed=self.executed + before.active * (rows / jnp.maximum(jnp.sum(before.active), 1)),
            widened=self.widened + jnp.mean(extra, axis=1),
            refreshes=self.refreshes + everything.astype(jnp.int32),
            finite=self.finite & finite,
            trace=None
            if self.trace is None
            else _add(self.trace, who, before, after, computed, read, extra, proposal),
            confidence=None
            if self.confidence is None
            else _decoded_with(self.confidence, before, after, proposal),
        )

    def completed(self, canvas: Canvas) -> Trace | None:
        """The trace, in which the last tokens of a sequence stay behind its last step."""
        if (trace := self.trace) is None:
            return None
        ran = jnp.arange(len(trace.tokens))[:, None] <= canvas.step
        tokens = jnp.where(ran[..., None], trace.tokens, canvas.tokens)
        return trace._replace(tokens=tokens, steps=jnp.max(canvas.step))

    def stats(self, canvas: Canvas) -> Stats:
        """The statistics of a finished generation, given its last canvas."""
        # Exact decoding would compute all valid positions in every forward.
        positions = jnp.sum(canvas.valid, axis=1) * canvas.step
        recomputed = (self.computed + self.widened) / jnp.maximum(positions, 1)

        # The answer ends before the first end-of-text, also where positions behind it are decoded.
        end = first_eos(canvas) if canvas.stop is None else jnp.minimum(first_eos(canvas), canvas.stop)
        decoded = canvas.decoded
        if canvas.layout.end < canvas.layout.length:
            decoded &= canvas.position < canvas.layout.end
        before_eos = decoded & (canvas.position < end[:, None])
        return Stats(
            nfe=canvas.step,
            computed=self.computed,
            executed=self.executed,
            widened=self.widened,
            cache_ratio=jnp.where(positions > 0, 1.0 - recomputed, 0.0).astype(jnp.float32),
            refreshes=self.refreshes,
            decoded=jnp.sum(decoded, axis=1, dtype=jnp.int32),
            answer=jnp.sum(before_eos, axis=1, dtype=jnp.int32),
            finite=self.finite,
        )


def _empty_trace(canvas: Canvas, limit: int) -> Trace:
    """Room for `limit` steps; tokens have one entry more, the canvas before the first step."""
    shape = (limit, *canvas.tokens.shape)
    return Trace(
        tokens=jnp.broadcast_to(canvas.tokens, (limit + 1, *canvas.tokens.shape)),
        computed=jnp.zeros(shape, bool),
        read=jnp.zeros(shape, bool),
        proposed=jnp.full(shape, canvas.spec.mask_id, jnp.int32),
        score=jnp.full(shape, -jnp.inf, jnp.float32),
        active=jnp.zeros(shape[:2], bool),
        widened=jnp.zeros((*shape[:2], canvas.spec.layers), bool),
        steps=jnp.int32(0),
    )


def _decoded_with(
    confidence: Float[Array, "b l"], before: Canvas, after: Canvas, proposal: Proposal
) -> Float[Array, "b l"]:
    """The confidences with those of what this step decoded; NaN where it made a mask again."""
    new = jnp.where(after.masked, jnp.nan, proposal.score)
    return jnp.where(before.tokens != after.tokens, new, confidence)


def _add(
    trace: Trace, who, before: Canvas, after: Canvas, computed, read, extra, proposal: Proposal
) -> Trace:
    """The trace with one more step of each active sequence, written in place since the loop carries it."""
    widened = extra >= jnp.sum(before.valid & ~computed, axis=1, keepdims=True)
    who = jnp.arange(len(computed)) if who is None else who
    # Of a sequence that takes no part the step is beyond the trace, and nothing is written.
    step = jnp.where(before.active, before.step, len(trace.tokens))
    put = lambda array, value, step=step: array.at[step, who].set(value, mode="drop")
    return trace._replace(
        tokens=put(trace.tokens, after.tokens, step + 1),
        computed=put(trace.computed, computed),
        read=put(trace.read, read),
        proposed=put(trace.proposed, proposal.token),
        score=put(trace.score, proposal.score),
        active=put(trace.active, before.active),
        widened=put(trace.widened, widened),
    )
