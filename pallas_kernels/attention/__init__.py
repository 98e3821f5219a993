"""Attention, and what its weights show afterwards: what each key received, and their mean over heads."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.attention import xla
from pallas_kernels.attention.xla import Mask, check_shapes
from pallas_kernels.choice import Backend, Implementation, Operation, imported

__all__ = ["ATTENTION", "ATTENTION_AND_LSE", "HEAD_MEAN", "RECEIVED", "attention", "head_mean", "received"]


def _check(q, k, *others) -> None:
    check_shapes(q, k, *others[-2:])


_ALL: tuple[Backend, ...] = ("tpu", "triton", "mosaic_gpu")


def _operation(
    plain: Callable[..., Any], backends: tuple[Backend, ...], operands: str, *results: str, **more: Any
) -> Operation:
    return Operation(
        name=plain.__name__,
        xla=plain,
        check=_check,
        operands=tuple(operands.split()),
        results=results,
        kernels={name: imported(f"pallas_kernels.attention.{name}", plain.__name__) for name in backends},
        **more,
    )


ATTENTION = dataclasses.replace(
    _operation(xla.attention, _ALL, "bqhd bskd bskd bkqs bk", "bqhd", "bhq"),
    xla=xla.attention_by_sequence,
    cudnn=imported("pallas_kernels.attention.cudnn", "attention"),
)
# Where the log-sum-exp is read, an implementation that returns it saves XLA all scores (`cudnn.attention`).
ATTENTION_AND_LSE = dataclasses.replace(ATTENTION, name="attention_and_lse")
RECEIVED = _operation(xla.received, _ALL, "bqhd bskd bhq bq bkqs bk", "bks")
HEAD_MEAN = _operation(xla.head_mean, _ALL[:2], "bqhd bskd bhq bkqs bk", "bqs", averages_heads=True)


def attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """Softmax attention and its log-sum-exp, as `pallas_kernels.attention.xla.attention` defines them.

    Args:
      q: queries; head i reads KV head i // (h // k).
      k: keys.
      v: values.
      mask: True where a query may attend; None means everywhere.
      lengths: each KV head may read its first `lengths` slots; None means all. With a mask, both must allow.
      implementation: Implementation to use, or None for the default (`pallas_kernels.choice`).

    Raises:
      ValueError: shapes that do not go together, or another implementation.
    """
    return ATTENTION.run((q, k, v, mask, lengths), {}, implementation)


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "b k s"]:
    """Attention that each key receives, as `pallas_kernels.attention.xla.received` defines it.

    Args:
      q: queries.
      k: keys.
      lse: log-sum-exp of the scaled scores, from `attention`.
      weight: Weight of each query position.
      mask: Mask given to `attention`.
      lengths: each KV head may read its first `lengths` slots.
      implementation: Implementation to use, or None for the default (`pallas_kernels.choice`).

    Raises:
      ValueError: shapes that do not go together, or another implementation.
    """
    return RECEIVED.run((q, k, lse, weight, mask, lengths), {}, implementation)


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "b q s"]:
    """Attention weights averaged over query heads; arguments and errors as of `received`."""
    return HEAD_MEAN.run((q, k, lse, mask, lengths), {}, implementation)
