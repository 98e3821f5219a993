"""Converts a Hugging Face checkpoint for dllm_jax."""

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dllm_jax.checkpoint import convert
from dllm_jax.checkpoint.dtypes import DtypeName


def main(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    dtype: DtypeName | None = None,
    rope_factor: float = 1.0,
    overwrite: bool = False,
    check_finite: bool = False,
    weights: Literal["int8"] | None = None,
    revision: str | None = None,
):
    """Converts a Hugging Face checkpoint for dllm_jax.

    Args:
      source: Hugging Face directory, or a hub id such as GSAI-ML/LLaDA-8B-Instruct.
      destination: Directory to write; it appears only when complete.
      dtype: Dtype of the parameters, such as bfloat16. Default: that of the stored matrices,
        bfloat16 for float16.
      rope_factor: Factor of the rotary base (NTK scaling for long contexts).
      overwrite: Replace an existing checkpoint, which stays until the new one is complete.
      check_finite: End with an error if a parameter holds NaN or infinity.
      weights: Quantize to int8 the matrices of the decoder's layers, but for routers, of self-conditioning,
        and of a vocabulary head of its own; they cannot be exported.
      revision: Branch, tag or commit of a hub id. Default: its main branch.
    """
    how: dict[str, Any] = dict(weights=weights, revision=revision, show_progress=True)
    print(convert(source, destination, dtype, rope_factor, overwrite, check_finite, **how))
