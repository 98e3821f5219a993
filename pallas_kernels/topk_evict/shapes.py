"""Shapes that tests and benches of `topk_evict` share."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call: scores [batch, heads, length], at most `width` kept."""

    batch: int
    heads: int
    length: int
    width: int


SMALL = [  # interpreted on a CPU; the first in every test run
    Shape(3, 3, 257, 40),  # more than one tile of heads
    Shape(1, 7, 9, 4),
    Shape(1, 1, 1, 1),
    Shape(2, 4, 130, 130),
    Shape(1, 2, 300, 320),
]
MODELS = {
    "llada-8b, Sparse-dLLM, prompt 4096": Shape(1, 1, 4352, 2176),
    "llada-8b, MaskKV, prompt 4096": Shape(1, 32, 4096, 1024),
    "llada-8b, MaskKV, prompt 32768": Shape(1, 32, 32768, 1024),
    "dream-7b, batch 8": Shape(8, 4, 4096, 512),
}
