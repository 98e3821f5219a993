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
from dllm_jax.policies.base import Policy, halvings
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.traced import Count

RefreshInterval = Annotated[TracedPositiveInt | None, NoneMeans("never")]  # denoising steps of a block


@dataclasses.dataclass(frozen=True)
class Delayed(Policy):
    """Base of Decode and PD: K/V of decoded tokens are reused, starting `delay` steps after decoding.

    Attributes:
      refresh_every: refresh at in-block steps 0, n, 2n, ...; None: at 0 only. The paper takes 8 for LLaDA and
        4 for Dream.
      delay: steps for which a decoded token is still recomputed; 0 is the paper's ablation (figure 3).
      shift: for a shifted head. "un" reuses position p once token p + 1 is decoded (the paper's main
        results), "un_right" once tokens p and p + 1 are (its most accurate).
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

    def unsettled(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Positions not reused yet: their tokens are masked, or were decoded in the last `delay` steps.

        The last position of a shifted head predicts nothing. It is reused after the first `delay` steps of a
        block ("un"), whether or not its own token is decoded, or together with its neighbour ("un_right").
        """
        tokens = canvas.masked | canvas.decoded_within(self.delay)
        if not canvas.spec.shifted:
            return tokens

        # Appendix B: position p is recomputed while the token it predicts, p + 1, is not settled.
        predictors, last = canvas.predicting_positions(tokens), canvas.position == canvas.layout.length - 1
        if self.shift == "un":
            return predictors | (last & (canvas.block_step <= self.delay)[:, None])

        # "un_right": also while its own token is not settled; the last position goes with its left neighbour.
        both = predictors | tokens
        return both | (last & jnp.roll(both, 1, axis=1))


@dataclasses.dataclass(frozen=True)
class DKVDecode(Delayed):
    """Reuses K/V of everything decoded, the prompt included; a refresh recomputes the canvas (eq. 8).

    Attributes: see `Delayed`.

    Exact limit: refresh_every=1.
    Departures: the shift "right" is left out (the reference drops positions it still needs). Batches and
      padding work throughout, blocks also with a shifted head.
    """

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything at a refresh, else the positions that are not settled."""
        return self.refreshes(canvas) | self.unsettled(canvas)


@dataclasses.dataclass(frozen=True)
class DKVPD(Delayed):
    """As `DKVDecode`, but a refresh leaves the prompt out (prefill and decoding disaggregated).

    Attributes: see `Delayed`; refresh_every is 4 in the paper.

    Exact limit: one step in all. refresh_every=1 is `DKVPrefill`; without a prompt it is `DKVDecode`.
    Departures: as for `DKVDecode`; and the reference has Dream only.
    """

    refresh_every: RefreshInterval = 4

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in the first step; then the response at a refresh, else the positions not settled."""
        return canvas.first_step | (self.refreshes(canvas) & canvas.response_inputs) | self.unsettled(canvas)


def interval(canvas: Canvas, every: Count | None) -> Bool[Array, "b 1"]:
    """Whether the coming step is the first of its block, or a multiple of `every` steps after it."""
    return canvas.block_begins if every is None else (canvas.block_step % every == 0)[:, None]
