"""Which implementation every operation takes, and why."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from dllm_jax.kernels import preferring
from dllm_jax.layout import Layout
from dllm_jax.model import Model
from dllm_jax.policies.base import Policy
from pallas_kernels import Operation, received_attention, row_attention


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A table; `print` it.

    Attributes:
      rows: (operation, query rows of the step, platform, what it takes and why).
    """

    rows: tuple[tuple[str, int, str, str], ...]

    def __str__(self) -> str:
        table = [("operation", "query rows", "platform", "implementation"), *self.rows]
        cells = [[str(cell) for cell in row] for row in table]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells
        ]
        return "\n".join(line.rstrip() for line in lines)


def explain(model: Model, batch: int, layout: Layout, policy: Policy | None = None) -> Explanation:
    """Which implementation attention, and what is read from it, takes in each kind of step on each platform.

    Nothing is computed or compiled. Not every policy calls all of the operations. The slots are those of a
    cache of all positions; policies that keep fewer are served alike.

    Args:
      model: from `load`; its `implementation` counts.
      batch: sequences, twice as many with guidance.
      layout: geometry of the generation.
      policy: None is the exact decoder.

    Returns:
      a table.
    """
    policy = Policy() if policy is None else policy
    return Explanation(
        tuple(
            (operation.name, rows, platform, reason)
            for rows in (*policy.widths(layout), layout.length)
            for operation, arrays in _calls(model, batch, layout, rows)
            for platform, reason in _choices(model, layout, operation, arrays).items()
        )
    )


def _calls(model: Model, batch: int, layout: Layout, rows: int) -> Iterator[tuple[Operation, tuple]]:
    """The operations that a step of so many rows may call, and the shapes of their arrays."""
    spec, struct = model.spec, jax.ShapeDtypeStruct
    q = struct((batch, rows, spec.heads, spec.head), model.dtype)
    k = struct((batch, layout.length, spec.kv_heads, spec.head), model.dtype)
    lse = struct((batch, spec.heads, rows), jnp.float32)
    weight = struct((batch, rows), jnp.float32)
    mask = struct((batch, layout.length), jnp.bool_) if layout.padded else None
    yield row_attention.OPERATION, (q, k, k, mask, None)
    yield received_attention.RECEIVED, (q, k, lse, weight, mask, None)
    yield received_attention.HEAD_MEAN, (q, k, lse, mask, None)


def _choices(model: Model, layout: Layout, operation: Operation, arrays: tuple) -> dict[str, str]:
    """What each platform takes."""
    explained = preferring(operation, model.implementation).explain(arrays, {})
    choices: dict[str, str] = {str(platform): reason for platform, reason in explained.items()}
    if model.implementation == "xla":
        return dict.fromkeys(choices, "xla: as asked for")
    if layout.padded and not model.spec.pad_rows_attend:
        return dict.fromkeys(choices, "xla: the mask differs between query rows")
    if choices["cpu"] == "pallas":
        choices["cpu"] = "pallas, interpreted"
    return choices
