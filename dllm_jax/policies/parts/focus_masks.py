"""FOCUS's choice: which masks of a block leave a step, by what they receive from each other in two layers."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.arithmetic import einsum
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import compact, places, spread
from dllm_jax.state.selection import best

LAYERS = 2  # whose importance is compared: rows leave in the last of them


class Focus(NamedTuple):
    """State that layers and steps share.

    Attributes:
      importance: Attention that the block's masks receive from each other, in the first two layers.
      stays: Rows of the step that no layer has let go.
      read: Positions that the layers read from the second one on.
      progress: Rightmost position of the block that ever stayed; -1 before its first step.
    """

    importance: Float[Array, "b 2 w"]
    stays: Bool[Array, "b l"]
    read: Bool[Array, "b l"]
    progress: Int[Array, "b"]

    def without(self, leaves: Bool[Array, "b l"], canvas: Canvas, last: Bool[Array, ""] | bool) -> "Focus":
        """The state after these masks have left; before the `last` layer of `LAYERS` none does."""
        stays = self.stays & ~leaves
        end = jnp.max(jnp.where(stays & canvas.block, canvas.position, -1), axis=1)
        read = canvas.valid & ~(leaves & (canvas.position > end[:, None]))
        progress = jnp.where(last, jnp.maximum(self.progress, end), self.progress)
        return self._replace(stays=stays, read=read, progress=progress)


def candidate_masks(canvas: Canvas) -> Bool[Array, "b l"]:
    """The masks of the block that may be unmasked: these may leave."""
    return canvas.eligible & canvas.block


def target(canvas: Canvas, alpha: float) -> Int[Array, "b"]:
    """Number of masks that should stay: `alpha` times the tokens that each step of the block unmasked."""
    # A table, as the product is rounded up: devices have no doubles. After more steps the mean is below 1.
    most, count = canvas.layout.block, jnp.sum(candidate_masks(canvas), axis=1)
    mean = lambda decoded, steps: decoded / steps if steps else 1.0
    table = [[wanted(alpha, mean(d, s)) for d in range(most + 1)] for s in range(most + 1)]
    decoded = canvas.block_masks - jnp.sum(canvas.masked & canvas.block, axis=1)
    at_most = jnp.asarray(table, jnp.int32)[jnp.minimum(canvas.block_step, most), decoded]
    return jnp.minimum(count, at_most)


def wanted(alpha: float, mean: float) -> int:
    """Number of masks that should stay where a step unmasks `mean` tokens on average."""
    return math.ceil(alpha * max(mean, 1.0))


def leaving(found: Focus, canvas: Canvas, alpha: float) -> Bool[Array, "b l"]:
    """The masks that leave the step."""
    masks, most = candidate_masks(canvas), target(canvas, alpha)[:, None]
    index = compact(masks, canvas.layout.block)
    real = index < canvas.layout.length
    count = jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1)

    # Those whose importance grows by a deviation more than the mean; the best ones if these are too few.
    delta = jnp.where(real, found.importance[:, 1] - found.importance[:, 0], 0.0)
    mean = jnp.sum(delta, axis=1, keepdims=True) / count
    variance = jnp.sum(jnp.where(real, (delta - mean) ** 2, 0.0), axis=1, keepdims=True) / count
    outliers = real & (delta >= mean + jnp.sqrt(variance))
    largest = best(jnp.where(real, delta, -jnp.inf), most[:, 0])
    enough = jnp.sum(outliers, axis=1, keepdims=True) >= most
    chosen = jnp.where(enough, outliers, largest) | (count <= most)
    chosen = spread(chosen & real, places(index, canvas.layout.length), False)

    # Their left neighbours, and masks left of them that never stayed: so all that is read was computed.
    stays = chosen | (masks & jnp.pad(chosen[:, 1:], ((0, 0), (0, 1))))
    rightmost = jnp.max(jnp.where(stays, canvas.position, -1), axis=1, keepdims=True)
    new = (canvas.position > found.progress[:, None]) & (canvas.position < rightmost)
    return masks & ~stays & ~new


def among_masks(
    q: Float[Array, "b w h d"], k: Float[Array, "b w k d"], real: Bool[Array, "b w"]
) -> Float[Array, "b w"]:
    """Attention that each mask receives from the masks, max-pooled over three neighbours among them.

    Args:
      q: rotated queries of the masks.
      k: rotated keys of the masks.
      real: Entries that are masks, not padding.
    """
    b, w, heads, head = q.shape
    grouped = q.reshape(b, w, k.shape[2], heads // k.shape[2], head)
    score = einsum("bqkgd,bskd->bkgqs", grouped, k, jnp.float32) / math.sqrt(head)
    score = jnp.where(real[:, None, None, None], score, -jnp.inf)
    pooled = jax.lax.reduce_window(score, -jnp.inf, jax.lax.max, (1, 1, 1, 1, 3), (1,) * 5, "SAME")
    pooled = jnp.where(real[:, None, None, None], pooled, -jnp.inf)

    # Without any mask the weights would be NaN.
    weights = jax.nn.softmax(
        jnp.where(jnp.any(real, axis=1)[:, None, None, None, None], pooled, 0.0), axis=-1
    )
    weights = jnp.where(real[:, None, None, :, None], weights, 0.0)
    return jnp.sum(weights, axis=(1, 2, 3))
