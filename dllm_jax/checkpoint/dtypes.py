"""The dtypes of parameters: their names in files, which are supported, and bitwise comparison of arrays."""

from collections.abc import Iterable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from dllm_jax.nn.int8 import Weights
from dllm_jax.options import shown
from dllm_jax.options.hints import warn

SUPPORTED = (np.dtype(jnp.float32), np.dtype(jnp.bfloat16))
DtypeName = Literal["float32", "bfloat16", "fp32", "f32", "bf16"]  # on command lines
# NumPy does not know these, or something else under them ("f16" is its 128 bits).
SHORT = {"f32": "float32", "fp32": "float32", "bf16": "bfloat16", "f16": "float16", "fp16": "float16"}
SAFETENSORS = {  # by their names in safetensors files: the formats a weight may be stored in
    "F32": np.dtype(jnp.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(jnp.float16),
}


def supported(dtype: Any) -> np.dtype:
    """NumPy's form of a dtype that models run in; "bf16", "fp32" and "f32" are names too.

    Raises:
      ValueError: not float32 or bfloat16. Models do not run in float16; files that hold it load as either.
    """
    try:
        chosen = np.dtype(SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except (TypeError, ValueError, SyntaxError) as error:  # the last of what looks like several dtypes
        raise ValueError(f"dtype={shown(dtype)} is no dtype; supported: float32, bfloat16") from error
    if chosen not in SUPPORTED:
        fix = ". Use bfloat16, of as many bytes" if chosen == np.float16 else ""
        raise ValueError(f"dtype={chosen} is not supported; supported: float32, bfloat16{fix}")
    return chosen


class DtypeWarning(UserWarning):
    """A checkpoint is loaded in another dtype than that of all of its tensors."""


def choose(dtype: Any, stored: Iterable[np.dtype], where: str, matrices: np.dtype | None = None) -> np.dtype:
    """The dtype to load: `dtype`, or the stored one if that is None.

    Args:
      dtype: Asked for; None keeps the stored one.
      stored: Dtypes of the stored tensors.
      where: The checkpoint, for messages.
      matrices: Dtype of most numbers in matrices, which decides where there are several.

    Warns:
      DtypeWarning: several dtypes, of which the matrices' is taken; float16, which becomes bfloat16.

    Raises:
      ValueError: an unsupported dtype; or None, several stored ones, and no matrices to decide.
    """
    if dtype is not None:
        return supported(dtype)
    kinds = sorted(set(stored), key=str)
    if len(kinds) == 1 and kinds[0] in SUPPORTED:
        return kinds[0]
    listed = ", ".join(map(str, kinds))
    if matrices is None:
        raise ValueError(
            f"{where} holds {listed}, must be float32 or bfloat16 throughout. Cast all parameters: "
            "jax.tree.map(lambda array: array.astype(jnp.bfloat16), model)"
        )
    chosen = matrices if matrices in SUPPORTED else np.dtype(jnp.bfloat16)
    why = f"that of the matrices is {matrices}" if matrices in SUPPORTED else f"no model runs in {matrices}"
    warn(
        f"{where} stores {listed}; it is loaded in {chosen}, as {why}. Pass dtype='float32' or 'bfloat16' to "
        "choose",
        DtypeWarning,
    )
    return chosen


def choose_weights(weights: Any, stored: Weights | None, where: str) -> Weights | None:
    """How to hold matrices: as asked for, or as they are stored if that is None.

    Raises:
      ValueError: another word than "int8", and what int8 files cannot give.
    """
    if weights is None or weights == "int8":
        return weights or stored
    reason = (
        f"weights={shown(weights)} must be None (as they are stored) or 'int8'; dtype= chooses other dtypes"
    )
    if stored is not None:
        reason += f". {where} holds {stored}: what rounding took cannot be given back, load the original"
    raise ValueError(reason)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether shape, dtype and every bit are equal: NaN equals itself, and 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return bool(np.array_equal(a.view(bits), b.view(bits)))
