"""The base of all samplers: from logits to one candidate token and its score per position."""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, final

import jax.numpy as jnp
from annotated_types import Interval, MinLen
from jaxtyping import Array, Bool, Int, PyTree

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import LARGEST, NoneMeans, NonNegativeInt, Options, PositiveInt, TracedUnlessZero
from dllm_jax.options.base import annotated_fields, users_own
from dllm_jax.samplers import scores
from dllm_jax.samplers.candidates import Candidates, Decision, Ids, Logits, Noise, Scores, require_noise
from dllm_jax.samplers.early_commit import EarlyCommit
from dllm_jax.samplers.returns import OF_SAMPLER
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import gather
from dllm_jax.traced import Number, Traced, fixed_at
from dllm_jax.xla.products import divided
from dllm_jax.xla.reductions import any_marked, argmax

Alg = Literal["prob", "margin", "entropy"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Procedure:
    """What steps of a sampler do besides unmasking candidates, the masks of a block.

    Attributes:
      verifies: Whether tokens that earlier steps decoded in the block are candidates too, with score -inf and
        logits of their own, which do not see the token (`engine.branches`); `decide` may revoke them.
      edits: Whether tokens that earlier steps decoded in the block are candidates too, with score -inf;
        `decide` may replace them, and keep the sequence in the block.
      block: Block length that the sampler decodes in; None leaves it to `generate(block=)`.
      drafts: Whether a block is a draft, which a causal pass verifies (`Layout.drafts`): the candidates of
        that pass are the draft's tokens and one more, each predicted from the left; `decide` may revoke them.
      draft_adapter: Whether the model's LoRA adapters act in drafts alone, not in causal passes.
      verifies_causally: Whether steps that `read_as` marks verify a draft: the logits of a mask are then
        those of a mask after the draft (`engine.branches`), or with a shifted head of the token before it.
      stores_causally: Whether keys and values of the prompt and of decoded tokens are stored from causal
        attention, token by token.
      of_noise: Whether the sampler denoises uniform noise, of models without a mask token. Its memory has the
        field `soft`, the embeddings that the network expected at the positions of the block [b c m].
      grows: Whether answers may become longer (`max_length=`), for a `GrowingAnswers`.
      shortens: Whether answers that grow may become shorter, too; text around them moves along (`infill`).
    """

    verifies: bool = False
    edits: bool = False
    block: int | None = None
    drafts: bool = False
    draft_adapter: bool = False
    verifies_causally: bool = False
    stores_causally: bool = False
    of_noise: bool = False
    grows: bool = False
    shortens: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler(Options, abc.ABC):
    """Base of samplers, which select the tokens to unmask at each denoising step.

    A subclass defines `transfer`, the remasking rule: positions that it does not select stay masked. A
    sampler that keeps state between steps, or remasks tokens, also overrides `decide`.

    Attributes:
      temperature: Temperature of the Gumbel-max draw, logits + temperature * gumbel in float32. 0 takes the
        most likely token.
      top_p: Nucleus mass in (0, 1], or None.
      top_k: Number of most likely tokens to draw from, or None. Dream's reference implementation inherits 50
        from transformers; the default here is None.
      cfg_scale: Classifier-free guidance w: logits = unconditional + (w + 1)(conditional - unconditional),
        where the unconditional run has its prompt masked. Doubles the cost; 0 is off.
      logits_eos_inf: Whether end-of-text is never unmasked.
      early_commit: Rule that unmasks everything once the answer is settled (Prophet); None is off.
      suppress_tokens: Ids that are never unmasked: they join `forbid` of `generate`. LLaDA-V's reference
        implementation has four of them.
      confidence_eos_eot_inf: Whether end-of-text and end-of-turn get the smallest possible confidence (0;
        with "entropy" that of a uniform distribution), so that they are unmasked last. Not supported by
        orders without confidence, nor by `S2D2`, `WINO`, `DAEDAL` and `EntropyNoise`. LLaDA's reference
        implementation forgets end-of-text when temperature > 0.
      delay_eos: Whether a candidate that is end-of-text waits for the mask in front of it, in the same block,
        while the response holds none that a step unmasked: its decision counts the smallest possible
        confidence, as ES-dLLM's reference implementation does. Not supported by orders without confidence,
        nor by `S2D2`, `DreamOn` and `EntropyNoise`.
      allow_mask_token: Whether [MASK] itself may be selected, as in reference implementations; the position
        then stays masked. By default the best other token is taken; confidences still count [MASK]'s
        probability.
    """

    temperature: TracedUnlessZero = 0.0
    top_p: Annotated[Number | None, Interval(gt=0, le=1), Traced(unless=1), NoneMeans("all tokens")] = None
    top_k: Annotated[PositiveInt | None, NoneMeans("all tokens")] = None
    cfg_scale: TracedUnlessZero = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    delay_eos: bool = False
    allow_mask_token: bool = False
    suppress_tokens: Annotated[tuple[NonNegativeInt, ...] | None, MinLen(1), NoneMeans("no ids")] = None
    early_commit: Annotated[EarlyCommit | None, NoneMeans("never")] = None

    _returns = OF_SAMPLER
    tempered_confidence: ClassVar[bool] = False  # the score sees logits / temperature
    scored: ClassVar[Literal["block", "response", "answer"]] = "block"
    """Masks that get logits, a candidate token and a score if they can be predicted, as `Policy.scored`:
    those of the block, or all of the response, for a sampler that remembers predictions of later blocks. Only
    those of the block are decoded in either case. With "answer" all positions of the response are candidates,
    those that hold a token with score -inf."""

    by_score: ClassVar[bool] = False
    """Promises that `transfer` decides by the candidates' positions, tokens and scores, the canvas and the
    noise alone, not by their logits, and nothing is remembered: `FreeDave` can then draft its steps."""

    counts_no_steps: ClassVar[bool] = False
    """Promises that `transfer` and `finished` look at nothing that counts steps: a draft of `FreeDave` may
    then skip some."""

    until_done: ClassVar[bool] = False
    """Promises that a sequence stays in its block until nothing in it is masked, however long it is."""

    promises: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "by_score": ("transfer", "decide", "init"),
        "counts_no_steps": ("transfer", "decide", "finished"),
        "until_done": ("finished", "max_steps", "whole_blocks"),
    }

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        parts = {"own_block"} | {field.name for field in dataclasses.fields(Procedure)} - {"block"}
        if moved := sorted(parts & vars(cls).keys() - set(annotated_fields(cls))):
            raise TypeError(f"{cls.__name__}.{moved[0]} is not read: return a Procedure from `procedure`")

    # -- defined by each sampler ----------------------------------------------------------------------

    @property
    def procedure(self) -> "Procedure":
        """What steps do besides unmasking candidates; the default is nothing."""
        return Procedure()

    @abc.abstractmethod
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The remasking rule: which candidates this step decodes; all others stay masked.

        Args:
          candidates: positions with their tokens, confidences and logits; a score of -inf may not be decoded.
          canvas: state before the step.
          noise: random numbers; None if the sampler does not draw.
        """

    def init(self, canvas: Canvas) -> PyTree:
        """Creates the state that the sampler keeps between steps; none by default.

        It is in the loop's carry: arrays of fixed shapes, whose first axis is that of the sequences.
        """
        return ()

    def read_as(self, canvas: Canvas, memory: PyTree) -> Canvas:
        """The canvas as the network reads it in the coming step; the default is the canvas itself.

        Args:
          canvas: State before the step.
          memory: State left by the last step's decision.
        """
        return canvas

    def decide(self, candidates: Candidates, memory: PyTree, canvas: Canvas, noise: Noise | None) -> Decision:
        """The decision of a step; the default is `transfer`, and remembers nothing.

        Args:
          candidates: Positions that may be unmasked, and their logits.
          memory: State left by the last step's decision; that of a sequence that the step leaves out, which
            has no candidates, must stay as it is.
          canvas: state before the step.
          noise: random numbers; None if the sampler does not draw.
        """
        return Decision(self.transfer(candidates, canvas, noise), memory)

    @property
    def criterion(self) -> Alg:
        """Names the measure of `confidence`: the sampler's `alg`, or the candidate token's probability."""
        return getattr(self, "alg", "prob")

    def confidence(
        self, logits: Logits, token: Ids, index: Ids, canvas: Canvas, noise: Noise | None
    ) -> Scores:
        """Confidence in the candidate tokens by `criterion`, float32; larger is surer.

        Args:
          logits: float32, -inf where a token is ruled out.
          token: the candidate token of each position.
          index: canvas positions, l = padding.
          canvas: state before the step.
          noise: random numbers; None if the sampler does not draw.
        """
        criterion = self.criterion
        if criterion == "margin":
            score = scores.margin(logits, None if self.allow_mask_token else canvas.spec.mask_id)
        elif criterion == "entropy":
            score = scores.negative_entropy(logits)
        else:
            score = scores.probability(logits, token)
        if not self.confidence_eos_eot_inf:
            return score

        # Their logits are -inf already, unless one of them is the candidate after all, the only survivor of
        # the filters: it gets the smallest value that the criterion takes, for the entropy that of a uniform
        # distribution over the vocabulary.
        ends = (token == canvas.spec.eos_id) | (token == canvas.spec.eot_id)
        return jnp.where(ends, smallest_score(criterion, logits.shape[-1]), score)

    def finished(self, canvas: Canvas) -> Bool[Array, "b"]:
        """Marks the sequences that have finished the current block.

        The default is those that have taken the block's scheduled steps and have no mask left in it. If a
        policy offered fewer positions than the schedule wanted, further steps follow. A block that began
        without masks is finished whatever its schedule, and in a block-causal model, whose first block may
        begin with a prompt's end, each block without masks, as in SDAR's reference implementation. With
        `allow_mask_token` the schedule alone decides of blocks that began with masks: they are a result like
        any other token.
        """
        schedule_over = (canvas.schedule_step >= canvas.steps_per_block) | (canvas.block_masks == 0)
        if self.allow_mask_token:
            return schedule_over
        return (schedule_over | canvas.spec.context.has_blocks) & ~any_marked(canvas.unanswered)

    def planned(self, canvas: Canvas, noise: Noise | None) -> Int[Array, "b l"] | None:
        """The order in which the coming step decodes positions: 0, 1, .., and -1 at all others.

        None, the default, tells none: the order may depend on the model's output.
        """
        return None

    def max_steps(self, layout: Layout) -> int:
        """Upper bound of denoising steps, if the policy offers every mask of the block at every step."""
        return layout.scheduled_steps

    @property
    def whole_blocks(self) -> bool:
        """Whether blocks of `generate` must have equally many steps, as LLaDA's schedule, and positions.

        Models with blocks of their own do not ask for the latter, and those whose blocks are counted from the
        response (Nemotron-Labs-Diffusion, A2D's `bd3lm`) for neither. `infill` asks for neither, unless the
        sampler verifies blocks (`WINO`): they must then divide each template.
        """
        return True

    @property
    def selector(self) -> "Sampler":
        """The sampler that selects the tokens: this one, unless it drafts for another."""
        return self

    def with_selector(self, **options: Any) -> "Sampler":
        """Returns the sampler with other options of the one that selects the tokens."""
        return dataclasses.replace(self, **options)

    @property
    @final
    def revises(self) -> bool:
        """Whether decoded tokens, other than a draft's, may still change until their block is finished."""
        return self.procedure.verifies or self.procedure.edits

    @property
    def may_idle(self) -> bool:
        """Whether steps may find nothing to decode although the block had a mask for each: these are counted.

        They are where a decision of yours meets the library's `finished`. The library's own decisions follow
        the schedule; one that revises tokens has something to do without masks.
        """
        decides = users_own(self, "transfer", "decide")
        return decides and not users_own(self, "finished") and not self.revises

    @property
    def draws(self) -> bool:
        """Whether the sampler needs random numbers."""
        return not fixed_at(self.temperature, 0)

    def check_model(self, spec: ModelSpec):
        """Raises ValueError if the sampler does not go with a model."""
        of_noise = self.procedure.of_noise
        if of_noise == spec.has_mask_token:
            does = "denoises uniform noise" if of_noise else "unmasks positions"
            what = "has a mask token" if of_noise else "has no mask token"
            fix = "Threshold()" if of_noise else "EntropyNoise()"
            raise ValueError(
                f"{type(self).__name__} does not support {spec.family}: it {does}, and the model {what}. "
                f"Use {fix}."
            )
        if outside := [i for i in self.suppress_tokens or () if i >= spec.vocab]:
            raise ValueError(f"suppress_tokens holds {outside[0]}, outside the vocabulary [0, {spec.vocab})")
        if self.confidence_eos_eot_inf and spec.eot_id is None:
            raise ValueError(
                "confidence_eos_eot_inf needs the id of the end-of-turn token, which the checkpoint does not "
                "name: use model.replace_spec(eot_id=...)"
            )

    # -- the same for all samplers ---------------------------------------------------------------------------

    def propose(self, logits: Logits, index: Ids, canvas: Canvas, noise: Noise | None) -> Candidates:
        """The candidate token of each position and its confidence.

        Args:
          logits: guided logits of the positions, in any float dtype.
          index: canvas positions, l = padding.
          canvas: state before the step.
          noise: random numbers; None if the sampler does not draw.
        """
        logits, tempered, keep = self._filtered(logits, canvas)
        token = self._choose(logits, keep, index, canvas, noise)

        # The confidence is that of the distribution after the filters: they renormalize it. LLaDA scores the
        # un-tempered distribution, Dream the tempered one.
        scored = tempered if self.tempered_confidence else logits
        if keep is not None:
            scored = jnp.where(keep, scored, -jnp.inf)
        if self.confidence_eos_eot_inf:
            scored = scores.ruled_out(scored, canvas.spec.eos_id, canvas.spec.eot_id)
        score = self.confidence(scored, token, index, canvas, noise)
        return Candidates(index, token, score, scored)

    @final
    def delay(self, candidates: Candidates, canvas: Canvas) -> tuple[Candidates, Bool[Array, "b c"] | None]:
        """Returns the candidates with the scores of the decision, and which ones `delay_eos` delays.

        None where the sampler delays none. A leftmost mask of a block waits for nothing.
        """
        if not self.delay_eos:
            return candidates, None
        index, token, score = candidates.index, candidates.token, candidates.score
        answer = (canvas.decoded_at >= 0) & (canvas.position < canvas.layout.end)  # no given text, no padding
        answered = jnp.any(answer & (canvas.tokens == canvas.spec.eos_id), axis=1, keepdims=True)
        before = jnp.pad((canvas.masked & canvas.block)[:, :-1], ((0, 0), (1, 0)))
        waits = gather(before, index) & (index < canvas.layout.length) & ~answered
        waits &= (token == canvas.spec.eos_id) & (score > -jnp.inf)
        least = smallest_score(self.criterion, canvas.spec.vocab)
        return candidates._replace(score=jnp.where(waits, jnp.minimum(score, least), score)), waits

    @final
    def drawn(self, logits: Logits, canvas: Canvas) -> Logits:
        """Logits of the distribution that tokens are drawn from, after temperature and filters."""
        _, tempered, keep = self._filtered(logits, canvas)
        return tempered if keep is None else jnp.where(keep, tempered, -jnp.inf)

    def _filtered(self, logits: Logits, canvas: Canvas) -> tuple[Logits, Logits, Bool[Array, "b c v"] | None]:
        """The logits, the tempered ones, and the survivors of the filters (None: all tokens)."""
        # The references take the softmax in bf16, float32 or float64; float32 avoids the ties that bf16
        # makes.
        logits = logits.astype(jnp.float32)
        if self.logits_eos_inf:
            logits = scores.ruled_out(logits, canvas.spec.eos_id)

        # Nucleus and top-k see the tempered distribution: temperature, top_p, top_k in Dream's order.
        # Divided by a tiny temperature a logit may exceed what float32 holds.
        tempered = logits
        if not fixed_at(self.temperature, 0):
            tempered = jnp.minimum(divided(logits, self.temperature), LARGEST)
        truncated = self.top_p is not None or self.top_k is not None
        return logits, tempered, scores.survivors(tempered, self.top_p, self.top_k) if truncated else None

    def _choose(self, logits, keep, index, canvas: Canvas, noise: Noise | None) -> Ids:
        """The candidate token among the survivors `keep` of the filters (None: all tokens)."""
        # Gumbel-max: argmax(logits + T g) is a draw from softmax(logits / T).
        if not fixed_at(self.temperature, 0):
            gumbel = require_noise(noise).token_gumbel(canvas, index, logits.shape[-1])
            logits = logits + self.temperature * gumbel

        # A position decoded to [MASK] would stay masked and could be decoded without end.
        if not self.allow_mask_token:
            logits = scores.ruled_out(logits, canvas.spec.mask_id)
        token = argmax(logits)
        if keep is None:
            return token

        # Where [MASK] alone survived the filters nothing is left to choose from: the next best token is
        # taken.
        truncated = jnp.where(keep, logits, -jnp.inf)
        nothing_left = jnp.max(truncated, axis=-1) == -jnp.inf
        return jnp.where(nothing_left, token, argmax(truncated))


def smallest_score(alg: Alg, vocab: int) -> float:
    """Returns the smallest value that the criterion takes."""
    return -math.log(vocab) if alg == "entropy" else 0.0


def check_ends_unordered(sampler: Sampler, order: str):
    """Raises ValueError if end-of-text or end-of-turn are to wait in an order without confidence."""
    for option in ("confidence_eos_eot_inf", "delay_eos"):
        if getattr(sampler, option):
            raise ValueError(
                f"{option}=True has no effect with {order}, which does not go by confidence alone: "
                "use logits_eos_inf, or an order by confidence"
            )
