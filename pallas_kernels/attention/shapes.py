"""Shapes that tests and benches of the attention operations share."""

from typing import Literal, NamedTuple


class Shape(NamedTuple):
    """One call.

    Attributes:
      batch, queries, heads, kv_heads, head: Sizes of the queries [b q h d].
      slots: Number of slots s of the keys and values [b s k d].
      visible: Restriction of the slots: nothing, a mask [b 1 1 s], one per KV head [b k 1 s], one per query
        position [b 1 q s] (statistics take none), lengths [b k], or both.
    """

    batch: int
    queries: int
    heads: int
    kv_heads: int
    head: int
    slots: int
    visible: Literal["all", "keys", "keys per head", "keys per query", "lengths", "both"] = "all"


SMALL = [  # interpreted on a CPU; the first three in every test run
    Shape(2, 5, 8, 2, 128, 150, "both"),
    Shape(2, 9, 14, 2, 64, 700, "keys per head"),  # more than one tile of slots
    Shape(1, 150, 4, 1, 64, 70, "lengths"),  # more than one tile of queries
    Shape(1, 3, 7, 1, 128, 9, "keys"),
    Shape(1, 8, 2, 2, 128, 128),
    Shape(1, 1, 4, 4, 64, 1, "lengths"),
    Shape(2, 3, 4, 4, 24, 131, "keys"),  # a head width that the kernel for GPUs refuses
]
DECODING = {  # 32 queries of each sequence
    "llada-8b, prompt 1024": Shape(1, 32, 32, 32, 128, 1312),
    "llada-8b, prompt 32768": Shape(1, 32, 32, 32, 128, 33024, "keys"),
    "llada-8b, MaskKV, batch 8": Shape(8, 32, 32, 32, 128, 1312, "keys per head"),
    "dream-7b, batch 8": Shape(8, 32, 28, 4, 128, 4352, "lengths"),
}
# A finished block of 32 and the next one, which alone may see all of them.
ENTERING = {"sdar-8b, prompt 4096, entering a block": Shape(1, 64, 32, 8, 128, 4224, "keys per query")}
MODELS = {**DECODING, **ENTERING, "llada-8b, prompt 4096, first step": Shape(1, 4352, 32, 32, 128, 4352)}
