"""Shapes that tests and benches of `sparse_gather` share."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call: keys and values [batch, slots, kv_heads, head], at most `width` kept of each head."""

    batch: int
    slots: int
    kv_heads: int
    head: int
    width: int


SMALL = [  # interpreted on a CPU; the first two in every test run
    Shape(2, 19, 3, 64, 7),
    Shape(1, 300, 2, 128, 70),  # more than one chunk of slots, more than one tile of copies
    Shape(1, 33, 2, 64, 40),
    Shape(1, 1, 1, 64, 1),
    Shape(2, 130, 4, 128, 65),
    Shape(1, 17, 2, 24, 8),  # a width that the kernel for GPUs refuses
]
MODELS = {
    "llada-8b, Sparse-dLLM, prompt 4096": Shape(1, 4352, 32, 128, 2160),
    "llada-8b, MaskKV, prompt 4096": Shape(1, 4096, 32, 128, 1024),
    "dream-7b, batch 8": Shape(8, 4096, 4, 128, 512),
    "llada-8b, MaskKV, prompt 16384": Shape(1, 16384, 32, 128, 1024),
}
