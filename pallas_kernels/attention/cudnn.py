"""Attention by cuDNN's flash attention, as `jax.nn.dot_product_attention` calls it: for NVIDIA GPUs.

A kept library instead of a kernel of ours, for GPUs of compute capability 8.0 and later. It reads rows of
[k d], so keys and values must lie in memory as they are named; what a mask hides is zeroed for it where it
has to be (`xla.without_hidden`). Measured on an H100 and an H200: docs/dev/gpu-steps.md.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import xla
from pallas_kernels.attention.xla import Mask, both

# What jax says where jax for CUDA is not installed, and where it is without cuDNN.
_ABSENT = ("cuDNN is not detected", "cuDNN not found")


def attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    library: Literal["cudnn", "xla"] = "cudnn",
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """As `xla.attention`.

    The log-sum-exp is not cuDNN's, which jax rounds to the dtype of q, but XLA's, computed where it is read.

    Args:
      q: queries.
      k: keys.
      v: values.
      mask: the same for all heads.
      lengths: Number of slots of the only KV head; None with several.
      library: "xla" computes the same without cuDNN, for tests.

    Raises:
      NotImplementedError: no cuDNN, what it does not take (other dtypes than bfloat16 and float16, wide
        heads), a mask that differs between heads, no queries or no slots.
    """
    mask = both(mask, lengths, k)
    if not q.size or not k.size:
        raise NotImplementedError("no queries" if k.size else "no slots")
    dtypes = {q.dtype, k.dtype, v.dtype}
    if library == "cudnn" and dtypes not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
        raise NotImplementedError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: all bfloat16 or all float16")
    if mask is not None and mask.shape[1] > 1:
        raise NotImplementedError("a mask that differs between heads")

    # A mask becomes a finite bias there: what is hidden must be finite too, and a query that may attend to
    # nothing is left to us.
    allowed, bias, seen = None, mask, None
    if mask is not None:
        seen = jnp.any(mask, axis=2)[:, 0, :, None, None]
        allowed = jnp.moveaxis(jnp.any(mask, axis=3), 1, 2)[..., None]
        bias = jnp.broadcast_to(mask, (*mask.shape[:2], q.shape[1], k.shape[1]))
    attended = lambda *pairs: (jax.nn.dot_product_attention(q, *pairs, mask=bias, implementation=library),)
    try:
        (out,) = xla.without_hidden(attended, seen, q.shape[1], k, v)
    except RuntimeError as error:
        if not any(said in str(error) for said in _ABSENT):
            raise
        raise NotImplementedError(str(error)) from error
    out = out if allowed is None else jnp.where(allowed, out, 0).astype(q.dtype)
    return out, xla.attention(q, k, v, mask)[1]
