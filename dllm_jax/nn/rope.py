"""Rotary position embedding (RoPE): tables of angles, and the rotation of queries and keys.

Positions are those of the canvas, padding counted: attention sees differences of positions alone. NTK scaling
(`load(.., rope_factor=)`) changes `ModelSpec.rope_base`, nothing here; linear scaling and YaRN are
`ModelSpec.rope_scaling`.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.spec import ModelSpec, RopeScaling


class Rope(NamedTuple):
    """Rotary tables of every canvas position; the last entry is padding.

    Attributes:
      cos: float32 [l+1, d/2].
      sin: the same.
      first: Canvas position of each sequence's first token, from which queries that grow count theirs
        (`RopeScaling.query_beta`). None where no sequence is padded.
      full: Cos and sin of layers that attend to everything, in models whose others have a window.
    """

    cos: Float[Array, "l half"]
    sin: Float[Array, "l half"]
    first: Int[Array, "b"] | None = None
    full: tuple[Float[Array, "l half"], Float[Array, "l half"]] | None = None

    def of(self, spec: ModelSpec) -> "Rope":
        """The tables of a layer (`ModelSpec.at`)."""
        if self.full is None:
            return self
        return self._replace(full=None) if spec.window is not None else Rope(*self.full, self.first)

    def padded(self, valid: Bool[Array, "b l"] | None, spec: ModelSpec) -> "Rope":
        """The same tables for sequences with this padding; themselves where no query grows."""
        if valid is None or spec.rope_scaling is None or not spec.rope_scaling.query_beta:
            return self
        return self._replace(first=jnp.argmax(valid, axis=1).astype(jnp.int32))


def rope_of(spec: ModelSpec, positions: int) -> Rope:
    """The rotary tables of a model for so many positions."""
    rope = rope_table(positions, spec.rotated, spec.rope_base, spec.rope_scaling)
    if (gemma := spec.gemma) is None:
        return rope
    full = rope_table(positions, gemma.head_dim, gemma.rope_base, turned=gemma.rope_width // 2)
    return rope._replace(full=(full.cos, full.sin))


def rope_table(
    positions: int, width: int, base: float, scaling: RopeScaling | None = None, turned: int | None = None
) -> Rope:
    """Angles position * base^(-2j/d), computed in float32 as the references do; d is the rotated width.

    Of the pairs, the first `turned` have an angle and the others none; None turns all.
    """
    turns = frequencies(width, base, scaling)
    if turned is not None:
        turns = np.where(np.arange(len(turns)) < turned, turns, np.float32(0))
    # One angle more than there are positions: padding has the position l, and reads the last line.
    angle = jnp.arange(positions + 1, dtype=jnp.float32)[:, None] * turns
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling is None or (factor := attention_factor(scaling)) == 1:
        return Rope(cos, sin)
    # Queries and keys both grow, so attention's logits do by the square.
    return Rope(np.float32(factor) * cos, np.float32(factor) * sin)


def frequencies(width: int, base: float, scaling: RopeScaling | None) -> Float[np.ndarray, "half"]:
    """The angle per position of each pair of a head, in float32."""
    # Frequencies by the host's float32 power, whose bits are those of the references. XLA's differ in the
    # last ones, which thousands of positions away is an angle off by 1e-4 (and LLaDA-V's logits by 1e-3).
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    period = np.float32(base) ** exponent
    unit = np.float32(1)
    if scaling is None:
        return unit / period
    factor = np.float32(scaling.factor)
    if scaling.kind == "linear":
        return unit / period / factor
    # YaRN (arXiv:2309.00071): dimensions that turn often within the original context keep their frequency,
    # those that turn less than `beta_slow` times are divided by the factor, a ramp lies between them.
    low, high = _ramp_of_yarn(width, base, scaling)
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    return unit / (factor * period) * ramp + unit / period * (unit - ramp)


def _ramp_of_yarn(width: int, base: float, scaling: RopeScaling) -> tuple[float, float]:
    """The dimensions where YaRN's ramp begins and ends."""
    assert scaling.original is not None, "checked by RopeScaling"
    bounds = []
    for rotations in (scaling.beta_fast, scaling.beta_slow):
        turns = scaling.original / (2 * math.pi * rotations)
        bounds.append(width * math.log(turns) / (2 * math.log(base)))
    low, high = bounds
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    return low, high + 0.001 if low == high else high


def attention_factor(scaling: RopeScaling) -> float:
    """The number that multiplies cos and sin: 1 of linear scaling, of YaRN its given or its own one."""
    if scaling.kind == "linear":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    grown = lambda scale: 1.0 if scaling.factor <= 1 else 0.1 * scale * math.log(scaling.factor) + 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return grown(scaling.mscale) / grown(scaling.mscale_all_dim)
    return grown(1.0)


def grown(
    q: Float[Array, "b q h d"], rope: Rope, index: Int[Array | np.ndarray, "b q"], scaling: RopeScaling | None
) -> Float[Array, "b q h d"]:
    """Queries, multiplied by what their position in the sequence asks for (`RopeScaling.query_beta`)."""
    if scaling is None or not scaling.query_beta:
        return q
    assert scaling.original is not None, "checked by RopeScaling"
    # Positions count from the first token, unlike those of RoPE, of which differences alone are seen.
    position = jnp.asarray(index) if rope.first is None else index - rope.first[:, None]
    beyond = (jnp.maximum(position, 0) // scaling.original).astype(jnp.float32)
    factor = 1 + np.float32(scaling.query_beta) * jnp.log1p(beyond)
    return q * factor[:, :, None, None].astype(q.dtype)


def rotate(
    x: Float[Array, "b q h d"], rope: Rope, index: Int[Array | np.ndarray, "b q"], in_f32: bool
) -> Float[Array, "b q h d"]:
    """Rotates the half-split pairs (j, j + d/2) of each head by the angle of its position.

    Of a head that is wider than the tables' d, the beginning is rotated and the rest passes (LLaDA2).

    Args:
      x: queries or keys.
      rope: tables from `rope_table`.
      index: Canvas position of each query or key; consecutive ones if they are on the host.
      in_f32: rotate in float32 and cast back (LLaDA), or cast the tables to x's dtype first (Dream).
    """
    compute = jnp.dtype(jnp.float32) if in_f32 else x.dtype
    lines: Any = index
    if isinstance(index, np.ndarray):
        lines = (None, slice(int(index[0, 0]), int(index[0, -1]) + 1))
    cos = rope.cos[lines][:, :, None].astype(compute)
    sin = rope.sin[lines][:, :, None].astype(compute)

    # Pairs are half a head apart (GPT-NeoX's order), as in the checkpoints of LLaDA and Dream.
    width = 2 * rope.cos.shape[-1]
    first, second = jnp.split(x[..., :width].astype(compute), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    rest = [x[..., width:].astype(compute)] if width < x.shape[-1] else []
    return jnp.concatenate([*turned, *rest], axis=-1).astype(x.dtype)
