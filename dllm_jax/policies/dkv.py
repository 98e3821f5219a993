"""dKV-Cache for any decoding order: Decode and PD (arXiv:2505.15781, section 3.3).

K/V of a token change most in the step after it was decoded, when its input is no longer [MASK]; so they are
cached one step late. A shifted head is treated as in the paper's appendix B.
"""

import dataclasses
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NoneMeans, TracedNonNegativeInt, TracedPositiveInt
from dllm_jax.policies.base import BY_DECIDED, Policy, halvings, with_mask_token
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.traced import Count

RefreshInterval = Annotated[TracedPositiveInt | None, NoneMeans("never")]  # denoising steps of a block


@dataclasses.dataclass(frozen=True)
class DKV(Policy):
    """Base of `DKVDecode` and `DKVPD`: caches unmasked tokens `delay` steps after they are unmasked.

    Attributes:
      refresh_every: Steps between refreshes, counted within a block; None refreshes at its first step.
        Without a shifted output head the `delay` steps after that refresh, too. The paper uses 8 for LLaDA
        and 4 for Dream.
      delay: Steps for which an unmasked token is still recomputed. 0 caches keys and values that belong to
        the masked token (the ablation of figure 3).
      shift: Condition for caching a position p with a shifted output head. "un": token p + 1 is unmasked (the
        paper's main results). "un_right": tokens p and p + 1 are unmasked (its most accurate).
    """

    refresh_every: RefreshInterval = 8
    delay: TracedNonNegativeInt = 1
    shift: Literal["un", "un_right"] = "un"

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        if self.shift != "un" and not spec.shifted:
            raise ValueError(f"shift={self.shift!r} is for models whose head is shifted, not {spec.family}")
        return super().init(spec, layout, batch, dtype)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The response, a half and a quarter of it, and one more for a shifted head.

        Masks become fewer step by step, so narrower ones would save 3 % of what is computed.
        """
        return (*halvings(layout.response, smallest=16)[-3:], layout.response_inputs(spec.shifted))

    def refreshes(self, canvas: Canvas) -> Bool[Array, "b 1"]:
        """At the interval; without a shifted head, also in the `delay` steps after a block's first.

        The reference for LLaDA caches nothing until the delay has passed; the one for Dream does.
        """
        settling = (canvas.block_step <= self.delay)[:, None] & (not canvas.spec.shifted)
        return interval(canvas, self.refresh_every) | settling

    def pending(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Positions not reused yet: their tokens are masked, or were decoded in the last `delay` steps.

        The last position of a shifted head predicts nothing. It is reused after the first `delay` steps of a
        block ("un"), whether or not its own token is decoded, or together with its neighbor ("un_right").
        """
        tokens = canvas.masked | canvas.decoded_within(self.delay)
        if not canvas.spec.shifted:
            return tokens

        # Appendix B: position p is recomputed while the token it predicts, p + 1, is pending.
        predictors, last = canvas.predicting_positions(tokens), canvas.position == canvas.layout.length - 1
        if self.shift == "un":
            return predictors | (last & (canvas.block_step <= self.delay)[:, None])

        # "un_right": also while its own token is pending; the last position goes with its left neighbor.
        both = predictors | tokens
        return both | (last & jnp.roll(both, 1, axis=1))

    _in_blocks = with_mask_token(BY_DECIDED)


@dataclasses.dataclass(frozen=True)
class DKVDecode(DKV):
    """Caches the prompt and all unmasked tokens one step after they are unmasked (dKV-Cache-Decode).

    Use it in one long block or with a fixed schedule. It recomputes every masked token, so it suits responses
    of up to some hundred tokens.

    A refresh recomputes the canvas (equation 8).

    Memory: Dense keys and values for all positions.

    Limits: With a shifted output head (Dream) and long blocks, use shift="un_right".

    Equals exact decoding when: refresh_every=1.
    Differences: The shift "right" is left out, because the reference drops positions that it still needs.
      Batches and padding work, and so do blocks with a shifted output head.
    """

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything at a refresh, else the positions that are pending."""
        return self.refreshes(canvas) | self.pending(canvas)


@dataclasses.dataclass(frozen=True)
class DKVPD(DKV):
    """Caches the prompt for the whole response, and unmasked tokens as `DKVDecode` does (dKV-Cache-PD).

    With a shifted output head the last prompt token counts as response, because it predicts its first token.

    Use it with long prompts: refreshes recompute the response only, so there it computes fewer tokens than
    `DKVDecode`.

    Memory: Dense keys and values for all positions.

    Limits: The cached prompt never sees generated tokens. With a shifted output head and blocks of 8 or more,
    use shift="un_right". The paper uses refresh_every=4.

    Equals exact decoding when: the response takes one step. With refresh_every=1 it equals `DKVPrefill`;
      without a prompt it equals `DKVDecode` with the same options.
    Differences: As for `DKVDecode`. The reference supports Dream only.
    """

    refresh_every: RefreshInterval = 4

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in the first step; then the response at a refresh, else the pending positions."""
        return canvas.first_step | (self.refreshes(canvas) & canvas.response_inputs) | self.pending(canvas)


def interval(canvas: Canvas, every: Count | None) -> Bool[Array, "b 1"]:
    """Whether the coming step is the first of its block, or a multiple of `every` steps after it."""
    return canvas.block_begins if every is None else (canvas.block_step % every == 0)[:, None]
