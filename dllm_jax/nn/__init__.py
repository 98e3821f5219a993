"""The network: a decoder as pure functions, a layer opened at its seams; knows nothing of decoding."""

from dllm_jax.nn import exported
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import Mask, key_mask
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec

__all__ = ["Layer", "Mask", "Model", "ModelSpec", "exported", "key_mask"]
