"""Shapes that tests and benches of `experts` share."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call: tokens [tokens, width], each sent to `per_token` of `count` experts, `hidden` wide."""

    tokens: int
    per_token: int
    count: int
    width: int
    hidden: int


SMALL = [  # interpreted on a CPU; the first two in every test run
    Shape(37, 3, 5, 40, 24),  # several tiles of an expert, widths that no tile divides
    Shape(9, 2, 12, 128, 128),
    Shape(70, 4, 4, 16, 144),  # every token to every expert
    Shape(1, 1, 3, 8, 5),
]
MODELS = {
    "llada2-mini, a block of 32": Shape(32, 8, 256, 2048, 512),
    "llada2-mini, 1280 positions": Shape(1280, 8, 256, 2048, 512),
    "llada-moe-7b, a block of 32": Shape(32, 8, 64, 2048, 1024),
    "llada-moe-7b, 4096 positions": Shape(4096, 8, 64, 2048, 1024),
    "sdar-moe, a block of 4, batch 8": Shape(32, 8, 128, 2048, 768),
}
