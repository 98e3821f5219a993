"""Marks of annotations, and the annotations that most fields have; `dllm_jax.options` says what they mean."""

import dataclasses
from typing import Annotated

from annotated_types import Ge, Gt, Interval, MinLen

from dllm_jax.traced import Count, Number, Traced


@dataclasses.dataclass(frozen=True)
class Odd:
    """Marks a whole number that must be odd."""


@dataclasses.dataclass(frozen=True)
class Int32:
    """Marks a whole number that programs hold in 32 bits, with a sign: it is below 2**31."""


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """Marks a tuple that holds one value per layer of the model, first layer first."""


@dataclasses.dataclass(frozen=True)
class NoneMeans:
    """Marks what None stands for, for the error message: `NoneMeans("never")`."""

    meaning: str


# Whole numbers end up in int32 arrays. Another value of a traced number compiles nothing again.
PositiveInt = Annotated[int, Ge(1), Int32()]
NonNegativeInt = Annotated[int, Ge(0), Int32()]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
TracedPositiveInt = Annotated[Count, Ge(1), Int32(), Traced()]
TracedNonNegativeInt = Annotated[Count, Ge(0), Int32(), Traced()]
TracedPositiveFloat = Annotated[Number, Gt(0), Traced()]
TracedNonNegativeFloat = Annotated[Number, Ge(0), Traced()]
TracedWidth = Annotated[Number, Ge(1e-18), Traced()]  # of a Gaussian: its square is not 0 in float32
TracedFraction = Annotated[Number, Interval(ge=0, le=1), Traced()]
TracedUnlessZero = Annotated[Number, Ge(0), Traced(unless=0)]
Seed = Annotated[int, Interval(ge=0, lt=2**32)]  # of a random key, which has no more bits
Profile = Annotated[tuple[float, ...], MinLen(1), PerLayer()]
