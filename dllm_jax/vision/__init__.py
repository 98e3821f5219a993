"""Images of LLaDA-V: what `dj.chat` takes in the place of a tokenizer, and the functions it is made of."""

from dllm_jax.vision.images import AnyRes as AnyRes
from dllm_jax.vision.images import Merge as Merge
from dllm_jax.vision.images import Pad as Pad
from dllm_jax.vision.images import Views as Views
from dllm_jax.vision.images import open_image as open_image
from dllm_jax.vision.processor import Processor as Processor
