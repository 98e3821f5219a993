"""Checkpoints that come with the package: tiny, trained by `bench.train_tiny`, in Hugging Face layout."""

from importlib import resources
from pathlib import Path

from dllm_jax.options import shown

TEXT = ("tiny-llada", "tiny-dream")
PICTURED = ("tiny-llada-v",)  # of questions about pictures, for a `dllm_jax.vision.Processor`
BLOCK_CAUSAL = ("tiny-sdar", "tiny-sdar-moe")
NOISE = ("tiny-gemma",)  # without a mask token
NAMES = TEXT + PICTURED + BLOCK_CAUSAL + NOISE


def path(name: str) -> Path:
    """The directory of a bundled checkpoint, for `dllm_jax.load` and `AutoTokenizer.from_pretrained`.

    Raises:
      ValueError: no such checkpoint.
    """
    if name not in NAMES:
        raise ValueError(f"name={shown(name)} is not one of {', '.join(NAMES)}")
    return Path(str(resources.files(__name__) / name))
