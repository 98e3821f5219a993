"""Attention of the network and the masks it reads; `pallas_kernels.attention.xla` computes it.

`attention`, `received`, `head_mean` and `weights` are XLA's forms, which take every mask and have gradients:
full passes and training use them as they are. A generation's steps call them through `Layer`,
where a model may have chosen Pallas kernels that compute the same.
"""

from jaxtyping import Array, Bool

from dllm_jax.nn.spec import ModelSpec
from pallas_kernels.attention.xla import SCORE_BYTES as SCORE_BYTES
from pallas_kernels.attention.xla import SCORE_BYTES_ON_CUDA as SCORE_BYTES_ON_CUDA
from pallas_kernels.attention.xla import Mask as Mask
from pallas_kernels.attention.xla import attention as attention
from pallas_kernels.attention.xla import head_mean as head_mean
from pallas_kernels.attention.xla import length_mask as length_mask
from pallas_kernels.attention.xla import received as received
from pallas_kernels.attention.xla import weights as weights


def key_mask(valid: Bool[Array, "b s"]) -> Mask:
    """Every query may attend to every valid key."""
    return valid[:, None, None, :]


def padding_mask(valid: Bool[Array, "b s"], queries: Bool[Array, "b q"], spec: ModelSpec) -> Mask:
    """Queries attend to valid keys; those at padding do so too or attend to nothing, depending on the model.

    Args:
      valid: keys that are not padding.
      queries: queries that are not padding.
      spec: `pad_rows_attend` decides about queries at padding.
    """
    mask = key_mask(valid)
    return mask if spec.pad_rows_attend else mask & queries[:, None, :, None]
