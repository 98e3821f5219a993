"""The attention of a generation's steps, by the implementation that the model chose.

`implementation` is `Model.implementation`; `pallas_kernels.choice` says what it means. Kernels support masks
that are the same for all queries of a sequence, which all policies have except in padded batches of Dream.
"""

from jaxtyping import Array, Float

from dllm_jax.nn.attention import Mask
from pallas_kernels import Implementation, Operation
from pallas_kernels import attention as operations

# What a layer calls through this module; `explain` reports on these three.
SEAMS: tuple[Operation, ...] = (operations.ATTENTION, operations.RECEIVED, operations.HEAD_MEAN)


def attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None,
    implementation: Implementation | None,
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """Softmax attention and its log-sum-exp, see `dllm_jax.nn.attention.attention`.

    The log-sum-exp takes the place of attention weights, which no implementation returns: `received` and
    `head_mean` recompute from it what a policy reads.
    """
    return operations.attention(q, k, v, mask, implementation=implementation)


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: Mask | None,
    implementation: Implementation | None,
) -> Float[Array, "b k s"]:
    """Attention that each key receives from the weighted queries, see `dllm_jax.nn.attention.received`.

    These are the votes of MaskKV (equation 7) and of Elastic-Cache (equation 5).
    """
    return operations.received(q, k, lse, weight, mask, implementation=implementation)


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: Mask | None,
    implementation: Implementation | None,
) -> Float[Array, "b q s"]:
    """Attention weights averaged over query heads, see `dllm_jax.nn.attention.head_mean`.

    This is the map that d2Cache rolls out (section 4.2).
    """
    return operations.head_mean(q, k, lse, mask, implementation=implementation)
