"""Attention of the network; `pallas_kernels.attention.xla` computes it.

`attention`, `received`, `head_mean` and `weights` are XLA's forms, which take every mask and have gradients:
full passes and training use them as they are. A generation's steps call them through `Layer`,
where a model may have chosen Pallas kernels that compute the same. Masks are in `dllm_jax.nn.mask`.
"""

from pallas_kernels.attention.xla import SCORE_BYTES as SCORE_BYTES
from pallas_kernels.attention.xla import SCORE_BYTES_ON_CUDA as SCORE_BYTES_ON_CUDA
from pallas_kernels.attention.xla import attention as attention
from pallas_kernels.attention.xla import head_mean as head_mean
from pallas_kernels.attention.xla import received as received
from pallas_kernels.attention.xla import weights as weights
