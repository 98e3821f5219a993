"""Rotary position embedding (RoPE): tables of angles, and the rotation of queries and keys.

Positions are those of the canvas, padding counted: attention sees differences of positions alone. NTK scaling
(`load(.., rope_factor=)`) changes `ModelSpec.rope_base`, nothing here.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class Rope(NamedTuple):
    """Rotary tables of every canvas position: cos and sin, float32 [l+1, d/2]; the last entry is padding."""

    cos: Float[Array, "l half"]
    sin: Float[Array, "l half"]


def rope_table(positions: int, width: int, base: float) -> Rope:
    """Angles position * base^(-2j/d), computed in float32 as the references do; d is the rotated width."""
    # Frequencies by the host's float32 power, whose bits are those of the references. XLA's differ in the
    # last ones, which thousands of positions away is an angle off by 1e-4 (and LLaDA-V's logits by 1e-3).
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    frequency = np.float32(1) / np.float32(base) ** exponent
    # One angle more than there are positions: padding has the position l, and reads the last line.
    angle = jnp.arange(positions + 1, dtype=jnp.float32)[:, None] * frequency
    return Rope(jnp.cos(angle), jnp.sin(angle))


def rotate(
    x: Float[Array, "b q h d"], rope: Rope, index: Int[Array, "b q"], in_f32: bool
) -> Float[Array, "b q h d"]:
    """Rotates the half-split pairs (j, j + d/2) of each head by the angle of its position.

    Of a head that is wider than the tables' d, the beginning is rotated and the rest passes (LLaDA2).

    Args:
      x: queries or keys.
      rope: tables from `rope_table`.
      index: canvas position of each query or key.
      in_f32: rotate in float32 and cast back (LLaDA), or cast the tables to x's dtype first (Dream).
    """
    compute = jnp.dtype(jnp.float32) if in_f32 else x.dtype
    cos = rope.cos[index][:, :, None].astype(compute)
    sin = rope.sin[index][:, :, None].astype(compute)

    # Pairs are half a head apart (GPT-NeoX's order), as in the checkpoints of LLaDA and Dream.
    width = 2 * rope.cos.shape[-1]
    first, second = jnp.split(x[..., :width].astype(compute), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    rest = [x[..., width:].astype(compute)] if width < x.shape[-1] else []
    return jnp.concatenate([*turned, *rest], axis=-1).astype(x.dtype)
