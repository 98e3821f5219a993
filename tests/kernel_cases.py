"""What the tests of all kernels share."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels import Operation

DTYPES = (jnp.float32, jnp.bfloat16)


def some(cases: Iterable[Any], usual: int) -> list[Any]:
    """The first `usual` cases; the others only with --exhaustive."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) and not hasattr(case, "_fields") else (case,)),
            marks=() if i < usual else pytest.mark.exhaustive,
        )
        for i, case in enumerate(cases)
    ]


def in_both_dtypes(shapes: Iterable[Any], usual: int) -> list[Any]:
    """Each shape in float32 and bfloat16; of the first `usual` ones every run has one, in turns."""
    return [
        pytest.param(
            shape,
            dtype,
            marks=() if i < usual and i % 2 == j else pytest.mark.exhaustive,
            id=f"{dtype.__name__}-{'-'.join(map(str, shape))}",
        )
        for i, shape in enumerate(shapes)
        for j, dtype in enumerate(DTYPES)
    ]


def explaining(operation: Operation):
    """What `operation` takes by default for arrays or their shapes."""
    return lambda *arrays, **options: operation.explain(arrays, options, None)
