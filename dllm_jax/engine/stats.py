"""Statistics of a run per sequence."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine import trace
from dllm_jax.engine.logprobs import LogProbs, changed_by
from dllm_jax.engine.trace import Steps, Trace
from dllm_jax.options.renamed import Renamed
from dllm_jax.state.canvas import Canvas, first_eos
from dllm_jax.state.proposal import Proposal
from dllm_jax.xla.reductions import any_marked, count_marked


class Stats(NamedTuple):
    """Cost of a run, per sequence; padding is not counted.

    Attributes:
      nfe: Forward passes that the sequence took part in.
      computed_tokens: Computed tokens, summed over forward passes.
      executed_tokens: Tokens that the device ran for this sequence, including the padding of static-shape
        programs. The only statistic that depends on the batch.
      widened_tokens: Extra computed tokens that layers added to the policy's selection
        (`Cache.extra_positions`), averaged over layers and summed over forward passes. Negative where layers
        leave selected tokens out.
      cache_ratio: Fraction of tokens that were not recomputed, averaged over forward passes (0 if exact).
      refreshes: Full steps, which recompute every token.
      decoded_tokens: Generated tokens that are not masked at the end, without a suffix.
      answer_tokens: Unmasked tokens before the first end-of-text and before a stop, or up to the last token
        of a stop text.
      finite: False if the sequence ended early because a step's logits held NaN or infinity. Tokens that were
        masked at that step stay masked. Other sequences in the batch are not affected.
      idle: Forward passes with nothing left to unmask in a block that had masks for one more each; None
        unless the sampler may have them (`Sampler.may_idle`).
      causal_passes: Forward passes with causal attention, which store the prompt and finished blocks or
        verify drafts; the others denoise. None unless the model has a causal context.
      accepted_tokens: Tokens that verifications of drafts accepted, one more than agreed in each. None unless
        the sampler drafts (`SelfSpeculation`).
      reused_tokens: Prompt tokens whose keys and values came from `prefix`; None without a prefix.
      reused_bytes: Bytes of these keys and values, which were not computed again; None without a prefix.
      sampler_steps: Denoising steps of the sampler, of which a forward pass may verify several; None unless
        they are drafted (`FreeDave`), and then `nfe` is at most as large.
      branches: Canvases computed, summed over forward passes: the sequence's own and its drafts, of which
        `computed_tokens` counts the first. None unless steps are drafted.
      unfilled_tokens: Response tokens that are still masked although the logits were finite, as constraints
        allowed them no token. None without `constraints`.
    """

    nfe: Int[Array, "b"]
    computed_tokens: Int[Array, "b"]
    executed_tokens: Float[Array, "b"]
    widened_tokens: Float[Array, "b"]
    cache_ratio: Float[Array, "b"]
    refreshes: Int[Array, "b"]
    decoded_tokens: Int[Array, "b"]
    answer_tokens: Int[Array, "b"]
    finite: Bool[Array, "b"]
    idle: Int[Array, "b"] | None = None
    causal_passes: Int[Array, "b"] | None = None
    accepted_tokens: Int[Array, "b"] | None = None
    reused_tokens: Int[Array, "b"] | None = None
    reused_bytes: Float[Array, "b"] | None = None
    sampler_steps: Int[Array, "b"] | None = None
    branches: Int[Array, "b"] | None = None
    unfilled_tokens: Int[Array, "b"] | None = None

    computed, executed = Renamed("computed", "computed_tokens"), Renamed("executed", "executed_tokens")
    widened, decoded = Renamed("widened", "widened_tokens"), Renamed("decoded", "decoded_tokens")
    answer = Renamed("answer", "answer_tokens")


class Record(NamedTuple):
    """Running sums for `Stats`, and the trace.

    Attributes:
      computed_tokens: Running sum of `Stats.computed_tokens`.
      executed_tokens: Running sum of `Stats.executed_tokens`.
      widened_tokens: Running sum of `Stats.widened_tokens`.
      refreshes: Running sum of `Stats.refreshes`.
      finite: Value of `Stats.finite` so far.
      trace: its steps so far; None if no trace is recorded.
      confidence: Confidence at which each position was unmasked, infinity elsewhere; None records none.
      idle: Running sum of `Stats.idle`.
      causal_passes: Running sum of `Stats.causal_passes`.
      logprobs: Log-probabilities so far; None records none.
      reused: Values of `Stats.reused_tokens` and `Stats.reused_bytes`.
      branches: Running sum of `Stats.branches`.
    """

    computed_tokens: Int[Array, "b"]
    executed_tokens: Float[Array, "b"]
    widened_tokens: Float[Array, "b"]
    refreshes: Int[Array, "b"]
    finite: Bool[Array, "b"]
    trace: Steps | None
    confidence: Float[Array, "b l"] | None
    idle: Int[Array, "b"] | None
    causal_passes: Int[Array, "b"] | None = None
    logprobs: LogProbs | None = None
    reused: tuple[Int[Array, "b"], Float[Array, "b"]] | None = None
    branches: Int[Array, "b"] | None = None

    @staticmethod
    def begin(
        canvas: Canvas, limit: int | None, confidence: bool, extra: Float[Array, "b n"] | None, idle: bool
    ) -> "Record":
        """An empty record.

        Args:
          canvas: before the first step.
          limit: steps of trace that are allocated; None records no trace.
          confidence: whether the confidences of decoded positions are recorded.
          extra: positions that layers computed before the first step (`Cache.extra_positions`).
          idle: whether idle steps are counted.
        """
        zeros = jnp.zeros(canvas.tokens.shape[0], jnp.int32)
        steps = None if limit is None else trace.begin(canvas, limit)
        finite = jnp.ones(zeros.shape, bool)
        unknown = jnp.full(canvas.tokens.shape, jnp.inf, jnp.float32) if confidence else None
        widened = zeros.astype(jnp.float32) if extra is None else jnp.mean(extra, axis=1)
        executed, none_idle = zeros.astype(jnp.float32), zeros if idle else None
        causal = zeros if canvas.spec.causal_context else None
        return Record(zeros, executed, widened, zeros, finite, steps, unknown, none_idle, causal)

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
        sequences: Int[Array, "b"] | None = None,
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
          proposal: Candidates offered to the sampler.
          sequences: their places in the trace, which is that of the whole batch; None where these are all.
        """
        # Padding is never counted, though a full step computes it along.
        counted = computed & before.valid
        everything = before.active & ~any_marked(counted != before.valid)
        if extra is None:
            extra = jnp.zeros((len(counted), before.spec.layers))
        widened = extra >= jnp.sum(before.valid & ~computed, axis=1, keepdims=True)
        return Record(
            computed_tokens=self.computed_tokens + count_marked(counted),
            executed_tokens=self.executed_tokens
            + before.active * (rows / jnp.maximum(jnp.sum(before.active), 1)),
            widened_tokens=self.widened_tokens + jnp.mean(extra, axis=1),
            refreshes=self.refreshes + everything.astype(jnp.int32),
            finite=self.finite & finite,
            trace=None
            if self.trace is None
            else trace.add(self.trace, sequences, before, after, computed, read, widened, proposal),
            confidence=None
            if self.confidence is None
            else _decoded_with(self.confidence, before, after, proposal),
            idle=None if self.idle is None else self.idle + _idles(before),
            causal_passes=None
            if self.causal_passes is None
            else self.causal_passes + (before.active & before.causal[:, 0]),
            logprobs=self.logprobs,
            reused=self.reused,
            branches=self.branches,
        )

    def completed(self, canvas: Canvas) -> Trace | None:
        """The trace, given the last canvas."""
        return None if self.trace is None else trace.completed(self.trace, canvas)

    def stats(self, canvas: Canvas) -> Stats:
        """The statistics of a finished generation, given its last canvas."""
        # Exact decoding would compute all valid positions in every forward.
        positions = count_marked(canvas.valid) * canvas.passes
        recomputed = (self.computed_tokens + self.widened_tokens) / jnp.maximum(positions, 1)

        # The answer ends before the first end-of-text, also where positions after it are decoded.
        end = first_eos(canvas) if canvas.stop is None else jnp.minimum(first_eos(canvas), canvas.stop)
        decoded = canvas.decoded
        if canvas.layout.end < canvas.layout.length:
            decoded &= canvas.position < canvas.layout.end
        before_eos = decoded & (canvas.position < end[:, None])
        return Stats(
            nfe=canvas.passes,
            computed_tokens=self.computed_tokens,
            executed_tokens=self.executed_tokens,
            widened_tokens=self.widened_tokens,
            cache_ratio=jnp.where(positions > 0, 1.0 - recomputed, 0.0).astype(jnp.float32),
            refreshes=self.refreshes,
            decoded_tokens=count_marked(decoded),
            answer_tokens=count_marked(before_eos),
            finite=self.finite,
            idle=self.idle,
            causal_passes=self.causal_passes,
            accepted_tokens=_accepted(canvas) if canvas.layout.drafts else None,
            reused_tokens=None if self.reused is None else self.reused[0],
            reused_bytes=None if self.reused is None else self.reused[1],
            sampler_steps=None if canvas.forwards is None else canvas.step,
            branches=self.branches,
        )


def _accepted(canvas: Canvas) -> Int[Array, "b"]:
    """How many tokens verifications accepted: those after the prompt that were, but the pass over it."""
    assert canvas.stored is not None, "a causal context"
    return jnp.maximum(canvas.stored - canvas.layout.prompt, 0)


def _idles(before: Canvas) -> Bool[Array, "b"]:
    """The sequences that a step has nothing to decode for, although their block had masks for it."""
    # A block with fewer masks than steps, as templates have, is idle under every schedule.
    had_masks = before.schedule_step < before.block_masks
    return before.active & ~jnp.any(before.unanswered, axis=1) & had_masks


def _decoded_with(
    confidence: Float[Array, "b l"], before: Canvas, after: Canvas, proposal: Proposal
) -> Float[Array, "b l"]:
    """The confidences with those of what this step decoded; infinity where it made a mask again."""
    new = jnp.where(after.masked, jnp.inf, proposal.score)
    return jnp.where(changed_by(before, after), new, confidence)
