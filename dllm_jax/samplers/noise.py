"""Sources of random numbers: a key, or a recording to replay.

Draws are indexed by (sequence, its own step, distance from the canvas's end), so they do not depend on left
padding, on the other sequences of the batch or on how many positions are drawn together.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from dllm_jax.nn.keys import typed_key
from dllm_jax.options import shown
from dllm_jax.state.canvas import Canvas


@runtime_checkable
class Noise(Protocol):
    """Source of a sampler's draws at canvas positions `index` (l = padding, value unused)."""

    def token_gumbel(self, canvas: Canvas, index: Int[Array, "b c"], vocab: int) -> Float[Array, "b c v"]:
        """Standard Gumbel noise for every candidate token, float32."""
        ...

    def order_uniform(self, canvas: Canvas, index: Int[Array, "b c"]) -> Float[Array, "b c"]:
        """Uniform [0, 1) noise that orders positions, float32."""
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

        # Positions count from the end of the canvas, so that left padding changes no draw.
        over_positions = jax.vmap(at, in_axes=(None, None, 0))
        return jax.vmap(over_positions)(typed_key(self.keys), canvas.step, canvas.layout.length - index)


class RecordedNoise(NamedTuple):
    """Draws stored beforehand, e.g. those of a reference implementation.

    Attributes:
      token: Gumbel noise by step, sequence, position and token; a scalar if no token is drawn.
      order: uniform or Gumbel noise, whichever the sampler asks for; a scalar if no order is drawn.
    """

    token: Float[Array, "t b l v"] | Float[Array, ""]
    order: Float[Array, "t b l"] | Float[Array, ""]

    def check(self, steps: int, batch: int, length: int, vocab: int):
        """Raises ValueError if the recording is of other sequences, another canvas or model, or too short."""
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
