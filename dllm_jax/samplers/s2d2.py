"""S2D2: denoising drafts a block, the same model in blocks of one token verifies it (arXiv:2603.25702)."""

import dataclasses
import math
from typing import Annotated, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.arithmetic import of_token
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NoneMeans, PositiveInt, TracedFraction, TracedPositiveFloat, refuse
from dllm_jax.samplers import scores
from dllm_jax.samplers.base import Procedure, check_ends_unordered
from dllm_jax.samplers.candidates import Candidates, Decision, Ids, Logits, Noise, Scores, require_noise
from dllm_jax.samplers.parallel import UntilDone, scheduled
from dllm_jax.samplers.transfer import sure_or_best
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.contexts import in_blocks
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import first_of, gather, places, spread
from dllm_jax.traced import fixed_at
from dllm_jax.xla.reductions import argmax

GAP = 0.05  # of the two largest probabilities, above which "margin" expects acceptance


class Draft(NamedTuple):
    """State of S2D2.

    Attributes:
      verifying: Whether the coming step verifies the draft.
      on: Whether the last step's score asked for a verification.
      steps: Drafts of the block so far.
      token: Drafted tokens.
      score: Their confidences.
      log_p: Log-probabilities that they were drawn from, by candidate; of no tokens at temperature 0.
    """

    verifying: Bool[Array, "b"]
    on: Bool[Array, "b"]
    steps: Int[Array, "b"]
    token: Int[Array, "b l"]
    score: Float[Array, "b l"]
    log_p: Float[Array, "b c v"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class S2D2(UntilDone):
    """Drafts with `Dynamic`, then verifies the draft with the same model token by token, where that may pay.

    A step of `Dynamic` is a draft. If enough of the first run of masks is expected to be accepted (`on`), a
    further forward pass computes the distribution q of each of its tokens after the drafts before it. A draft
    drawn from p is accepted with probability min(1, (q / p)^gamma); the first refused one is drawn from
    (q - p)+. At temperature 0 the token must be the most likely one of q. `Dynamic` unmasks what its schedule
    then lacks.

    Works with `Policy()`, on block-causal models without a causal context. Use it with those that were made
    from autoregressive models: others were never trained on blocks of one token. No accuracy was measured.

    Equals `Autoregressive()` at temperature 0 when: on=None, least=1, causal_storage=True, block=the model's,
      a step per token.

    Differences: Without `do_sample` the reference implementation takes the most likely token as draft, and
      temperature 0 as 1 (`greedy_drafts=True` with `temperature=1`). It verifies batches of one sequence.

    Attributes:
      threshold: Confidence to exceed, as in `Dynamic`. 0.85 for SDAR, 0.9 for Fast-dLLM v2.
      on: Score from which a draft is verified: the expected number of accepted tokens minus a cost. None
        verifies whatever the score.
      off: Score below which verification stops, until it reaches `on` again. None means `on`.
      cost: Cost of a verification, in tokens.
      per: Unit of the cost: "pass" counts it once, "sure" for each mask above the threshold.
      estimate: Estimate of the chance that a token is accepted: "entropy", exp(-H / log V), or "margin", 1
        where the two largest probabilities differ by more than 0.05.
      least: Minimum length of a run of masks that is verified.
      gamma: Exponent of q / p.
      causal_storage: Whether keys and values of the prompt and of decoded tokens come from causal attention,
        as published for SDAR.
      greedy_drafts: Whether drafts are the most likely tokens where the temperature is not 0.
    """

    threshold: TracedFraction = 0.85
    on: Annotated[float | None, NoneMeans("always")] = 0.0
    off: Annotated[float | None, NoneMeans("as on")] = None
    cost: float = 1.0
    per: Literal["pass", "sure"] = "pass"
    estimate: Literal["entropy", "margin"] = "entropy"
    least: PositiveInt = 1
    gamma: TracedPositiveFloat = 1.0
    causal_storage: bool = True
    greedy_drafts: bool = False

    tempered_confidence: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_ends_unordered(self, "S2D2")
        reason = "it verifies tokens"
        refuse(self, {"early_commit": reason, "allow_mask_token": reason}, "Use Dynamic().")
        if self.off is not None and (self.on is None or self.off > self.on):
            raise ValueError(f"off={self.off} must be at most on={self.on}")

    @property
    @override
    def procedure(self) -> Procedure:
        return Procedure(verifies_causally=True, stores_causally=self.causal_storage)

    @override
    def check_model(self, spec: ModelSpec):
        super().check_model(spec)
        if not spec.context.has_blocks or spec.context.has_causal_passes:
            raise ValueError(
                f"sampler=S2D2() does not support {spec.family}: it needs blocks after a prompt that is not "
                "causal. Use Threshold(), or SelfSpeculation() on Nemotron."
            )

    @override
    def init(self, canvas: Canvas) -> Draft:
        """Nothing drafted yet."""
        off, none, token = (jnp.zeros_like(a) for a in (canvas.done, canvas.step, canvas.tokens))
        drawn_from = 0 if fixed_at(self.temperature, 0) else canvas.spec.vocab
        log_p = jnp.zeros((len(none), canvas.layout.widest_block, drawn_from))
        return Draft(off, off, none, token, jnp.zeros(token.shape), log_p)

    @override
    def read_as(self, canvas: Canvas, memory: Draft) -> Canvas:
        """The canvas, with the draft in place of masks where it is verified, and attending causally."""
        verified, masks = memory.verifying[:, None], canvas.masked
        known = jnp.zeros_like(canvas.step)
        if self.causal_storage:
            # With a shifted head, the first mask of a sequence predicts itself.
            known = first_of(masks, canvas.layout.length) + canvas.opens_model_block[:, 0]
        return dataclasses.replace(
            in_blocks(canvas),
            tokens=jnp.where(verified & masks & canvas.block, memory.token, canvas.tokens),
            causal_before=jnp.where(memory.verifying, canvas.layout.length, known),
            verifying=memory.verifying,
        )

    @override
    def _choose(self, logits, keep, index, canvas: Canvas, noise: Noise | None) -> Ids:
        """The drafted token; where drafts are verified by draws, those come from what is left of q."""
        sampler = dataclasses.replace(self, temperature=0.0) if self.greedy_drafts else self
        return super(S2D2, sampler)._choose(logits, keep, index, canvas, noise)

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """All positions above the threshold, or as many as the block's schedule wants (`Dynamic`)."""
        return sure_or_best(candidates.score, self.threshold, scheduled(canvas))

    @override
    def decide(self, candidates: Candidates, memory: Draft, canvas: Canvas, noise: Noise | None) -> Decision:
        """Decodes by the draft, or leaves it to the next step; of a draft that is verified, what holds."""
        index, token, score, logits = candidates
        first = canvas.block_step == 0
        steps = jnp.where(first, 0, memory.steps)
        now = dataclasses.replace(canvas, block_step=steps)
        offered = score > -jnp.inf
        span = first_run(offered, index)

        # A draft, by this step's outputs.
        on = memory.on
        if self.on is not None:
            off = self.on if self.off is None else self.off
            on = self.gain(candidates, span) >= jnp.where(on, off, self.on)
        verify = (jnp.sum(span, axis=1) >= self.least) & ~canvas.opens_model_block[:, 0]
        verify = verify if self.on is None else verify & on
        drafted = self.transfer(candidates, now, noise) & ~verify[:, None]

        # The verification of the last one: the accepted prefix, one more token, and the rest of the schedule.
        draft = candidates._replace(token=gather(memory.token, index), score=gather(memory.score, index))
        accepted, instead = self.verify(draft, memory.log_p, candidates, canvas, noise)
        before = jnp.pad(jnp.cumprod(accepted | ~span, axis=1), ((0, 0), (1, 0)), constant_values=1)
        prefix = span & (before[:, :-1] > 0)
        renewed = prefix & ~accepted
        missing = scheduled(now) - jnp.sum(prefix, axis=1)
        left = jnp.where(offered & ~prefix, draft.score, -jnp.inf)
        more = sure_or_best(left, self.threshold, missing) & (missing > 0)[:, None]
        revised = jnp.where(renewed, instead, draft.token)

        verifying = memory.verifying[:, None]
        chosen = jnp.where(verifying, prefix | more, drafted)
        token = jnp.where(verifying, revised, token)
        place = places(index, canvas.layout.length)
        after = Draft(
            verify & ~memory.verifying,
            jnp.where(memory.verifying, memory.on, on),
            steps + jnp.where(memory.verifying | ~verify, 1, 0),
            spread(token, place, canvas.spec.mask_id),
            spread(score, place, -jnp.inf),
            memory.log_p,
        )
        if memory.log_p.shape[2]:
            log_p = jax.nn.log_softmax(logits, axis=-1)
            unused = memory.log_p.shape[1] - log_p.shape[1]
            after = after._replace(log_p=jnp.pad(log_p, ((0, 0), (0, unused), (0, 0))))
        keep = lambda new, old: jnp.where(canvas.active.reshape(-1, *[1] * (old.ndim - 1)), new, old)
        return Decision(chosen, jax.tree.map(keep, after, memory), token=token)

    def gain(self, draft: Candidates, span: Bool[Array, "b c"]) -> Float[Array, "b"]:
        """Expected number of accepted tokens, less the cost of a verification.

        Args:
          draft: Drafts and their logits.
          span: First run of masks.
        """
        chance = jnp.where(span, self.chance(draft.logits), 1)
        expected = jnp.sum(span * jnp.cumprod(chance, axis=1), axis=1)
        units = 1 if self.per == "pass" else jnp.sum(draft.score > self.threshold, axis=1)
        return expected - self.cost * units

    def chance(self, logits: Logits) -> Scores:
        """Estimated chance that a token drawn from these logits is accepted."""
        if self.estimate == "margin":
            return scores.margin(logits, None) > GAP
        return jnp.exp(scores.negative_entropy(logits) / math.log(logits.shape[-1]))

    def verify(
        self,
        draft: Candidates,
        log_p: Float[Array, "b w v"],
        verifier: Candidates,
        canvas: Canvas,
        noise: Noise | None,
    ) -> tuple[Bool[Array, "b c"], Ids]:
        """Whether each drafted token is accepted, and the token in its place if it is not.

        Args:
          draft: Drafted tokens.
          log_p: Log-probabilities that they were drawn from.
          verifier: Candidates of the verifying pass.
          canvas: State before the step.
          noise: Random numbers; None at temperature 0.
        """
        if fixed_at(self.temperature, 0):
            return draft.token == verifier.token, verifier.token
        noise, log_q = require_noise(noise), jax.nn.log_softmax(verifier.logits, axis=-1)
        log_p = log_p[:, : log_q.shape[1]]
        ratio = of_token(log_q, draft.token) - of_token(log_p, draft.token)
        accepted = jnp.log(noise.order_uniform(canvas, draft.index)) < self.gamma * ratio

        more = jnp.log(jnp.maximum(jnp.exp(log_q) - jnp.exp(log_p), 0))
        residual = scores.ruled_out(more, canvas.spec.mask_id)
        nothing = jnp.max(residual, axis=-1, keepdims=True) == -jnp.inf
        residual = jnp.where(nothing, scores.ruled_out(log_q, canvas.spec.mask_id), residual)
        gumbel = noise.token_gumbel(canvas, draft.index, log_q.shape[-1])
        return accepted, argmax(residual + gumbel)

    @override
    def max_steps(self, layout: Layout) -> int:
        """A draft and its verification for each token at worst."""
        return 2 * layout.response


def first_run(offered: Bool[Array, "b c"], index: Int[Array, "b c"]) -> Bool[Array, "b c"]:
    """The offered candidates at neighboring positions from the first one on."""
    place = jnp.arange(index.shape[1])
    first = jnp.argmax(offered, axis=1)[:, None]
    start = jnp.take_along_axis(index, first, axis=1)
    run = (offered & (index - start == place - first)) | (place < first)
    return offered & (jnp.cumprod(run, axis=1) > 0)
