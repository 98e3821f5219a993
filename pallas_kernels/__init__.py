"""Operations with kernels of their own, one folder per family; see docs/dev/design.md, "Kernels".

`from pallas_kernels.topk_evict import topk_evict`. `choice.py` decides what runs. Nothing here
depends on `dllm_jax`.
"""

from pallas_kernels import attention, experts, ragged_attention, sparse_gather, topk_evict
from pallas_kernels.choice import Choice, Implementation, Operation

__all__ = ["OPERATIONS", "Choice", "Implementation", "Operation"]


OPERATIONS: tuple[Operation, ...] = (
    attention.ATTENTION,
    attention.ATTENTION_AND_LSE,
    attention.RECEIVED,
    attention.HEAD_MEAN,
    ragged_attention.OPERATION,
    sparse_gather.OPERATION,
    topk_evict.OPERATION,
    experts.OPERATION,
)
