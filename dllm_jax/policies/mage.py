"""MAGE: a block's first step chooses what its other steps read (arXiv:2602.14209)."""

import dataclasses

from jaxtyping import Array, Float
from typing_extensions import override

from dllm_jax import eviction
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import Mask
from dllm_jax.options import Fraction, PositiveInt
from dllm_jax.policies.parts.block_votes import check_voters, mean_attention
from dllm_jax.policies.parts.chosen_reads import ChosenReads
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows


@dataclasses.dataclass(frozen=True)
class MAGE(ChosenReads):
    """Attends to the cached KV pairs that a block's masks attend to most in its first step (MAGE).

    It is predicted to pay on block-causal models with long prompts, where reading the cache limits a step. On
    the GPU that was measured, before a fix, `Policy()` was faster.

    The first step of a model's block is exact. Per layer and KV head it averages the attention weights of the
    block's masks, and retains the `keep` best pairs of earlier blocks. The other steps of the block attend to
    these pairs and to the block. All pairs stay stored, and the next block chooses again. The final keys and
    values of a block are computed against everything.

    With a shifted output head, the first step is the one after the step that unmasks the block's first token.
    On DiffusionGemma it is a canvas's first denoising step, in which all of the canvas counts as masks.

    Memory: Dense keys and values for all positions, and [n b s k d] for the chosen ones, with
    s = min(keep, l - 1) + block, or int((l - 1) * keep) + block for a fraction.

    Limits: It saves reads, not memory or computed tokens, and at most (steps per block)-fold.

    Equals exact decoding when: keep=1.0, or every block of the model takes one step.
    Differences: There is no released code. The softmax of the votes runs over earlier blocks and the block
      itself, which does not count toward `keep`. The choice runs after attention, not along with the MLP.

    Attributes:
      keep: KV pairs of earlier blocks to attend to, per layer and KV head: a number, or a fraction in [0, 1].
        The paper uses 512.
      votes: Positions of the block whose attention scores the pairs (`dllm_jax.eviction`). With a shifted
        output head, `PredictingVotes` takes those that predict masks. `MiddleVote` takes one mask (HERALD).
    """

    keep: PositiveInt | Fraction = 512
    votes: eviction.Voters = eviction.MaskVotes()

    def __post_init__(self):
        super().__post_init__()
        check_voters(self.votes, "by MAGE")

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
    ) -> Float[Array, "b k l"]:
        """The attention that each pair receives, averaged over the voters and a KV head's query heads."""
        return mean_attention(self.votes, layer, q, k, lse, mask, rows, canvas)
