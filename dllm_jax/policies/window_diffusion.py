"""Window-Diffusion: a window of masks is read, the rest of them left out (arXiv:2601.20332).

Masks far behind the tokens that are being decoded add little to them, and are most of a long response: they
leave the network and attention until the next refresh.
"""

import dataclasses
from typing import Any

from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.nn.mask import require_full_attention
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, TracedPositiveInt
from dllm_jax.policies.base import Policy, halvings
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.selection import leftmost


@dataclasses.dataclass(frozen=True)
class WindowDiffusion(Policy):
    """Recomputes the first masks and the recently decoded, which read a window of masks and what is decoded.

    A refresh recomputes the canvas, and may decode anywhere. In the steps until the next one, its phase, only
    the `active` leftmost masks are computed and decoded, and the tokens that the phase has decoded. They
    attend to the prompt, to what was decoded when the refresh had ended, and to the `window` leftmost masks
    that were left then. An active mask behind the window is read by nobody, itself included.

    Exact limit: refresh_every=1.
    Departures: batches, padding and a shifted head work, for which the positions that predict the active
    masks are computed too; blocks limit what is decoded, the paper has one. A schedule that wants more tokens
    than there are active masks waits for them; the reference decodes known tokens once more.

    Attributes:
      window: masks that are read until the next refresh; as many as the response has leave nothing out.
      active: masks that are computed, and may be decoded, between refreshes.
      refresh_every: steps of a phase, its refresh included.
    """

    window: TracedPositiveInt = 64
    active: PositiveInt = 16
    refresh_every: TracedPositiveInt = 32

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """Dense K and V."""
        require_full_attention(spec, "WindowDiffusion", "drops masks far behind, which others read")
        return super().init(spec, layout, batch, dtype)

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything at a refresh, else the active masks and what the phase has decoded."""
        active, refreshed = leftmost(canvas.masked, self.active), self.refreshed_at(canvas)
        # The first partial step renews what the refresh has decoded, later ones what partial steps have.
        later = canvas.step[:, None] > refreshed + 1
        decoded = canvas.decoded_at >= refreshed + later
        return (
            canvas.every_n_steps(self.refresh_every) | active | canvas.predicting_positions(active) | decoded
        )

    @override
    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything at a refresh, else all but the masks behind the window, as the refresh has left them."""
        # What partial steps have decoded was masked when the refresh had ended.
        masked = canvas.masked | (canvas.decoded_at > self.refreshed_at(canvas))
        return canvas.every_n_steps(self.refresh_every) | ~masked | leftmost(masked, self.window)

    @override
    def eligible(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Every mask at a refresh, else the active ones."""
        return canvas.eligible & (
            canvas.every_n_steps(self.refresh_every) | leftmost(canvas.masked, self.active)
        )

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """From twice the active masks on, doubled up to three times: the phase's tokens come one by one."""
        return halvings(layout.response_inputs(spec.shifted), smallest=2 * self.active)[:4]

    def refreshed_at(self, canvas: Canvas) -> Int[Array, "b 1"]:
        """The step with which each sequence's phase began."""
        return (canvas.step - canvas.step % self.refresh_every)[:, None]
