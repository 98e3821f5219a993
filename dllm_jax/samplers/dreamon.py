"""DreamOn: infilling whose length follows two tokens of the model (arXiv:2602.01326)."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, refuse
from dllm_jax.samplers.base import Alg
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.samplers.dream import criterion_of
from dllm_jax.samplers.noise import Noise
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.resizing import growth_of, insert, remove
from dllm_jax.state.rows import gather
from dllm_jax.state.selection import best
from dllm_jax.xla.reductions import argmax


@dataclasses.dataclass(frozen=True)
class DreamOn(UntilDone):
    """Unmasks the most confident mask of a template; its token may expand the answer or end it (DreamOn).

    Use it with DreamOn's weights, where the number of missing tokens is not known:
    `infill(model, prefix + 8 * [mask] + suffix, max_length=64, sampler=DreamOn())`.
    A mask that takes the expand token becomes two masks. One that takes end-of-text is removed, with all
    masks after it up to the next given text. At most `max_length` tokens take the place of the masks, after
    at most as many expansions; then the expand token is ruled out.

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
    grows: ClassVar[bool] = True
    shortens: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        reasons = {
            "cfg_scale": "infilling has no prompt to guide by",
            "early_commit": "an answer is settled once its length is",
            "delay_eos": "an end-of-text ends what is missing",
            "allow_mask_token": "a mask that stays would be chosen for ever",
        }
        refuse(self, reasons)

    @override
    def check_model(self, spec: ModelSpec):
        super().check_model(spec)
        if self.expand >= spec.vocab or self.expand in (spec.mask_id, *spec.ends):
            raise ValueError(
                f"expand={self.expand} must be an id of the vocabulary [0, {spec.vocab}), neither the mask's "
                f"({spec.mask_id}) nor an end-of-text: the model has learned to expand by it"
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
        self,
        candidates: Candidates,
        logits: Float[Array, "b c v"],
        unconstrained: Float[Array, "b c v"],
        canvas: Canvas,
        at_end: bool,
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
        grown = insert(dataclasses.replace(after, growth=growth), at, 1, expands)

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
        return remove(
            grown, shortens & (grown.tokens == grown.spec.eos_id) & (grown.decoded_at == step) & grown.valid
        )

    @override
    def _filtered(
        self, logits: Float[Array, "b c v"], canvas: Canvas
    ) -> tuple[Float[Array, "b c v"], Float[Array, "b c v"], Bool[Array, "b c v"] | None]:
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
