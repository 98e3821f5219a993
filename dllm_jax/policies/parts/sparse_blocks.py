"""Sparse-dLLM's choice on block-causal models, which is ours: nothing is evicted, but less is read."""

import dataclasses
from typing import Annotated

from jaxtyping import Array, Float
from typing_extensions import override

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import Mask
from dllm_jax.options import Fraction, Odd, PositiveInt, TracedNonNegativeInt
from dllm_jax.policies.parts.chosen_reads import ChosenReads
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows
from dllm_jax.state.selection import max_pool, mean_query_score
from dllm_jax.traced import Count


@dataclasses.dataclass(frozen=True)
class SparseBlocks(ChosenReads):
    """Attends to the stored pairs that the block's mean query scores highest, one list for all heads.

    The first `delay` steps of a model's block are exact, and so is the next one, which chooses.

    Attributes:
      keep: Fraction of the pairs of earlier blocks to attend to.
      kernel: Window of the max pooling over stored positions, odd.
      delay: Exact steps of a block before the one that chooses.
    """

    keep: PositiveInt | Fraction = 0.5
    kernel: Annotated[PositiveInt, Odd()] = 3
    delay: TracedNonNegativeInt = 1

    @property
    @override
    def waits(self) -> Count:
        return self.delay

    @override
    def scores(
        self,
        layer: Layer,
        q: Float[Array, "b w h d"],
        k: Float[Array, "b l k d"],
        lse: Float[Array, "b h w"],
        mask: Mask,
        rows: Rows,
        canvas: Canvas,
    ) -> Float[Array, "b 1 l"]:
        """The product of each key with the block's mean query, averaged over heads and pooled."""
        score = mean_query_score(q, k, rows.real)
        return max_pool(score, canvas.before_model_block, self.kernel)[:, None]
