"""Advantages of responses relative to the others of their prompt."""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from dllm_jax.nn.mesh import number_modes
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.state import host
from dllm_jax.state.host import AnyArray

EQUAL = 2.0**-20  # of the largest magnitude of a group: eight steps of float32


@number_modes()
def group_advantages(rewards: Num[AnyArray, "b"], group: int, normalize: bool = True) -> Float[Array, "b"]:
    """Computes advantages relative to the group: (reward - mean) / standard deviation.

    The formula is GRPO's (arXiv:2402.03300, 4.1.2). It does not depend on the scale of the rewards: in
    float32 (inside of `jit`) from 1e-37 to 1e38, outside of it over the whole range of float64.

    Rewards that rounding alone tells apart are equal: a group whose rewards span at most 2**-20 (a millionth)
    of their largest magnitude has advantages of 0. Whole numbers are compared exactly, but those of 64 bits
    inside of `jit`.

    TRL and verl divide by the deviation of a sample (over group - 1) plus 1e-4 and 1e-6. There advantages
    shrink with the scale of the rewards, and those of rewards that rounding tells apart are not 0.

    Args:
      rewards: Reward of each response, of any real dtype; responses to one prompt are adjacent.
      group: Number of responses per prompt, at least 2.
      normalize: Whether to divide by the group's standard deviation; d1 (arXiv:2504.12216) leaves that out,
        as Dr. GRPO does (arXiv:2503.20783).

    Returns:
      Advantages in float32.

    Raises:
      ValueError: rewards that are no finite numbers of shape [responses], a group of fewer than 2, a number
        of responses that is 0 or no multiple of it, or differences that float32 cannot hold (without
        `normalize`).
    """
    check_argument("group", group, Annotated[PositiveInt, Interval(ge=2)])
    check_argument("normalize", normalize, bool)
    rewards = finite_numbers("rewards", rewards)
    if rewards.ndim != 1 or rewards.size % group or not rewards.size:
        raise ValueError(
            f"rewards have shape {rewards.shape}; expected [responses], a multiple of group={group}"
        )
    above, span, scale = _above_least(rewards.reshape(-1, group))
    xp = host.module(above)
    # A_i = (r_i - mean) / std over the responses to one prompt; a group of equal rewards teaches nothing.
    shares = above / xp.where(span > 0, span, 1)  # in [0, 1]: no square of them is too large or too small
    centered = shares - xp.mean(shares, axis=1, keepdims=True)
    if normalize:
        spread = xp.sqrt(xp.mean(centered**2, axis=1, keepdims=True))
        centered = centered / xp.where(span > 0, spread, 1)
    else:
        centered = centered * span / scale
    return jnp.asarray(finite_numbers("advantages", centered.reshape(-1), np.float32)).astype(jnp.float32)


def _above_least(rewards: Num[AnyArray, "n g"]) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Returns rewards above the least of their group, the largest of these, and the scale of both.

    Rewards on the host are computed in float64, others in float32. Equal rewards are 0 above.
    """
    xp = host.module(rewards)
    kind = np.float64 if xp is np else np.float32
    if rewards.dtype == bool:
        rewards = rewards.astype(np.int32)
    if jnp.issubdtype(rewards.dtype, jnp.integer) and (xp is np or rewards.dtype.itemsize < 8):
        # As unsigned numbers of the same width, whose differences are exact and never too large.
        bits = rewards.astype(f"uint{8 * rewards.dtype.itemsize}")
        least = xp.min(rewards, axis=1, keepdims=True).astype(bits.dtype)
        above = (bits - least).astype(kind)
        span = xp.max(above, axis=1, keepdims=True)
        return above, span, xp.ones_like(span)
    # Powers of two, so that no difference is too large, no reciprocal too small, and no digit lost.
    rewards = rewards.astype(kind)
    scale = xp.where(xp.max(xp.abs(rewards), axis=1, keepdims=True) > 1, 2.0**-64, 2.0**64).astype(kind)
    scaled = rewards * scale
    above = scaled - xp.min(scaled, axis=1, keepdims=True)
    span = xp.max(above, axis=1, keepdims=True)
    equal = span <= EQUAL * xp.max(xp.abs(scaled), axis=1, keepdims=True)
    return xp.where(equal, 0, above), xp.where(equal, 0, span), scale


def finite_numbers(name: str, values: Any, dtype: DTypeLike | None = None) -> Num[AnyArray, "..."]:
    """Real numbers that are finite, on the host unless they stay on devices, of which the dtype is checked.

    Args:
      name: Name of the argument.
      values: Numbers of any real dtype.
      dtype: Dtype that must hold them; None is their own.

    Raises:
      ValueError: no numbers, or not finite.
    """
    array = host.array(name, values, "an array of numbers")
    real = jnp.issubdtype(array.dtype, jnp.number) and not jnp.issubdtype(array.dtype, jnp.complexfloating)
    if not real and array.dtype != bool:
        raise ValueError(f"{name} has dtype {array.dtype}; expected numbers")
    if not host.stays_on_devices(array):
        with np.errstate(over="ignore"):  # which makes infinity, and is refused
            numbers = array if dtype is None else array.astype(dtype)
        if not np.isfinite(numbers).all():
            of = "" if dtype is None else f" of {np.dtype(dtype)}"
            raise ValueError(f"{name} holds {array[~np.isfinite(numbers)][0]}; expected finite numbers{of}")
    return array
