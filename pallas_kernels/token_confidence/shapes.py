"""Shapes that tests and benches of `token_confidence` share."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call.

    Attributes:
      batch, positions, width: of the hidden states [b c m].
      vocabulary: tokens of the head, padding included.
      valid: size of the vocabulary, or None for all of them.
      forbidden: token that may not be chosen, or None.
    """

    batch: int
    positions: int
    width: int
    vocabulary: int
    valid: int | None = None
    forbidden: int | None = None


SMALL = [  # interpreted on a CPU; the first two in every test run
    Shape(3, 11, 128, 2500, valid=2071, forbidden=2070),  # more than one tile of tokens
    Shape(2, 150, 128, 640, valid=512, forbidden=0),  # more than one tile of positions
    Shape(2, 5, 256, 1025, valid=1024, forbidden=77),
    Shape(1, 1, 128, 128),
    Shape(1, 7, 128, 300, forbidden=299),
]
MODELS = {  # decoding 32 positions of each sequence; all of a long response
    "llada-8b": Shape(1, 32, 4096, 126_464, forbidden=126_336),
    "llada-8b, batch 8": Shape(8, 32, 4096, 126_464, forbidden=126_336),
    "llada-8b, response": Shape(1, 1024, 4096, 126_464, forbidden=126_336),
    "dream-7b": Shape(1, 32, 3584, 152_064, forbidden=151_666),
}
