"""DSB's sliding block: its end goes on with every decoded token, its beginning with the first mask."""

import dataclasses
from typing import Annotated

from dllm_jax.options import NoneMeans, Options, PositiveInt


@dataclasses.dataclass(frozen=True)
class Sliding(Options):
    """Block schedule `generate(..., block=Sliding(32))`, in which the block slides over the response (DSB).

    The block begins at the first mask. Its end moves by one for every unmasked token, up to a length of
    `longest`. So a token that stays masked does not hold up later ones. Policies start a new round whenever
    `block` tokens have been unmasked. A sampler's fixed schedule is that of the whole response.

    Attributes:
      block: Length of the first block, and number of tokens of a round.
      longest: Maximum length of a block. None lets it grow with every unmasked token ("greedy"); `block`
        keeps it constant ("const").
    """

    block: PositiveInt = 32
    longest: Annotated[PositiveInt | None, NoneMeans("as long as it becomes")] = None


Blocks = PositiveInt | Sliding  # what `block` is wherever there is one: fixed blocks, or one that slides


def positions(block: Blocks) -> int:
    """Positions of the first block."""
    return block.block if isinstance(block, Sliding) else block
