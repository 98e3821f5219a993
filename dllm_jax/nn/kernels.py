"""Attention and its statistics by `pallas_kernels`, where requested or measured to be faster.

Kernels support masks of one query row, which all policies have except in padded batches of Dream. Everything
else, and whatever a kernel refuses, uses the functions of `dllm_jax.nn.attention`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax.nn import attention as plain
from dllm_jax.nn.attention import Mask
from pallas_kernels import Implementation, Operation, received_attention, row_attention
from pallas_kernels.choice import Platform
from pallas_kernels.row_attention import RowAttention

Shapes = jax.Array | jax.ShapeDtypeStruct  # where only shapes and dtypes are looked at
SEAMS: tuple[Operation, ...] = (
    row_attention.OPERATION,
    received_attention.RECEIVED,
    received_attention.HEAD_MEAN,
)


def attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None,
    implementation: Implementation | None,
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """As `dllm_jax.nn.attention.attention`, by the chosen implementation, see `Model.implementation`."""
    without = lambda *args: RowAttention(*plain.attention(*args))
    return _run(row_attention.OPERATION, without, (q, k, v), mask, implementation)


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: Mask | None,
    implementation: Implementation | None,
) -> Float[Array, "b k s"]:
    """As `dllm_jax.nn.attention.received`, by the chosen implementation."""
    return _run(received_attention.RECEIVED, plain.received, (q, k, lse, weight), mask, implementation)


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: Mask | None,
    implementation: Implementation | None,
) -> Float[Array, "b q s"]:
    """As `dllm_jax.nn.attention.head_mean`, by the chosen implementation."""
    return _run(received_attention.HEAD_MEAN, plain.head_mean, (q, k, lse), mask, implementation)


def preferring(operation: Operation, implementation: Implementation | None) -> Operation:
    """The operation with kernels where `implementation` says: everywhere, nowhere, or where faster.

    With "pallas" CPUs interpret the TPU's kernel, and XLA handles what a platform's kernel refuses.
    """
    if implementation == "xla":
        return dataclasses.replace(operation, preferred=())
    if implementation == "pallas":
        kernels = {"cpu": functools.partial(operation.kernels["tpu"], interpret=True), **operation.kernels}
        return dataclasses.replace(operation, kernels=kernels, preferred=tuple(kernels))
    return operation


def choices(
    operation: Operation,
    arrays: tuple[Shapes, ...],
    mask: Bool[Shapes, "#b #k #q s"] | None,
    implementation: Implementation | None,
) -> dict[str, str]:
    """What an operation takes on each platform for arrays of these shapes, and why it is not a kernel."""
    if implementation == "xla":
        return dict.fromkeys(get_args(Platform), "xla: as asked for")
    chosen = preferring(operation, implementation)
    if chosen.preferred and _differs(mask):
        return dict.fromkeys(get_args(Platform), "xla: the mask differs between query rows")
    keys = None if mask is None else jax.eval_shape(_key_mask, mask, arrays[1])
    found: dict[str, str] = {**chosen.explain((*arrays, keys, None), {})}
    if found["cpu"] == "pallas":
        found["cpu"] = "pallas, interpreted"
    return found


def _differs(mask: Bool[Shapes, "#b #k #q s"] | None) -> bool:
    """Whether query rows see different slots, which no kernel supports."""
    return mask is not None and mask.shape[2] != 1


def _run(
    operation: Operation,
    without: Callable[..., Any],
    arrays: tuple[Array, ...],
    mask: Mask | None,
    implementation: Implementation | None,
) -> Any:
    """The operation, or `without(*arrays, mask)` where no kernel is wanted."""
    operation = preferring(operation, implementation)
    if not operation.preferred or _differs(mask):
        return without(*arrays, mask)

    def xla(*args):
        *arrays, keys, _ = args
        return without(*arrays, keys if keys is None else keys.reshape(keys.shape[0], -1, 1, keys.shape[-1]))

    keys = None if mask is None else _key_mask(mask, arrays[1])
    return dataclasses.replace(operation, xla=xla).run((*arrays, keys, None), {}, None)


def _key_mask(mask: Mask, k: Float[Array, "b s k d"]) -> Bool[Array, "b s"] | Bool[Array, "b k s"]:
    batch, slots, kv_heads = k.shape[:3]
    if mask.shape[1] == 1:
        return jnp.broadcast_to(mask[:, 0, 0], (batch, slots))
    return jnp.broadcast_to(mask[:, :, 0], (batch, kv_heads, slots))
