"""Images of LLaDA-V: what `dj.chat` takes in place of a tokenizer, and the functions it is made of."""

from dllm_jax.vision.images import AnyRes, Merge, Pad, Views, open_image
from dllm_jax.vision.processor import Processor

__all__ = ["AnyRes", "Merge", "Pad", "Processor", "Views", "open_image"]
