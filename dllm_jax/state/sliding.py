"""DSB's sliding block: its end goes on with every decoded token, its beginning with the first mask."""

import dataclasses
from typing import Annotated

from dllm_jax.options import NoneMeans, Options, PositiveInt


@dataclasses.dataclass(frozen=True)
class Sliding(Options):
    """A block schedule, `generate(..., block=Sliding(32))`: the block slides over the response.

    The block begins at the first mask and ends `block` positions behind as many as have been decoded, but at
    most `longest` behind its beginning (DSB, released code lizhuo-luo/DSB). So a mask that stays undecided
    holds up nothing behind it. Whatever a policy does when a block begins, it does here whenever `block`
    tokens have been decoded since the last time; a sampler's fixed schedule is that of the whole response.

    Attributes:
      block: positions of the first block, and tokens of a round.
      longest: positions of any block; None lets it grow with what is decoded ("greedy"), `block` keeps it
        as it is ("const").
    """

    block: PositiveInt = 32
    longest: Annotated[PositiveInt | None, NoneMeans("as long as it becomes")] = None


Blocks = PositiveInt | Sliding  # what `block` is wherever there is one: fixed blocks, or one that slides


def positions(block: Blocks) -> int:
    """Positions of the first block."""
    return block.block if isinstance(block, Sliding) else block
