"""Candidates that a denoising step may unmask, and the decision of a sampler about them."""

from collections.abc import Callable
from typing import NamedTuple

from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.state.changes import keep_block, revoke


class Candidates(NamedTuple):
    """Positions that may be decoded, each with the token that it would get.

    Attributes:
      index: canvas positions, l = padding.
      token: the candidate token of each.
      score: the sampler's confidence in it, float32; -inf where it may not be decoded.
      logits: those that the confidence was taken from, float32: after temperature only where the sampler says
        so (`Sampler.tempered_confidence`), and -inf where filters and switches rule a token out.
    """

    index: Int[Array, "b c"]
    token: Int[Array, "b c"]
    score: Float[Array, "b c"]
    logits: Float[Array, "b c v"]


class Decision(NamedTuple):
    """Decision of a sampler in one denoising step.

    Attributes:
      chosen: candidates that are decoded; all others stay masked.
      memory: State for later steps, of the structure that `Sampler.init` returned.
      revoked: candidates whose token becomes a mask again, where the sampler verifies (`Sampler.verifies`);
        else None.
      keeps_block: sequences that stay in the block even if nothing in it is masked, where the sampler edits
        (`Sampler.edits`); else None.
      token: Tokens of the chosen candidates; None takes those of the candidates.
    """

    chosen: Bool[Array, "b c"]
    memory: PyTree
    revoked: Bool[Array, "b c"] | None = None
    keeps_block: Bool[Array, "b"] | None = None
    token: Int[Array, "b c"] | None = None

    def tokens_of(self, token: Int[Array, "b c"]) -> Int[Array, "b c"]:
        """The tokens that candidates get, given those that they were proposed with."""
        return token if self.token is None else self.token

    def changes(self, on_canvas: Callable[[Bool[Array, "b c"]], Bool[Array, "b l"]]) -> tuple[Partial, ...]:
        """The changes of the canvas besides the tokens: some are revoked, or sequences stay in the block.

        Args:
          on_canvas: Function that returns the positions of marked candidates.
        """
        changes: tuple[Partial, ...] = ()
        if self.revoked is not None:
            changes += (Partial(revoke, revoked=on_canvas(self.revoked)),)
        if self.keeps_block is not None:
            changes += (Partial(keep_block, stays=self.keeps_block),)
        return changes
