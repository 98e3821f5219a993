"""Shapes that tests and benches of `ragged_attention` share."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call.

    Attributes:
      batch, queries, heads, kv_heads, head: Sizes of the queries [b q h d].
      dense: Number of dense pairs of each head.
      run: Number of kept pairs of a head, on average.
      widest: Upper bound of the kept pairs of a head.
      masked: Whether masks hide every tenth pair, dense or kept.
    """

    batch: int
    queries: int
    heads: int
    kv_heads: int
    head: int
    dense: int
    run: int
    widest: int
    masked: bool = False


SMALL = [  # interpreted on a CPU; the first three in every test run
    Shape(2, 5, 8, 2, 64, 70, 40, 150, masked=True),
    Shape(1, 150, 4, 4, 128, 150, 90, 300),  # more than one tile of queries
    Shape(2, 9, 6, 3, 32, 5, 3, 9),
    Shape(1, 1, 2, 2, 64, 1, 1, 1),
    Shape(1, 4, 2, 2, 24, 9, 4, 16),  # a head width that the kernel refuses
]
MODELS = {
    "llada-8b, MaskKV, prompt 1024": Shape(1, 256, 32, 32, 128, 256, 256, 1024),
    "llada-8b, MaskKV, prompt 32768": Shape(1, 256, 32, 32, 128, 256, 256, 8192),
    "llada-8b, EvictPrompt, prompt 4096, batch 8": Shape(8, 32, 32, 32, 128, 256, 256, 4096),
    "dream-7b, EvictPrompt, prompt 4096": Shape(1, 32, 28, 4, 128, 256, 256, 1024),
}
