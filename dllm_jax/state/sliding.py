"""Block schedules: a block that slides over the response (DSB), blocks that end at delimiters (AdaBlock)."""

import dataclasses
from typing import Annotated

from annotated_types import MinLen

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NoneMeans, NonNegativeFloat, NonNegativeInt, Options, PositiveInt


@dataclasses.dataclass(frozen=True)
class Sliding(Options):
    """Block schedule `generate(..., block=Sliding(32))`, in which the block slides over the response (DSB).

    The block begins at the first mask. Its end moves by one for every unmasked token, up to a length of
    `longest`. So a token that stays masked does not hold up later ones within that length. Policies start a
    new round whenever `block` tokens have been unmasked. A sampler's fixed schedule is that of the whole
    response.

    Attributes:
      block: Length of the first block, unless `longest` is less, and number of tokens of a round.
      longest: Maximum length of a block. None lets it grow with every unmasked token ("greedy"); `block`
        keeps it constant ("const").
    """

    block: PositiveInt = 32
    longest: Annotated[PositiveInt | None, NoneMeans("as long as it becomes")] = None


@dataclasses.dataclass(frozen=True)
class AdaBlock(Options):
    """Block schedule `generate(..., block=AdaBlock(32, delimiters=(198,)))`: blocks end at a delimiter.

    AdaBlock-dLLM (arXiv:2509.26432). The first step of a block sets its end: after the position of the window
    whose most likely token is a delimiter, with the largest probability. Without one that reaches the
    threshold the block has `block` positions. It costs no forward pass. It needs a model without blocks of
    its own, a sampler that stays in a block until nothing is masked (`UntilDone`) and revises no token, and a
    policy that promises `fixed_within_blocks`, such as `PrefixCache` or `DualCache`. `infill` does not
    support it.

    Equals fixed blocks when: threshold is above 1.

    Differences: By default [MASK] is not chosen. On Dream, `DualCache` predicts the first position of a block
      as any other; the reference implementation unmasks it first, unconditionally.

    Attributes:
      block: Length of a block without a delimiter; the last one may be shorter.
      delimiters: Token ids that end a block, such as those of `dj.delimiters(tokenizer)`. The authors have a
        newline, 198, for LLaDA.
      threshold: Minimum probability of a delimiter. The authors have 0.3 for LLaDA and 0.5 for Dream.
      window: Number of positions that are searched for a delimiter, from the block's first on. None is a
        quarter of the response.
    """

    block: PositiveInt = 32
    delimiters: Annotated[tuple[NonNegativeInt, ...], MinLen(1)] = dataclasses.field(default=(), kw_only=True)
    threshold: NonNegativeFloat = dataclasses.field(default=0.3, kw_only=True)
    window: Annotated[PositiveInt | None, NoneMeans("a quarter of the response")] = dataclasses.field(
        default=None, kw_only=True
    )

    def __post_init__(self):
        if self.delimiters == ():
            rule = "must be 1 or more values, each a whole number: token ids at which a block may end"
            raise ValueError(f"delimiters=() {rule}. Use delimiters=dj.delimiters(tokenizer).")
        super().__post_init__()

    def searched(self, response: int) -> int:
        """How many positions are searched for a delimiter, in a response of so many."""
        return min(response // 4 if self.window is None else self.window, response)

    def check(self, spec: ModelSpec):
        """Raises ValueError for a delimiter that no position is decoded to."""
        for token in self.delimiters:
            if token >= spec.vocab or spec.undecided(token):
                raise ValueError(
                    f"delimiters holds {token}, which must be an id of the vocabulary [0, {spec.vocab}) "
                    f"but the mask's, {spec.mask_id}. Use dj.delimiters(tokenizer)."
                )


BlockSchedule = Sliding | AdaBlock
Blocks = PositiveInt | BlockSchedule  # what `block` is wherever there is one: fixed blocks, or a schedule


def positions(block: Blocks) -> int:
    """Positions of the first block, where nothing ends it earlier."""
    return block.block if isinstance(block, BlockSchedule) else block
