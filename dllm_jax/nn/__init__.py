"""The network: a decoder as pure functions, a layer opened at its seams; knows nothing of decoding."""

from dllm_jax.nn import exported as exported
from dllm_jax.nn.layer import Layer as Layer
from dllm_jax.nn.mask import Mask as Mask
from dllm_jax.nn.mask import key_mask as key_mask
from dllm_jax.nn.model import Model as Model
from dllm_jax.nn.spec import ModelSpec as ModelSpec
