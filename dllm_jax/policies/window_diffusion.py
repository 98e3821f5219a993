"""Window-Diffusion: a window of masks is read, the rest of them left out (arXiv:2601.20332).

Masks far after the tokens that are being decoded add little to them, and are most of a long response: they
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
    """Limits attention to a window of masks, and computation to the first masks and recent tokens.

    Use it for long responses in one block.

    A refresh is a full step and may unmask anywhere. Until the next refresh only the `active` leftmost masks
    and the tokens unmasked since are computed, in the first step those that the refresh unmasked. They attend
    to all positions that were not masked when the refresh ended, and to the first `window` that were.

    Memory: Dense keys and values for all positions.

    Limits: Windows of 8 masks or fewer lost accuracy on the bundled models, and 16 on `tiny-llada`. With
    `Threshold` and 8 masks fewer than 3% of the answers were right.

    Equals exact decoding when: refresh_every=1.
    Differences: Batches, padding and a shifted output head work; the positions that predict the active masks
      are computed too. Blocks limit the tokens to unmask; the paper has one block. A schedule that wants more
      tokens than there are active masks waits for them, where the reference unmasks known tokens once more.

    Attributes:
      window: Number of masks attended to until the next refresh.
      active: Number of masks computed, and eligible to be unmasked, between refreshes.
      refresh_every: Number of steps from one refresh to the next.
    """

    window: TracedPositiveInt = 64
    active: PositiveInt = 16
    refresh_every: TracedPositiveInt = 32

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """Dense K and V."""
        require_full_attention(
            spec,
            "WindowDiffusion",
            "drops masks after the block, which are not attended to there",
            "Use Policy()",
        )
        return super().init(spec, layout, batch, dtype)

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Selects everything at a refresh, else the active masks and the tokens unmasked since."""
        active, refreshed = leftmost(canvas.masked, self.active), self.refreshed_at(canvas)
        # The first partial step renews what the refresh has decoded, later ones what partial steps have.
        later = canvas.step[:, None] > refreshed + 1
        decoded = canvas.decoded_at >= refreshed + later
        return (
            canvas.every_n_steps(self.refresh_every) | active | canvas.predicting_positions(active) | decoded
        )

    @override
    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Limits attention to all positions but the masks after the window, except at a refresh."""
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
        """From at most twice the active masks on, doubled up to three times: tokens come one by one."""
        return halvings(layout.response_inputs(spec.shifted), smallest=2 * self.active)[:4]

    def refreshed_at(self, canvas: Canvas) -> Int[Array, "b 1"]:
        """The step with which each sequence's phase began."""
        return (canvas.step - canvas.step % self.refresh_every)[:, None]
