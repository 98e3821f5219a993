"""The guard against NaN and infinity: a sequence whose logits hold one ends with that step, and is told of.

Its other sequences go on: what is not finite never leaves a sequence, as attention reads no other's keys.
"""

from typing import Literal


class NonFiniteWarning(RuntimeWarning):
    """Sequences of a generation ended early, because their logits held NaN or infinity."""


NonFinite = Literal["warn", "raise", "ignore"]
