"""Values that a sampler gets and returns in a denoising step: candidates, random numbers, its decision.

Draws are indexed by (sequence, its own step, position counted from its first token), so they do not depend on
padding, on the other sequences of the batch or on how many positions are drawn together.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from dllm_jax.nn.keys import typed_key
from dllm_jax.options import shown
from dllm_jax.state.canvas import Canvas, fill_block, keep_block, revoke

# Arrays of a step's candidates: b sequences, c candidates of each, v tokens.
Logits = Float[Array, "b c v"]
Scores = Float[Array, "b c"]
Ids = Int[Array, "b c"]  # tokens or positions


class Candidates(NamedTuple):
    """Positions that may be decoded, each with the token that it would get.

    Attributes:
      index: canvas positions, l = padding.
      token: the candidate token of each.
      score: the sampler's confidence in it, float32; -inf where it may not be decoded.
      logits: those that the confidence was taken from, float32: after temperature only with
        `Sampler.tempered_confidence` and by `EntropyNoise`, and -inf where filters, switches, `forbid`,
        `allow` or constraints rule a token out.
    """

    index: Ids
    token: Ids
    score: Scores
    logits: Logits


class Decision(NamedTuple):
    """Decision of a sampler in one denoising step.

    Attributes:
      chosen: candidates that are decoded; all others stay as they are, unless revoked.
      memory: State for later steps, of the structure that `Sampler.init` returned.
      revoked: candidates whose token becomes a mask again, where the sampler verifies (`Procedure.verifies`,
        `Procedure.drafts`); else None.
      keeps_block: sequences that stay in the block even if nothing in it is masked, where the sampler edits
        (`Procedure.edits`); else None.
      token: Tokens of the chosen candidates; None takes those of the candidates.
      filled: Sequences whose current block is decoded as a whole, and its tokens; None if none is.
    """

    chosen: Bool[Array, "b c"]
    memory: PyTree
    revoked: Bool[Array, "b c"] | None = None
    keeps_block: Bool[Array, "b"] | None = None
    token: Int[Array, "b c"] | None = None
    filled: tuple[Bool[Array, "b"], Int[Array, "b block"]] | None = None

    def tokens_of(self, token: Int[Array, "b c"]) -> Int[Array, "b c"]:
        """The tokens that candidates get, given those that they were proposed with."""
        return token if self.token is None else self.token

    def changes(self, on_canvas: Callable[[Bool[Array, "b c"]], Bool[Array, "b l"]]) -> tuple[Partial, ...]:
        """The changes of the canvas besides the tokens: some are revoked, blocks stay or are filled.

        Args:
          on_canvas: Function that returns the positions of marked candidates.
        """
        changes: tuple[Partial, ...] = ()
        if self.revoked is not None:
            changes += (Partial(revoke, revoked=on_canvas(self.revoked)),)
        if self.keeps_block is not None:
            changes += (Partial(keep_block, stays=self.keeps_block),)
        if self.filled is not None:
            changes += (Partial(fill_block, ends=self.filled[0], tokens=self.filled[1]),)
        return changes


# -- random numbers ---------------------------------------------------------------------------------------


@runtime_checkable
class Noise(Protocol):
    """Source of a sampler's draws at canvas positions `index` (l = padding, value unused)."""

    def token_gumbel(self, canvas: Canvas, index: Int[Array, "b c"], vocab: int) -> Float[Array, "b c v"]:
        """Standard Gumbel noise for every candidate token, float32."""
        ...

    def order_uniform(self, canvas: Canvas, index: Int[Array, "b c"]) -> Float[Array, "b c"]:
        """Uniform [0, 1) noise for each position, float32: for an order, a coin or a token of noise."""
        ...

    def order_gumbel(self, canvas: Canvas, index: Int[Array, "b c"]) -> Float[Array, "b c"]:
        """Standard Gumbel noise that orders positions, float32."""
        ...

    def of_sequences(self, who: Int[Array, "g"]) -> "Noise":
        """The draws of some of the sequences."""
        ...


def noise_of(noise: Noise | None, who: Int[Array, "g"]) -> Noise | None:
    """The draws of some of the sequences; None of a sampler that draws none."""
    return None if noise is None else noise.of_sequences(who)


def require_noise(noise: Noise | None) -> Noise:
    """The noise of a sampler that draws.

    Raises:
      ValueError: there is none.
    """
    if noise is None:
        raise ValueError("the sampler draws random numbers, but there is neither a key nor a recording")
    return noise


class KeyNoise(NamedTuple):
    """Draws from one key per sequence.

    Attributes:
      keys: one per sequence of the batch; draws are those of `typed_key(keys)`.
    """

    keys: Key[Array, "b"]

    def token_gumbel(self, canvas: Canvas, index: Int[Array, "b c"], vocab: int) -> Float[Array, "b c v"]:
        """Standard Gumbel noise from the token stream of each sequence's key."""
        return self._draw(canvas, index, 0, lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))

    def order_uniform(self, canvas: Canvas, index: Int[Array, "b c"]) -> Float[Array, "b c"]:
        """Uniform [0, 1) noise from the order stream of each sequence's key."""
        return self._draw(canvas, index, 1, lambda key: jax.random.uniform(key, (), jnp.float32))

    def order_gumbel(self, canvas: Canvas, index: Int[Array, "b c"]) -> Float[Array, "b c"]:
        """Standard Gumbel noise from the order stream; a sampler takes this or uniform noise, never both."""
        return self._draw(canvas, index, 1, lambda key: jax.random.gumbel(key, (), jnp.float32))

    def of_sequences(self, who: Int[Array, "g"]) -> "KeyNoise":
        """The keys of some of the sequences."""
        return KeyNoise(self.keys[who])

    def _draw(self, canvas: Canvas, index, stream: int, draw):
        # Two streams per step, tokens (0) and their order (1).
        def at(sequence_key, step, position):
            return draw(jax.random.fold_in(jax.random.fold_in(sequence_key, 2 * step + stream), position))

        over_positions = jax.vmap(at, in_axes=(None, None, 0))
        position = index - canvas.first_position[:, None]
        return jax.vmap(over_positions)(typed_key(self.keys), canvas.step, position)


class RecordedNoise(NamedTuple):
    """Draws stored beforehand, e.g. those of a reference implementation.

    Attributes:
      token: Gumbel noise by step, sequence, position and token; a scalar if no token is drawn.
      order: uniform or Gumbel noise by step, sequence and position, whichever the sampler asks for; a scalar
        if it asks for neither.
    """

    token: Float[Array, "t b l v"] | Float[Array, ""]
    order: Float[Array, "t b l"] | Float[Array, ""]

    def check(self, steps: int, batch: int, length: int, vocab: int):
        """Raises ValueError for arrays of other sizes, with too few steps, or not of floats."""
        for name, of_one in (("token", (batch, length, vocab)), ("order", (batch, length))):
            array = getattr(self, name)
            if not isinstance(array, jax.Array | np.ndarray | np.generic):
                raise ValueError(f"noise.{name}={shown(array)} must be an array of floats")
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise ValueError(f"noise.{name} has dtype {array.dtype}; expected floats")
            if array.shape and (array.shape[0] < steps or array.shape[1:] != of_one):
                raise ValueError(
                    f"noise.{name} has shape {array.shape}; expected at least {steps} steps of {of_one}"
                )

    def token_gumbel(self, canvas: Canvas, index: Int[Array, "b c"], vocab: int) -> Float[Array, "b c v"]:
        """The recorded token noise of each sequence's current step."""
        return self._at(self.token, canvas, index)

    def order_uniform(self, canvas: Canvas, index: Int[Array, "b c"]) -> Float[Array, "b c"]:
        """The recorded order noise of each sequence's current step."""
        return self._at(self.order, canvas, index)

    order_gumbel = order_uniform  # whichever was recorded

    def of_sequences(self, who: Int[Array, "g"]) -> "RecordedNoise":
        """The recordings of some of the sequences."""
        return RecordedNoise(*(array[:, who] if array.ndim else array for array in self))

    def _at(self, recorded: Array, canvas: Canvas, index: Int[Array, "b c"]) -> Array:
        if recorded.ndim == 0:
            raise ValueError("the sampler draws numbers that the recorded noise does not hold")
        sequence = jnp.arange(index.shape[0])[:, None]

        # Index l is padding, whose draw nobody uses: it reads that of the last position.
        return recorded[canvas.step[:, None], sequence, jnp.minimum(index, canvas.layout.length - 1)]
