"""Options: frozen dataclasses whose annotations give the range of each field, checked by one base class.

    @dataclasses.dataclass(frozen=True)
    class Pooling(Options):
        window: Annotated[int, Ge(1), Odd()] = 3
        keep: Fraction = 0.5
        side: Literal["both", "prefix"] = "both"
        every: Annotated[PositiveInt | None, NoneMeans("never")] = 8

    Pooling(keep=2)  # ValueError: keep=2 must be a number in [0, 1]

Python itself checks no annotation, and a wrong value may do something else than it says: a refresh every 2.5
steps, counted in whole ones, is one every 5. The annotation decides the kind of value, marks inside
`Annotated` narrow it (bounds are those of the package annotated-types), and `| None` allows None:

- `int`: a whole number of Python or NumPy. Reads Ge, Gt, Le, Lt, Interval, `Odd`, `Int32`.
- `float`: a finite number, which a float32 holds. Reads Ge, Gt, Le, Lt, Interval.
- `bool`: True or False, not 0 or 1; and no bool is a number.
- `Literal["a", "b"]`: one of the words.
- `tuple[kind, ...]`: any number of values of one of these kinds. Reads MinLen, `PerLayer`.
- a class: an instance of it, such as the part of a policy.
- a union: a value of any of these kinds; their numbers are never traced.

An `int` or a `float` may be `Traced`: its annotation then allows an array too (`Count`, `Number`), and the
number is an argument of compiled programs, not part of them; see `dllm_jax.traced`.

Any other annotation (`Any`, a union with it, `Callable[...]`, a name that exists only inside a
function whose module postpones annotations) leaves its field unchecked.
"""

from dllm_jax.options.base import Arrays, Options, check_names, check_numbers, refuse
from dllm_jax.options.hints import ShortSignature, call, short_help
from dllm_jax.options.rules import (
    LARGEST,
    Fraction,
    Int32,
    NoneMeans,
    NonNegativeFloat,
    NonNegativeInt,
    Odd,
    PerLayer,
    PositiveFloat,
    PositiveInt,
    Profile,
    Seed,
    TracedFraction,
    TracedNonNegativeFloat,
    TracedNonNegativeInt,
    TracedPositiveFloat,
    TracedPositiveInt,
    TracedUnlessZero,
    TracedWidth,
    absolute,
    check_argument,
    local_path,
    shown,
)

__all__ = [
    "LARGEST", "Arrays", "Fraction", "Int32", "NonNegativeFloat", "NonNegativeInt", "NoneMeans", "Odd",
    "Options", "PerLayer", "PositiveFloat", "PositiveInt", "Profile", "Seed", "ShortSignature",
    "TracedFraction",
    "TracedNonNegativeFloat", "TracedNonNegativeInt", "TracedPositiveFloat", "TracedPositiveInt",
    "TracedUnlessZero", "TracedWidth", "absolute", "call", "check_argument", "check_names", "check_numbers",
    "local_path", "refuse", "short_help", "shown",
]  # fmt: skip
