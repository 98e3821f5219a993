"""Random invalid arguments of public functions and constructors: each must be refused by its name.

Every case takes a call that is right and breaks one of its arguments. What is invalid is known by the kind of
the argument; tests/test_options.py does the same to every field of options.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import bundled, eviction, policies, samplers
from dllm_jax.decoding.buckets import Ladder, geometric
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.roofline import Assumed, work
from dllm_jax.training import Batch, Batches, TrainConfig, prepare, train
from tests.campaigns.verdicts import Case, judge
from tests.models import spec, tiny

NAME = "arguments"
SAMPLE = 400


class Thing:
    """An object of a class that nobody knows."""

    def __repr__(self) -> str:
        return "Thing()"


class Values(NamedTuple):
    """Invalid values of a kind of argument: some fixed ones, and what draws another one."""

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


def integers(low: int = 1, none: bool = False) -> Values:
    """What is no whole number from `low` to 2^31 - 1; `none` is whether None is valid."""
    kinds = (2.5, 1.0, "4", True, np.float32(2), np.array([1, 2]), low - 1, 2**31)
    below = lambda rng: int(low - 1 - rng.integers(2**40))
    drawn = lambda rng: below(rng) if rng.random() < 0.5 else float(rng.normal())
    return Values((*ODD, *BEYOND, *kinds, *[None] * (not none)), drawn)


NUMBERS = Values((*ODD, *BEYOND, "0.5", True, 1e39, 1e-40, np.array([0.1, 0.2]), -1, -1e30, None))  # >= 0


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

# Of a model with the vocabulary [0, 61). Prompts of `generate` may be empty.
NO_TOKEN, ALL_PADDING = [[]], [[0, 0, 0], [1, 1, 1]]
IDS = Values(
    (
        Thing(), len, {}, {1, 2}, None, "abc", b"ab", 3, 2.5, math.nan, True, [], NO_TOKEN,
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
        [[None] * 3] * 2, [[1, 1, 0]] * 2, [[0, 1, 0]] * 2, ALL_PADDING, [[2, 1, 1]] * 2,
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


class Echo:
    """A tokenizer that any text is good for."""

    chat_template = "{{ messages }}"
    added_tokens_decoder: ClassVar[dict[int, str]] = {}

    def apply_chat_template(self, conversation, **options):
        return "text"

    def encode(self, text, **options):
        return [1, 2, 3]

    def decode(self, ids, **options):
        return ""


PAIR = [[1, 2, 3], [4, 5, 6]]
CONVERSATION = [{"role": "user", "content": "hello"}]
CONVERSATIONS = Values(
    (
        *ODD, None, 3, ["x"], [3], [{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": "x"}],
        [{"role": "user", "content": None}], [[]], [CONVERSATION, []], [CONVERSATION, "x"],
    )
)  # fmt: skip
MASKS = Values(
    (
        *ODD, 3, math.nan, True, np.ones((2, 2, 2)), np.zeros((1, 2, 2), bool), np.ones((2, 2), bool),
        np.full((1, 2, 2), 2), np.ones((0, 2, 2), bool),
    )
)  # fmt: skip
TOKENS = instances(
    np.ones((2, 3)),
    np.ones(3, int),
    np.array([[99]]),
    np.zeros((0, 3), int),
    but=(list,),  # lists are arrays
)
VALID = Values((*ODD, 3, True, np.ones((2, 3)), np.ones((3, 2), bool), np.ones(3, bool), [[True] * 3] * 2))


# By the names of arguments; what differs where another function has one of the name stands with its target.
KINDS: dict[str, Values] = {
    "model": MODEL, "prompt": PROMPTS, "answer": PROMPTS, "tokens": IDS, "prompts": IDS,
    "prompt_mask": PADDING, "token_mask": PADDING, "key": KEYS, "noise": NOISES, "masks": MASKS,
    "valid": VALID, "messages": CONVERSATIONS,
    "length": integers(), "block": integers(none=True), "steps": integers(none=True), "batch": integers(),
    "draws": integers(), "strata": integers(), "chunk": integers(), "bucket": integers(),
    "max_positions": integers(none=True), "cfg_scale": NUMBERS, "rope_factor": NUMBERS,
    "policy": POLICY, "sampler": SAMPLER, "widths": WIDTHS, "buckets": LADDERS, "nonfinite": HOW,
    "stop_at_eos": FLAGS, "trace": FLAGS, "padded": FLAGS, "progress": FLAGS, "check_finite": FLAGS,
    "separate_layers": FLAGS.but(None), "spec": SPEC, "layout": LAYOUT, "mesh": MESH, "rules": RULES,
    "dtype": DTYPES, "weights": WEIGHTS, "implementation": IMPLEMENTATIONS, "name": WORDS,
    "assumed": instances(Assumed), "tokenizer": instances("tiny-llada"),
    "config": instances(TrainConfig, {"steps": 3}), "optimizer": instances("adamw", none=True),
    "directory": instances(none=True, but=(str,)),
    "source": instances(Batches, lambda step: Batch(np.ones((2, 2), np.int32), np.ones((2, 2), np.int32))),
    "trainable": Values(
        ("layers", 3, 2.5, {"x": True}, {"layers": 3}, [True], {"layers": False}), lambda rng: rng.normal()
    ),
    "allow_changes": Values(("steps", 3, None, ["nothing"], Thing(), [[1]], [3])),
}  # fmt: skip


class Target(NamedTuple):
    """A call with arguments that are right; invalid are those that `KINDS` or `more` name.

    `named` has the words that may stand in messages for arguments that are called otherwise there.
    """

    call: Callable[..., Any]
    right: dict[str, Any]
    more: dict[str, Values] = {}  # noqa: RUF012
    named: dict[str, tuple[str, ...]] = {}  # noqa: RUF012

    @property
    def wrong(self) -> dict[str, Values]:
        """Invalid values of each argument."""
        own = inspect.signature(self.call).parameters
        return {name: kind for name, kind in KINDS.items() if name in own} | self.more


def targets() -> Iterator[Target]:
    """Generation and likelihoods in their forms, what loads, trains and predicts, constructors."""
    model, layout = tiny("llada"), dj.Layout(prompt=3, response=4, block=2, steps=4)
    own = dict(model=model, key=jax.random.key(0), sampler=samplers.RandomOrder())
    arrays = {"prompt_mask": PADDING.but(ALL_PADDING), "prompt": PROMPTS.but(NO_TOKEN)}
    options, rung = own | dict(length=4, block=2), {"buckets": ("buckets", "largest bucket")}
    yield Target(dj.generate, options | dict(prompt=PAIR), arrays, rung)
    yield Target(dj.infill, own | dict(tokens=[[1, MASK_ID, 3]] * 2))
    warm = {
        name: KINDS[name] for name in ("length", "block", "steps", "policy", "sampler", "trace", "widths")
    }
    warm |= {"ladder": LADDERS.but(LADDERS.fixed[-1]), "buckets": instances(), "unknown": instances()}
    yield Target(dj.warmup, options | dict(ladder=Ladder((4,))), warm)
    chat = dict(model=model, tokenizer=Echo(), messages=CONVERSATION, length=4)
    yield Target(dj.chat, chat, {"policy": POLICY}, rung)
    yield Target(dj.explain_kernels, dict(model=model, batch=1, layout=layout), {"policy": POLICY.but(None)})
    ids = dict(model=model, prompt=PAIR, answer=[[1, 2], [3, 4]], key=jax.random.key(0), draws=2, strata=2)
    yield Target(dj.log_likelihood, ids)
    for call in (dj.forward, dj.hidden_states):
        yield Target(call, dict(model=model, tokens=np.asarray(PAIR)), {"tokens": TOKENS})
    yield Target(eviction.calibrate, dict(model=model, prompts=PAIR, length=4))
    predicted = dict(spec=spec("llada"), policy=policies.DualCache(), layout=layout)
    yield Target(work, predicted, {"dtype": Values(("x", Thing(), "float33"))})

    yield Target(dj.load, dict(path=bundled.path("tiny-llada")))
    yield Target(dj.abstract, dict(shape=spec("llada")), {"shape": instances(ModelSpec, but=(str,))})
    yield Target(dj.Model, dict(params=model.params, spec=model.spec))
    yield Target(bundled.path, dict(name="tiny-llada"))
    named = {"name": ("preset", "among"), "checkpoint": ("preset",)}
    yield Target(lambda name: dj.presets[name], dict(name="dkv-decode"), named=named)
    yield Target(dj.presets.model_spec, dict(name="llada-8b"), named=named)
    recipe = dict(checkpoint="llada-8b-instruct", task="gsm8k")
    yield Target(dj.presets.recipe, recipe, {"checkpoint": WORDS, "task": WORDS}, named)
    right = dict(model=model, config=TrainConfig(steps=1, warmup=0))
    yield Target(prepare, right)
    batch = lambda step: Batch(np.ones((2, 2), np.int32), np.ones((2, 2), np.int32))
    yield Target(train, right | dict(source=Batches(batch), progress=False))

    yield Target(dj.Layout.of, dict(prompt=3, length=4, block=2, steps=4), {"prompt": integers(0)})
    ladder = {"smallest": integers(2), "largest": integers(4)}
    yield Target(geometric, dict(smallest=4, largest=8), ladder)
    seeds = Values((*ODD, -1, 2.5, None, True))
    evaluated = {"length": integers(none=True), "seed": seeds}
    yield Target(Decoding, dict(length=8, block=4, steps=8), evaluated)


def cases(seed: int) -> Iterator[Case]:
    """Broken calls without end; each argument as often as any other."""
    arguments = [(target, name, kind) for target in targets() for name, kind in target.wrong.items()]
    for number in itertools.count():
        rng = np.random.default_rng((seed, number))
        target, name, kind = arguments[rng.integers(len(arguments))]
        value = kind.one(rng)
        description = f"seed {seed}, case {number}: {target.call.__qualname__}({name}={written(value)})"
        call = functools.partial(target.call, **target.right | {name: value})
        yield Case(description, functools.partial(judge, call, target.named.get(name, (name,)), valid=False))


def written(value: Any) -> str:
    """The value in a line."""
    try:
        return " ".join(repr(value).split())[:100]
    except ValueError:
        return "<a whole number of thousands of digits>"
