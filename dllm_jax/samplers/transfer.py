"""How many positions are decoded in a step: the transfer schedules."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.state.canvas import Canvas
from dllm_jax.state.selection import best
from dllm_jax.traced import Number


def even_schedule(canvas: Canvas, positions: Int[Array, "b"] | None = None) -> Int[Array, "b"]:
    """LLaDA's transfer schedule: the block's masks spread over its steps, the remainder to the early ones.

    Counts are of the masks when the block began, or of `positions` instead. Steps beyond the schedule, for
    masks that the policy did not offer in time, decode as many as its first.
    """
    # K = block masks // steps, and one more in each of the first (block masks mod steps) steps.
    steps = canvas.steps_per_block
    masks = canvas.block_masks if positions is None else positions
    remainder = masks % steps
    beyond = canvas.schedule_step >= steps
    one_more = jnp.where(beyond, remainder > 0, canvas.schedule_step < remainder)
    return masks // steps + one_more.astype(jnp.int32)


def rounded_schedule(canvas: Canvas) -> Int[Array, "b"]:
    """dllm's transfer schedule: masks left over steps left, rounded half to even; at least one.

    Steps that would decode none are left out. The reference implementation rounds what float32 makes of the
    quotient, so that a half may go either way there.
    """
    # m / s rounds to 0 until s < 2m: such steps are skipped, and each step after one decodes one token. So
    # what is left says how many were skipped, and nothing is remembered.
    masks = jnp.sum(canvas.eligible, axis=1, dtype=jnp.int32)
    steps = canvas.steps_per_block - canvas.schedule_step
    steps = jnp.maximum(jnp.minimum(steps, 2 * masks - 1), 1)
    count, rest = masks // steps, masks % steps
    above_half, half = 2 * rest > steps, 2 * rest == steps
    return count + (above_half | (half & (count % 2 == 1))).astype(jnp.int32)


def linear_schedule(canvas: Canvas) -> Int[Array, "b"]:
    """RND1's transfer schedule: of M masks floor(M (S - k) / S) stay masked after step k of S.

    Steps that would decode none are left out, so that there are at most M.
    """
    total, left = canvas.block_masks, jnp.sum(canvas.eligible, axis=1, dtype=jnp.int32)
    steps = jnp.maximum(jnp.minimum(canvas.steps_per_block, total), 1)
    stay = total * jnp.maximum(steps - canvas.schedule_step - 1, 0) // steps
    return jnp.maximum(left - stay, 1)


def sure_or_best(
    score: Float[Array, "b c"], threshold: Number, least: Int[Array, "b"] | int
) -> Bool[Array, "b c"]:
    """All candidates above the threshold if these are at least so many, else so many best ones."""
    sure = score > threshold
    enough = jnp.sum(sure, axis=1) >= least
    return jnp.where(enough[:, None], sure, best(score, least))


def passing_prefix(priority: Float[Array, "b c"], factor: Number) -> Int[Array, "b"]:
    """Fast-dLLM's factor rule: the largest n with (n + 1)(1 - c_n) < factor, c descending; at least 1."""
    ranked = -jnp.sort(-priority, axis=1)
    n = jnp.arange(1, priority.shape[1] + 1)

    # (n + 1)(1 - c_n) ascends while c descends: the prefix ends at the first n that fails. Positions that are
    # no candidates have c = -inf, and fail.
    passes = (n + 1) * (1.0 - ranked) < factor
    return jnp.maximum(jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1), 1)


def dream_fractions(steps: int, eps: float) -> np.ndarray:
    """1 - s/t for each step of Dream's time grid linspace(1, eps), float32 [steps]; the last is 1."""
    # In float32, as the reference: a float64 grid changes entries by an ulp, and counts are truncated.
    times = dream_times(steps, eps)
    fractions = np.float32(1) - times[1:] / times[:-1]

    # The last step decodes all that is left.
    fractions[-1] = 1
    return fractions


def dream_fraction(step: Int[Array, "b"], steps: Int[Array, "b"], eps: float) -> Float[Array, "b"]:
    """The same for one step of each sequence's own grid: float32, but not rounded as torch rounds it."""
    time = lambda step: 1 - (1 - eps) * (step / steps)
    return jnp.where(step == steps - 1, 1.0, 1 - time(step + 1) / time(step))


def dream_times(steps: int, eps: float) -> np.ndarray:
    """linspace(1, eps, steps + 1) in float32 exactly as torch rounds it.

    Torch builds the grid from both ends toward the middle, each entry one fused multiply-add.
    """
    # The stride is a float32 quotient. Products and sums in float64, rounded once to float32, are what a
    # fused multiply-add gives.
    last = np.float64(np.float32(eps))
    stride = np.float64((np.float32(eps) - np.float32(1)) / np.float32(steps))

    # First half: 1 + i stride; second half: eps - (steps - i) stride.
    i = np.arange(steps + 1)
    return np.where(i < (steps + 1) // 2, 1 + stride * i, last - stride * (steps - i)).astype(np.float32)
