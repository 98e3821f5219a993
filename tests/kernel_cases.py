"""What the tests of all kernels share."""

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels import Operation
from tests.models import EXHAUSTIVE

DTYPES = (jnp.float32, jnp.bfloat16)


def some(cases: Iterable[Any], usual: int) -> list[Any]:
    """The first `usual` cases; the others too with --exhaustive."""
    return list(cases) if EXHAUSTIVE else list(cases)[:usual]


def in_both_dtypes(shapes: Iterable[Any], usual: int) -> list[Any]:
    """Each shape in float32 and bfloat16; of the first `usual` ones every run has one, in turns."""
    return [
        pytest.param(shape, dtype, id=f"{dtype.__name__}-{'-'.join(map(str, shape))}")
        for i, shape in enumerate(shapes)
        for j, dtype in enumerate(DTYPES)
        if EXHAUSTIVE or (i < usual and i % 2 == j)
    ]


def mosaic_gpu_is_checked() -> bool:
    """Whether kernels for Mosaic GPU are for this jax (`CHECKED`); with others they refuse to be imported."""
    try:
        importlib.import_module("pallas_kernels.mosaic_gpu")
    except ImportError as error:
        if "are checked with jax" not in str(error):
            raise
        return False
    return True


def interpreted(operation: Operation) -> dict[str, Callable[..., Any]]:
    """The operation's kernels, interpreted; those for Mosaic GPU with the jax they are for."""
    missing = () if mosaic_gpu_is_checked() else ("mosaic_gpu",)
    kernels = {name: kernel for name, kernel in operation.kernels.items() if name not in missing}
    return {name: functools.partial(kernel, interpret=True) for name, kernel in kernels.items()}


def explaining(operation: Operation):
    """What `operation` takes by default for arrays or their shapes."""
    return lambda *arrays, **options: operation.explain(arrays, options, None)
