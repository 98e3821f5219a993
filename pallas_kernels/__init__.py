"""Operations with kernels of their own, one folder per family; docs/design.md, "Kernels", says how.

`from pallas_kernels.token_confidence import token_confidence`. `choice.py` decides what runs. Nothing here
depends on `dllm_jax`.
"""

from pallas_kernels import attention, sparse_gather, token_confidence, topk_evict
from pallas_kernels.choice import Implementation as Implementation
from pallas_kernels.choice import Operation as Operation

OPERATIONS: tuple[Operation, ...] = (
    attention.ATTENTION,
    attention.RECEIVED,
    attention.HEAD_MEAN,
    sparse_gather.OPERATION,
    topk_evict.OPERATION,
    token_confidence.OPERATION,
)
