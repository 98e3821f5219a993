"""Scores prompt positions by the attention of selected queries."""

import abc
import dataclasses
from typing import Annotated, ClassVar

import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.eviction.heads import Evidence
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import Mask
from dllm_jax.options import Odd, Options, PositiveInt, TracedPositiveInt
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows
from dllm_jax.traced import Count, Traced


@dataclasses.dataclass(frozen=True)
class Voters(Options, abc.ABC):
    """The positions whose attention decides which KV pairs are retained."""

    of_prompt: ClassVar[bool] = False
    """Whether they are positions of the prompt, which steps of a block-causal model's later blocks lack."""

    @abc.abstractmethod
    def voters(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """The positions whose queries vote."""

    def score(self, votes: Float[Array, "b k p"], canvas: Canvas) -> Float[Array, "b k p"]:
        """The score by which positions are ranked, from the summed votes; by default the votes themselves.

        Not asked by `MAGE`, nor by `EvictPrompt` and `MaskKV` with reselect=True on block-causal models.
        """
        return votes


@dataclasses.dataclass(frozen=True)
class MaskVotes(Voters):
    """MaskKV, equation 7: the masked positions."""

    @override
    def voters(self, canvas: Canvas) -> Bool[Array, "b l"]:
        return canvas.masked


@dataclasses.dataclass(frozen=True)
class PredictingVotes(Voters):
    """The positions that predict the masked ones: these themselves, with a shifted head those before them.

    Ours: equation 7 counts the attention of masks, but a shifted head's logits of the first masked position
    come from the last prompt position, which is no mask, so its attention is ignored
    (docs/policies/index.md).
    """

    @override
    def voters(self, canvas: Canvas) -> Bool[Array, "b l"]:
        return canvas.predicting_positions(canvas.masked)


@dataclasses.dataclass(frozen=True)
class PromptVotes(Voters):
    """The prompt itself."""

    of_prompt: ClassVar[bool] = True

    @override
    def voters(self, canvas: Canvas) -> Bool[Array, "b l"]:
        return canvas.prompt


@dataclasses.dataclass(frozen=True)
class AllVotes(Voters):
    """All positions."""

    @override
    def voters(self, canvas: Canvas) -> Bool[Array, "b l"]:
        return canvas.valid


@dataclasses.dataclass(frozen=True)
class PositionVotes(Voters):
    """One quarter of the masked positions, in order of position (MaskKV, Table 8).

    Attributes:
      quarter: 0 to 3; if they do not divide by four, the first quarters have one more.
    """

    quarter: Annotated[Count, Interval(ge=0, le=3), Traced()] = 3

    @override
    def voters(self, canvas: Canvas) -> Bool[Array, "b l"]:
        # The masks' ranks from left to right; the first (masks mod 4) quarters are one longer.
        rank = jnp.cumsum(canvas.masked, axis=1) - 1
        size, longer = jnp.divmod(jnp.sum(canvas.masked, axis=1, keepdims=True), 4)
        begins = lambda quarter: quarter * size + jnp.minimum(quarter, longer)
        return canvas.masked & (rank >= begins(self.quarter)) & (rank < begins(self.quarter + 1))


@dataclasses.dataclass(frozen=True)
class MiddleVote(Voters):
    """The mask nearest to the middle of the masks' range, of two the left one (HERALD, arXiv:2606.21633)."""

    @override
    def voters(self, canvas: Canvas) -> Bool[Array, "b l"]:
        position, length = canvas.position, canvas.layout.length
        first = jnp.min(jnp.where(canvas.masked, position, length), axis=1, keepdims=True)
        last = jnp.max(jnp.where(canvas.masked, position, 0), axis=1, keepdims=True)
        distance = jnp.where(canvas.masked, jnp.abs(2 * position - first - last), 2 * length)
        return canvas.masked & (position == jnp.argmin(distance, axis=1)[:, None])


@dataclasses.dataclass(frozen=True)
class SnapKV(Voters):
    """SnapKV (arXiv:2404.14469): the last prompt positions, votes averaged over neighboring positions.

    The window itself ranks first; of a window larger than the budget, the beginning stays.

    Attributes:
      window: prompt positions that vote, counted from the prompt's end.
      kernel: positions to average over, odd.
    """

    window: TracedPositiveInt = 32
    kernel: Annotated[PositiveInt, Odd()] = 5

    of_prompt: ClassVar[bool] = True

    @override
    def voters(self, canvas: Canvas) -> Bool[Array, "b l"]:
        return canvas.prompt & (canvas.position >= canvas.layout.prompt - self.window)

    @override
    def score(self, votes: Float[Array, "b k p"], canvas: Canvas) -> Float[Array, "b k p"]:
        """The mean over the voters, pooled over neighbors; positions of the window rank first."""
        # The mean over the window's queries. Votes for the window itself do not count.
        width = votes.shape[-1]
        window = jnp.arange(width) >= width - self.window
        voters = jnp.sum(self.voters(canvas), axis=1)[:, None, None]
        votes = jnp.where(window, 0.0, votes / jnp.maximum(voters, 1))

        # Average pooling with stride 1 and zero padding, always divided by the kernel, as in kvpress.
        # Neighbors further away than the prompt is long are all padding.
        side = min(self.kernel // 2, max(width - 1, 0))
        padded = jnp.pad(votes, ((0, 0), (0, 0), (side, side)))
        pooled = sum(padded[..., i : i + width] for i in range(2 * side + 1)) / self.kernel

        # The window gets the largest score + 1 and so stays, ties to the lower position.
        largest = jnp.max(jnp.where(window, 0.0, pooled), axis=(1, 2), keepdims=True)
        return jnp.where(window, largest + 1, pooled)


def voters_among(voter: Voters, canvas: Canvas, among: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
    """The positions that vote among some of the canvas, such as a block, where they have their ranks."""
    part: Canvas = dataclasses.replace(canvas, valid=canvas.valid & among)
    return voter.voters(part) & part.valid


def evidence(
    voter: Voters,
    layer: Layer,
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: Mask | None,
    rows: Rows,
    canvas: Canvas,
    among: Bool[Array, "b l"] | None = None,
) -> Evidence:
    """Votes for the prompt positions, and how much each KV head prefers the prompt.

    Args:
      voter: decides whose attention counts.
      layer: the layer whose attention it is.
      q: rotated queries of the computed positions.
      k: rotated keys of all positions, in canvas order.
      lse: log-sum-exp of these queries' attention to the keys.
      mask: Keys that may be attended to; None for all.
      rows: the computed positions; votes count where all voters are among them.
      canvas: state before the step.
      among: positions that may vote, as those of the prompt always may (`Voters.of_prompt`), and masks that
        count; None for all.

    Returns:
      `Voters.score` of the votes, summed over the voters and averaged over the query heads of a KV head, -inf
      at padding; and P_h of equation 14, the masked queries' attention to the prompt over that to prompt and
      masked positions.
    """
    p = canvas.layout.prompt

    # Equation 7: attention that each key receives, summed over the queries in `who`. The softmax runs over
    # prompt and response together (equation 6): the log-sum-exp is that of the step's own attention.
    def received(who: Bool[Array, "b l"]) -> Float[Array, "b k l"]:
        weight = (rows.take(who) & rows.real).astype(jnp.float32)
        return layer.received(q, k, lse, weight, mask) * (k.shape[2] / q.shape[2])

    # Equation 14: S_mp and S_mm, what masked queries give to the prompt and to masked positions.
    masked = canvas.masked if among is None else canvas.masked & among
    voters = voter.voters(canvas) if among is None or voter.of_prompt else voters_among(voter, canvas, among)
    from_masks = received(masked)
    to_prompt = jnp.sum(from_masks[..., :p], axis=-1)
    to_masks = jnp.sum(jnp.where(masked[:, None, p:], from_masks[..., p:], 0.0), axis=-1)
    preference = to_prompt / jnp.maximum(to_prompt + to_masks, 1e-30)

    # Padding ranks last, also if it received attention.
    given = from_masks if type(voter) is MaskVotes else received(voters)
    votes = voter.score(given[..., :p], canvas)
    return Evidence(jnp.where(canvas.prompt[:, None, :p], votes, -jnp.inf), preference)
