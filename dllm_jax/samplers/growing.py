"""Answers that find their own length: DAEDAL and DreamOn.

DAEDAL goes by how sure the model is of the end, DreamOn's infilling by two tokens of the model.
"""

import abc
import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, PositiveInt, TracedFraction, refuse
from dllm_jax.samplers import scores
from dllm_jax.samplers.base import Alg, Procedure
from dllm_jax.samplers.candidates import Candidates, Logits, Noise
from dllm_jax.samplers.dream import criterion_of
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.samplers.transfer import sure_or_best
from dllm_jax.state.cache import Proposal
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.growing import GrowingCanvas, growing, growth_of, insert, remove, with_growth
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import gather
from dllm_jax.state.selection import best
from dllm_jax.xla.reductions import argmax


@dataclasses.dataclass(frozen=True)
class GrowingAnswers(UntilDone):
    """Base of samplers whose answers change their length."""

    @property
    @override
    def procedure(self) -> Procedure:
        return Procedure(grows=True)

    @abc.abstractmethod
    def end_confidence(
        self, candidates: Candidates, logits: Logits, unconstrained: Logits, canvas: Canvas, at_end: bool
    ) -> Float[Array, "b"]:
        """How sure the model is of the end of each answer.

        Args:
          candidates: Candidates of the step.
          logits: Logits that they were chosen by.
          unconstrained: Those of the model, before constraints.
          canvas: State before the step.
          at_end: Whether partial steps compute the last positions of the canvas (`PrefixCache`).
        """

    @abc.abstractmethod
    def resize(self, before: Canvas, after: Canvas, proposal: Proposal) -> Canvas:
        """The canvas with longer or shorter answers after a step.

        Args:
          before: State before the step.
          after: State with the step's tokens, and its confidences in the ends of answers.
          proposal: Candidates of the step; score -inf where they were not offered.
        """


@dataclasses.dataclass(frozen=True)
class DAEDAL(GrowingAnswers):
    """Unmasks every position above a threshold; the answer grows until the model is sure of its end (DAEDAL).

    The method is that of arXiv:2508.00819.

    Use it where answers differ in length: `generate(length=64, max_length=1024, block=32, sampler=DAEDAL())`.
    The answer begins with `length` masks. While the confidence in its end is below `grow_below`, masks are
    appended, `expansion` per step. Then it is decoded. Where the model is unsure of a mask, and of the end,
    the mask becomes `expansion` masks. The confidence in the end is the mean probability of end-of-text at
    the last `checked` positions whose most likely token it is; each missing one counts 0.

    Works with `Policy`, `PrefixCache` and `DualCache`, on models without blocks of their own. All positions
    of the answer meet the vocabulary in every step that computes them.

    With length=max_length it is `Threshold(high)`, except for a first forward pass, and that the confidence
    must exceed the threshold. `grow_below=0` appends no masks, `insert_below=0` inserts none.

    Differences: [MASK] is never chosen. Prompts of other lengths change nothing; the reference implementation
      attends to their padding. Under `DualCache` the confidence is that of the last step that computed the
      whole answer.

    Attributes:
      high: Probability above which a position is unmasked; the most confident one always is.
      low: Probability below which a mask may become several: one per step, the least confident.
      grow_below: Confidence in the end below which the answer grows before it is decoded.
      insert_below: Confidence in the end below which masks are inserted.
      expansion: Number of masks appended at once, and in the place of one.
      checked: Number of positions that the confidence in the end is averaged over. Half as many end-of-texts
        are appended when the growth ends, as far as there is room.
      any_end: Whether end-of-turn and `ModelSpec.stop_ids` count as ends like end-of-text, for answers that
        may fill their length up to them.
    """

    high: TracedFraction = 0.9
    low: TracedFraction = 0.1
    grow_below: TracedFraction = 0.5
    insert_below: TracedFraction = 0.9
    expansion: PositiveInt = 8
    checked: PositiveInt = 32
    any_end: bool = False

    scored: ClassVar[Literal["answer"]] = "answer"

    def __post_init__(self):
        super().__post_init__()
        reasons = {
            "cfg_scale": "the two streams may be sure of different ends",
            "early_commit": "an answer is settled once its length is",
            "logits_eos_inf": "it looks for the end",
            "confidence_eos_eot_inf": "it looks for the end",
            "allow_mask_token": "a mask that stays would become several",
        }
        refuse(self, reasons)

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """All positions above the threshold or the most confident one; none while the answer grows."""
        chosen = sure_or_best(candidates.score, self.high, 1)
        return chosen & ~canvas.growth.growing[:, None] if isinstance(canvas, GrowingCanvas) else chosen

    @override
    def end_confidence(
        self, candidates: Candidates, logits: Logits, unconstrained: Logits, canvas: Canvas, at_end: bool
    ) -> Float[Array, "b"]:
        """The confidence in the end of each answer.

        From the end of the answer back, the first positions whose most likely token is end-of-text count,
        masked or not. Steps that leave out a part of the answer keep the last confidence, unless they predict
        its end (`PrefixCache`): they have it of the positions that they predict.
        """
        index, spec = candidates.index, canvas.spec
        counted = spec.ends_of_turn if self.any_end else (spec.eos_id,)
        unconstrained, real = unconstrained.astype(jnp.float32), index < canvas.layout.length
        ends = real & jnp.isin(argmax(unconstrained), jnp.array(counted))
        from_the_end = jnp.cumsum(ends[:, ::-1], axis=1)[:, ::-1]
        belief = sum(scores.probability(unconstrained, jnp.full_like(index, end)) for end in counted)
        belief = jnp.where(ends & (from_the_end <= self.checked), belief, 0.0)
        confidence = jnp.sum(belief, axis=1) / self.checked

        # A sequence has all of its answer's positions among the candidates, or else a part.
        known = jnp.sum(real, axis=1) == jnp.sum(canvas.valid & canvas.response, axis=1)
        return jnp.where(known | at_end, confidence, growth_of(canvas).confidence)

    @override
    def resize(self, before: Canvas, after: Canvas, proposal: Proposal) -> Canvas:
        """The canvas with longer answers: masks at their ends, or in the place of the least sure mask."""
        growing = before.active & ~after.done & growth_of(before).growing
        lengthened = self._lengthened(after, growing)
        stays = lengthened.masked & ~growth_of(before).growing[:, None]
        return self._inserted(lengthened, jnp.where(stays, proposal.score, -jnp.inf))

    def _lengthened(self, canvas: Canvas, growing: Bool[Array, "b"]) -> Canvas:
        """More masks after answers that are to grow, end-of-texts after those that are not."""
        growth = growth_of(canvas)
        wants, room = growth.confidence < self.grow_below, growth.limit - growth.end
        goes_on = growing & wants & (room > 0)
        ends = growing & ~goes_on
        masks = jnp.where(goes_on, jnp.minimum(self.expansion, room), 0)
        texts = jnp.where(ends, jnp.minimum(self.checked // 2, room), 0)
        closing = (canvas.position >= growth.end[:, None]) & (canvas.position < (growth.end + texts)[:, None])
        changed = growth._replace(
            end=growth.end + masks + texts,
            growing=growth.growing & ~ends,
            growth_steps=growth.growth_steps + growing,
            wanted_more=growth.wanted_more | (ends & wants),
        )
        closed = dataclasses.replace(
            canvas,
            tokens=jnp.where(closing, canvas.spec.eos_id, canvas.tokens),
            decoded_at=jnp.where(closing, canvas.step[:, None] - 1, canvas.decoded_at),
        )
        return with_growth(closed, changed, growing)

    def _inserted(self, canvas: Canvas, score: Float[Array, "b l"]) -> Canvas:
        """Several masks in the place of the least sure one of each sequence, if any may become several."""
        growth = growth_of(canvas)
        unsure = (score > -jnp.inf) & (score < self.low) & (growth.confidence < self.insert_below)[:, None]
        wants, room = jnp.any(unsure, axis=1), growth.limit - growth.end
        at = jnp.argmin(jnp.where(unsure, score, jnp.inf), axis=1).astype(jnp.int32)
        more = self.expansion - 1
        wanted = growth.wanted_more | (wants & (room < more))
        canvas = dataclasses.replace(growing(canvas), growth=growth._replace(wanted_more=wanted))
        return insert(canvas, at, more, wants & (room > 0))

    @override
    def max_steps(self, layout: Layout) -> int:
        """The steps of growth, and one per position that there may be; an insertion may take one's place."""
        most = layout.response
        if layout.initial is None:
            return most
        return -(-(most - layout.initial) // self.expansion) + 1 + most + self.expansion


@dataclasses.dataclass(frozen=True)
class DreamOn(GrowingAnswers):
    """Unmasks the most confident mask of a template; its token may expand the answer or end it (DreamOn).

    The method is that of arXiv:2602.01326.

    Use it with DreamOn's weights, where the number of missing tokens is not known:
    `infill(model, prefix + 8 * [mask] + suffix, max_length=64, sampler=DreamOn())`.
    A mask that takes the expand token becomes two masks. One that takes end-of-text is removed, with all
    masks after it up to the next given text. At most `max_length` tokens take the place of the masks, after
    at most as many expansions; then the expand token is ruled out. Works with `Policy`, `PrefixCache` and
    `DualCache`.

    Equals one token per step by `alg` when: `forbid=[expand]`, and both switches are off.

    Differences: [MASK] is never chosen. An end-of-text that was given removes nothing, where the reference
      implementation fills all masks after one. A template may have several places with masks: each ends by
      itself.

    Attributes:
      expand: Token id that turns a mask into two; the default is that of DreamOn-v0-7B.
      alg: Measure of confidence: "entropy", "maskgit_plus" (probability) or "topk_margin", after temperature,
        top_p and top_k.
      pad_eos_to_right: Whether masks between an end-of-text and the next given text become end-of-text.
      delete_eos: Whether end-of-text that takes the place of a mask is removed.
    """

    expand: NonNegativeInt = 151667
    alg: Literal["entropy", "maskgit_plus", "topk_margin"] = dataclasses.field(
        default="entropy", kw_only=True
    )
    pad_eos_to_right: bool = dataclasses.field(default=True, kw_only=True)
    delete_eos: bool = dataclasses.field(default=True, kw_only=True)

    tempered_confidence: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        reasons = {
            "cfg_scale": "infilling has no prompt to guide by",
            "early_commit": "an answer is settled once its length is",
            "delay_eos": "an end-of-text ends what is missing",
            "allow_mask_token": "a mask that stays would be chosen for ever",
        }
        refuse(self, reasons)

    @property
    @override
    def procedure(self) -> Procedure:
        return Procedure(grows=True, shortens=True)

    @override
    def check_model(self, spec: ModelSpec):
        super().check_model(spec)
        if self.expand >= spec.vocab or spec.undecided(self.expand) or self.expand in spec.ends:
            raise ValueError(
                f"expand={self.expand} must be an id of the vocabulary [0, {spec.vocab}), neither the mask's "
                f"({spec.mask_id}) nor an end-of-text. DreamOn() needs a model trained to expand by it, "
                "such as Dream-org/DreamOn-v0-7B."
            )

    @property
    @override
    def criterion(self) -> Alg:
        return criterion_of(self.alg)

    @override
    def max_steps(self, layout: Layout) -> int:
        """Each step expands, or unmasks one of the first masks or one that an expansion has made."""
        return 3 * (layout.longest or layout.response)

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The most confident mask, unless it is to expand: it then stays a mask."""
        surest = best(candidates.score, 1)
        return surest & (candidates.token != self.expand)

    @override
    def end_confidence(
        self, candidates: Candidates, logits: Logits, unconstrained: Logits, canvas: Canvas, at_end: bool
    ) -> Float[Array, "b"]:
        """0 where the mask that is next would most likely expand, if it could; else 1."""
        offered = gather(canvas.eligible, candidates.index) & (candidates.index < canvas.layout.length)
        at = jnp.argmax(jnp.where(offered, candidates.score, -jnp.inf), axis=1)
        next_one = jnp.take_along_axis(logits, at[:, None, None], axis=1)
        wanted = argmax(next_one)[:, 0] == self.expand
        return jnp.where(wanted & jnp.any(offered, axis=1), 0.0, 1.0)

    @override
    def resize(self, before: Canvas, after: Canvas, proposal: Proposal) -> Canvas:
        """The canvas with a mask more, or without the end-of-texts of this step."""
        growth = growth_of(after)
        at = jnp.argmax(proposal.score, axis=1).astype(jnp.int32)
        token = jnp.take_along_axis(proposal.token, at[:, None], axis=1)[:, 0]
        took_part = before.active & ~after.done & (jnp.max(proposal.score, axis=1) > -jnp.inf)
        expands = took_part & (token == self.expand)
        stopped = took_part & self._is_full(before) & (growth.confidence == 0)
        growth = growth._replace(wanted_more=growth.wanted_more | stopped)
        grown = insert(dataclasses.replace(growing(after), growth=growth), at, 1, expands)

        # Masks between an end-of-text and the next given text become end-of-text, and all are removed.
        step = before.step[:, None]
        end_of_text, decoded = grown.tokens == grown.spec.eos_id, grown.decoded_at >= 0
        shortens = (took_part & ~expands)[:, None]
        if self.pad_eos_to_right:
            given = grown.valid & ~grown.masked & ~decoded
            padded = grown.masked & (_last(end_of_text & decoded) > _last(given)) & shortens
            grown = dataclasses.replace(
                grown,
                tokens=jnp.where(padded, grown.spec.eos_id, grown.tokens),
                decoded_at=jnp.where(padded, step, grown.decoded_at),
            )
        if not self.delete_eos:
            return grown
        new_end = shortens & (grown.tokens == grown.spec.eos_id) & (grown.decoded_at == step)
        return remove(grown, new_end & grown.valid)

    @override
    def _filtered(self, logits: Logits, canvas: Canvas) -> tuple[Logits, Logits, Bool[Array, "b c v"] | None]:
        """The filters, after the expand token is ruled out where there is no room for another mask."""
        ruled_out = self._is_full(canvas)[:, None, None] & (jnp.arange(logits.shape[-1]) == self.expand)
        return super()._filtered(jnp.where(ruled_out, -jnp.inf, logits.astype(jnp.float32)), canvas)

    def _is_full(self, canvas: Canvas) -> Bool[Array, "b"]:
        """Whether the answer has its largest length, or has expanded as often as it may."""
        growth, layout = growth_of(canvas), canvas.layout
        return (growth.end >= growth.limit) | (growth.insertions >= (layout.longest or layout.response))


def _last(marked: Bool[Array, "b l"]) -> Array:
    """The last marked position up to each one; -1 without any."""
    return jax.lax.cummax(jnp.where(marked, jnp.arange(marked.shape[1]), -1), axis=1)
