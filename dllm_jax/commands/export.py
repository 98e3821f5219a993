"""Writes a converted checkpoint back as a Hugging Face directory."""

from pathlib import Path
from typing import Annotated

import tyro

from dllm_jax.checkpoint import export
from dllm_jax.options import PositiveFloat, check_argument


def main(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    overwrite: bool = False,
    shard_gb: float = 2.0,
):
    """Writes a converted checkpoint back as a Hugging Face directory.

    Tensors that the conversion left in their dtype, float32 or bfloat16, come back bit for bit.

    Args:
      source: Directory written by `convert`.
      destination: Directory to write; it appears only when complete.
      overwrite: Replace an existing checkpoint, which stays until the new one is complete.
      shard_gb: Maximum size of a safetensors file, in 10^9 bytes; a larger tensor gets a file of its own.
    """
    # A GB of 10^9 bytes, as `max_shard_size` of Hugging Face counts it.
    shard_bytes = int(check_argument("shard_gb", shard_gb, PositiveFloat) * 1e9)
    print(export(source, destination, overwrite, shard_bytes, show_progress=True))
