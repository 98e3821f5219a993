"""How many and which positions are decoded in a step (the transfer schedule and the remasking rule)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.canvas import Canvas


def best(priority: Float[Array, "b c"], count: Int[Array, "b"]) -> Bool[Array, "b c"]:
    """The `count` largest of each row, ties to the lower index, never one of -inf."""
    return (ranks(priority) < count[:, None]) & (priority > -jnp.inf)


def ranks(priority: Float[Array, "b c"]) -> Int[Array, "b c"]:
    """Place of each entry when sorted from the largest down, ties to the lower index."""
    return jnp.argsort(jnp.argsort(-priority, axis=1, stable=True), axis=1)


def even_schedule(canvas: Canvas) -> Int[Array, "b"]:
    """LLaDA's schedule: the block's masks spread over its steps, the remainder to the early ones."""
    steps = canvas.layout.steps_per_block
    extra = canvas.block_step < canvas.block_masks % steps
    return canvas.block_masks // steps + extra.astype(jnp.int32)


def passing_prefix(priority: Float[Array, "b c"], factor: float) -> Int[Array, "b"]:
    """Fast-dLLM's factor rule: the largest n with (n + 1)(1 - c_n) < factor, c descending; at least 1."""
    ranked = -jnp.sort(-priority, axis=1)
    n = jnp.arange(1, priority.shape[1] + 1)
    passes = (n + 1) * (1.0 - ranked) < factor
    return jnp.maximum(jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1), 1)


def dream_fractions(steps: int, eps: float) -> np.ndarray:
    """1 - s/t for each step of Dream's time grid linspace(1, eps), float32 [steps]; the last is 1."""
    times = dream_times(steps, eps)
    fractions = np.float32(1) - times[1:] / times[:-1]
    fractions[-1] = 1
    return fractions


def dream_times(steps: int, eps: float) -> np.ndarray:
    """linspace(1, eps, steps + 1) in float32 exactly as torch rounds it.

    Torch builds the grid from both ends towards the middle, each entry one fused multiply-add.
    """
    last = np.float64(np.float32(eps))
    stride = np.float64((np.float32(eps) - np.float32(1)) / np.float32(steps))
    i = np.arange(steps + 1)
    return np.where(i < (steps + 1) // 2, 1 + stride * i, last - stride * (steps - i)).astype(np.float32)
