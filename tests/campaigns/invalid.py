"""Values that arguments of a kind must refuse: some that have caused trouble, and random ones."""

import math
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import annotated_types as marks
import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.buckets import Ladder
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Int32, PerLayer
from dllm_jax.traced import Traced
from tests.models import tiny


class Thing:
    """An object of a class that nobody knows."""

    def __repr__(self) -> str:
        return "Thing()"


class Values(NamedTuple):
    """Invalid values of a kind of argument.

    Attributes:
      fixed: some of them.
      drawn: makes another one.
    """

    fixed: tuple[Any, ...]
    drawn: Callable[[np.random.Generator], Any] = lambda rng: "".join(map(chr, rng.integers(33, 127, 8)))

    def one(self, rng: np.random.Generator) -> Any:
        """One of them."""
        index = rng.integers(len(self.fixed) + 1)
        return self.drawn(rng) if index == len(self.fixed) else self.fixed[index]

    def but(self, *values: Any) -> "Values":
        """Without some, which are valid after all."""
        return self._replace(fixed=tuple(each for each in self.fixed if not any(each is v for v in values)))


ODD = (Thing(), Thing, len, {}, {"a": 1}, b"1", 1j, [], [[1]], math.nan, "", "x", (), object)
BEYOND = (math.inf, -math.inf, 10**400, 10**5000)


def odd_but(*kinds: type) -> tuple[Any, ...]:
    """What hardly any argument takes, without instances of these kinds."""
    return tuple(value for value in ODD if not isinstance(value, kinds))


def integers(low: int = 1, none: bool = False, high: int = 2**31 - 1) -> Values:
    """What is no whole number in a range; `none` is whether None is valid."""
    kinds = (2.5, 1.0, "4", True, np.float32(2), np.array([1, 2]), low - 1, high + 1)
    below = lambda rng: int(low - 1 - rng.integers(2**40))
    drawn = lambda rng: below(rng) if rng.random() < 0.5 else float(rng.normal())
    return Values((*ODD, *BEYOND, *kinds, *[None] * (not none)), drawn)


def floats(low: float = -math.inf, high: float = math.inf, none: bool = False) -> Values:
    """What is no number in a range."""
    outside = (*([low - 1, -1e30] if low > -math.inf else []), *([high + 1, 1e30] if high < math.inf else []))
    kinds = ("0.5", True, 1e39, 1e-40, np.array([0.1, 0.2]))
    return Values((*ODD, *BEYOND, *kinds, *outside, *[None] * (not none)))


def instances(*near: Any, none: bool = False, but: tuple[type, ...] = ()) -> Values:
    """What is no instance of a class: that class itself, names, numbers, `near`; `but` kinds are valid."""
    return Values((*odd_but(*but), 3, 2.5, True, *near, *[None] * (not none)), lambda rng: rng.normal())


FLAGS = Values((*ODD, 0, 1, None, "yes", "True", 2.5, np.array([True, False])))
WORDS = Values((*ODD, 3, "unknown", None), lambda rng: "".join(map(chr, rng.integers(97, 123, 9))))
DTYPES = Values(("float16", "x", 3.5, Thing(), int, jnp.int8, "int8", "float33"))
IMPLEMENTATIONS = Values(("cuda", 3, True, Thing()))
WEIGHTS = Values(("int4", 3, True, Thing(), "float32"))
HOW = Values((*ODD, "error", None, True, 3))
MODEL = instances(dj.Model, "tiny-llada")
POLICY = instances(policies.DualCache, "DualCache", samplers.Confidence())
SAMPLER = instances(samplers.Threshold, "Threshold", policies.DualCache())
LAYOUT = instances(dj.Layout, (4, 4, 4, 4))
SPEC = instances(ModelSpec, "llada-8b")
MESH = instances("tp", (2, 2), jax.devices, none=True)
RULES = instances(dj.MeshRules, "dp")
LADDERS = Values((*ODD, 3, (64,), [64], Ladder, Ladder((1,))))
MASK_ID, VOCAB = tiny("llada").spec.mask_id, tiny("llada").spec.vocab

# Of a model with the vocabulary [0, 61).
IDS = Values(
    (
        Thing(), len, {}, {1, 2}, None, "abc", b"ab", 3, 2.5, math.nan, True, [], [[]], [[1], [2, 3]],
        [["a"]], [[None]], [[1.5]], [[True]], [[[1]], [2]], [[1], 2], [[2**70]], [[-1]], [[VOCAB]],
        [[10**6]], [[1j]], [[-(2**31)]], np.zeros((1, 2, 3), int), np.zeros((0, 3), int), np.array([["x"]]),
        np.ones((2, 2)), jnp.ones((2, 2)), jnp.zeros((1, 1, 1), int), np.array(3), [[1, "2"]], range(0),
        [Thing()], (i for i in (1, 2)),
    ),
    lambda rng: rng.integers(VOCAB, 2**31, (1, 3)) * rng.choice([-1, 1]),
)  # fmt: skip
PROMPTS = Values((*IDS.fixed, [[MASK_ID, 1]]), IDS.drawn)

# For two sequences of three positions.
PADDING = Values(
    (
        Thing(), len, {}, "abc", 3, 2.5, math.nan, True, [], [[]], [[1], [1, 1]], [["a", "b", "c"]] * 2,
        [[None] * 3] * 2, [[1, 1, 0]] * 2, [[0, 1, 0]] * 2, [[0, 0, 0], [1, 1, 1]], [[2, 1, 1]] * 2,
        [[-1, 1, 1]] * 2, np.ones((2, 3)), np.ones((3, 2), bool), np.ones((2, 3, 1), bool), np.array("x"),
        [[math.nan] * 3] * 2,
    )
)  # fmt: skip
KEYS = Values(
    (
        *ODD, 3, 2.5, (1, 2), jax.random.key, np.zeros(2), np.zeros(2, np.int32), np.zeros(3, np.uint32),
        np.uint32(3), jnp.zeros((2, 3)), jax.random.split(jax.random.key(0), 5),
        jnp.zeros((5, 2), jnp.uint32),
    )
)  # fmt: skip
_RECORDED = samplers.RecordedNoise
NOISES = Values(
    (
        *ODD, 3, 2.5, _RECORDED, _RECORDED(1, 2), _RECORDED(None, "x"), _RECORDED(jnp.zeros(3), jnp.zeros(3)),
        _RECORDED(jnp.float32(0), jnp.zeros((1, 2, 7))), _RECORDED(jnp.float32(0), jnp.zeros((9, 2, 7), int)),
        samplers.KeyNoise, samplers.KeyNoise(3), samplers.KeyNoise(jnp.zeros(2)),
        samplers.KeyNoise(jax.random.split(jax.random.key(0), 5)),
    )
)  # fmt: skip
WIDTHS = Values(
    (
        *odd_but(list, tuple), 3, 2.5, (0,), (-1,), [2.5], [None], ((1,),), ("a",), (True,), (2**31,), {1},
        (10**400,), np.ones((2, 2), int), np.array([0.5]), [math.nan],
    )
)  # fmt: skip


def of_field(hint: Any) -> Values | None:
    """What a field of options refuses, by its annotation; None for kinds that are not checked."""
    kind, none, found = taken_apart(hint)
    lows = [m.ge if isinstance(m, marks.Ge) else m.gt for m in found if isinstance(m, marks.Ge | marks.Gt)]
    highs = [m.le if isinstance(m, marks.Le) else m.lt for m in found if isinstance(m, marks.Le | marks.Lt)]
    low, high = max(lows, default=-math.inf), min(highs, default=math.inf)
    nothing = [None] * (not none)
    if kind is bool:
        return FLAGS
    if kind is float:
        return floats(low, high, none)
    if kind is int and high == math.inf and not any(isinstance(m, Int32 | Traced) for m in found):
        return Values((*ODD, 2.5, True, math.nan, *([low - 1] if low > -math.inf else []), *nothing))
    if kind is int:
        excluded = any(isinstance(m, marks.Lt) for m in found)
        return integers(int(low), none, int(high) - excluded if high < math.inf else 2**31 - 1)
    if kind is str:
        return Values((*odd_but(str), 3, True, *nothing), lambda rng: rng.normal())
    if typing.get_origin(kind) is typing.Literal:
        return Values((*ODD, 3, True, "unknown", *nothing))
    if typing.get_origin(kind) is tuple:
        some = any(isinstance(m, marks.MinLen | PerLayer) for m in found)
        odd = ODD if some else odd_but(list, tuple)
        return Values((*odd, 3, True, [Thing()], ({},), np.array(3), *nothing))
    return instances(kind, none=none) if isinstance(kind, type) and kind is not object else None


def taken_apart(hint: Any) -> tuple[Any, bool, list[Any]]:
    """The kind alone, whether None is allowed, and the marks."""
    if typing.get_origin(hint) is typing.Annotated:
        kind, none, found = taken_apart(hint.__origin__)
        for mark in hint.__metadata__:
            found = [*found, *(mark if isinstance(mark, marks.GroupedMetadata) else [mark])]
        return kind, none, found
    arguments = typing.get_args(hint)
    if arguments and typing.get_origin(hint) not in (tuple, typing.Literal):
        kind, none, found = taken_apart(arguments[0])
        return kind, none or type(None) in arguments, found
    return hint, False, []
