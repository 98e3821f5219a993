"""One token at a time by causal attention, and drafts that it verifies (Nemotron-Labs-Diffusion)."""

import dataclasses
from typing import Annotated

import jax.numpy as jnp
from annotated_types import Ge, Interval
from jaxtyping import Array, Bool, PyTree
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Int32, refuse
from dllm_jax.samplers.base import Procedure, check_ends_unordered
from dllm_jax.samplers.candidates import Candidates, Decision, Ids, Noise
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import gather
from dllm_jax.state.selection import best
from dllm_jax.traced import Number, Traced, fixed_at


@dataclasses.dataclass(frozen=True)
class LeftToRight(UntilDone):
    """Base of samplers that decode from left to right, whose positions have no order by confidence."""

    def __post_init__(self):
        super().__post_init__()
        check_ends_unordered(self, type(self).__name__)
        reason = "it decodes from left to right, and no masks"
        refuse(self, {"early_commit": reason, "allow_mask_token": reason})


@dataclasses.dataclass(frozen=True)
class Autoregressive(LeftToRight):
    """Decodes one token at a time from left to right, each after all tokens before it.

    Works with `Policy()` on models with blocks and a mask token, in blocks of one token. In a causal context
    (Nemotron-Labs-Diffusion), and with a shifted output head (Fast-dLLM v2), the last token's output predicts
    the next one, as in any autoregressive model. Elsewhere, such as in SDAR, a mask attends to all tokens
    before it. All but Nemotron-Labs-Diffusion were trained with longer blocks.
    """

    @property
    @override
    def procedure(self) -> Procedure:
        return Procedure(block=1)

    @override
    def check_model(self, spec: ModelSpec):
        super().check_model(spec)
        if not spec.context.has_blocks:
            raise ValueError(
                f"sampler=Autoregressive() does not support {spec.family}: its tokens attend to all others. "
                "Use Confidence() with a step per token."
            )

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The block's only token."""
        return candidates.score > -jnp.inf


@dataclasses.dataclass(frozen=True)
class SelfSpeculation(LeftToRight):
    """Drafts a block by denoising it, and keeps what a causal pass would have decoded (arXiv:2607.05722).

    A draft begins with the last token that is known. A causal pass over it accepts its longest prefix that
    autoregressive decoding gives as well, and one token more. So the greedy answer equals that of
    `Autoregressive()`; with a temperature the distribution does, while drafts stay greedy. Works with
    `Policy()` on models with a causal context and a mask token (Nemotron-Labs-Diffusion).

    Of `Stats.causal_passes` the first stores the prompt, and each other one is a verification:
    `accepted_tokens / (causal_passes - 1)` is the number of tokens accepted per verification.

    Attributes:
      block: Positions of a draft, the known token included, at least 2.
      threshold: Confidence from which a token of the draft is unmasked; the most confident one always is. 0
        fills the draft in one pass.
      draft_adapter: Whether the model's LoRA adapters (`dllm_jax.lora.load`) act in drafts alone, as the
        released `linear_spec_lora` does: the answer is then that of the model without them. Otherwise they
        act in all passes.
    """

    block: Annotated[int, Ge(2), Int32()] = 32
    threshold: Annotated[Number, Interval(ge=0, le=1), Traced(unless=0)] = 0.0
    draft_adapter: bool = False

    @property
    @override
    def procedure(self) -> Procedure:
        return Procedure(drafts=True, block=self.block, draft_adapter=self.draft_adapter)

    @override
    def check_model(self, spec: ModelSpec):
        super().check_model(spec)
        if not spec.context.has_causal_passes:
            raise ValueError(
                f"sampler=SelfSpeculation() does not support {spec.family}: it has no causal passes, which "
                "verify a draft. Use Threshold()."
            )

    @override
    def _choose(self, logits, keep, index, canvas: Canvas, noise: Noise | None) -> Ids:
        """The candidate token: the most likely one in a draft, as `temperature` asks in a verification."""
        chosen = super()._choose(logits, keep, index, canvas, noise)
        if fixed_at(self.temperature, 0):
            return chosen
        greedy = dataclasses.replace(self, temperature=0.0)
        drafted = super(SelfSpeculation, greedy)._choose(logits, keep, index, canvas, None)
        return jnp.where(canvas.causal, chosen, drafted)

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """Masks of a draft whose confidence reaches the threshold, and the most confident one in any case."""
        surest = best(candidates.score, 1)
        return surest | (candidates.score >= self.threshold)

    @override
    def decide(self, candidates: Candidates, memory: PyTree, canvas: Canvas, noise: Noise | None) -> Decision:
        """Fills masks of a draft; of a draft that is complete, accepts a prefix and takes back the rest."""
        index, token, _, _ = candidates
        filled = self.transfer(candidates, canvas, noise)

        # From left to right: a token is accepted if the draft agrees with all those before it.
        real = index < canvas.layout.length
        agrees = real & (token == gather(canvas.tokens, index))
        agreed = jnp.cumprod(agrees, axis=1, dtype=jnp.int32)
        before = jnp.pad(agreed, ((0, 0), (1, 0)), constant_values=1)[:, :-1] > 0
        accepted = real & before & (candidates.score > -jnp.inf)
        chosen = jnp.where(canvas.causal, accepted, filled)
        return Decision(chosen, memory, revoked=real & canvas.causal & ~accepted)

    @override
    def finished(self, canvas: Canvas) -> Bool[Array, "b"]:
        """The answer is there once all of it is verified; blocks follow each other by what is accepted."""
        masks = canvas.masked & canvas.response & (canvas.position < canvas.layout.end)
        return ~jnp.any(masks, axis=1) & ~canvas.drafted

    @override
    def max_steps(self, layout: Layout) -> int:
        """A prompt's pass, then the passes of a draft and its verification for each token at worst."""
        drafting = 1 if fixed_at(self.threshold, 0) else self.block - 1
        return 1 + (layout.end - layout.prompt) * (drafting + 1)
