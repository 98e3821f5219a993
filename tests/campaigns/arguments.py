"""Random invalid arguments of public functions and constructors: each must be refused by its name.

Every case takes a call that is right and breaks one of its arguments. What is invalid is known by the kind of
the argument; tests/test_options.py does the same to every field of options.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import embedded, eviction, policies, samplers
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


class Target(NamedTuple):
    """A call by name with arguments that are right, and invalid values of some of them.

    `named` has the words that may stand in messages for arguments that are called otherwise there.
    """

    name: str
    call: Callable[..., Any]
    right: dict[str, Any]
    wrong: dict[str, Values]
    named: dict[str, tuple[str, ...]] = {}  # noqa: RUF012


class Echo:
    """A tokenizer that any text is good for."""

    chat_template = "{{ messages }}"
    added_tokens_decoder: ClassVar[dict[int, str]] = {}

    def apply_chat_template(self, conversation, **options):
        return {"input_ids": [1, 2, 3]}

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
TOKENS = instances([[1, 2]], np.ones((2, 3)), np.ones(3, int), np.array([[99]]), np.zeros((0, 3), int))
VALID = Values((*ODD, 3, True, np.ones((2, 3)), np.ones((3, 2), bool), np.ones(3, bool), [[True] * 3] * 2))


def decoding() -> Iterator[Target]:
    """Generation in its forms."""
    model = tiny("llada")
    own = dict(model=model, key=jax.random.key(0), sampler=samplers.RandomOrder())
    options = own | dict(length=4, block=2)
    common = {
        "model": MODEL, "block": integers(none=True), "steps": integers(none=True), "policy": POLICY,
        "sampler": SAMPLER, "noise": NOISES, "trace": FLAGS, "widths": WIDTHS,
        "nonfinite": HOW,
    }  # fmt: skip
    whole = common | {"length": integers(), "stop_at_eos": FLAGS, "buckets": LADDERS}
    arrays = {"key": KEYS, "prompt_mask": PADDING.but(ALL_PADDING), "prompt": PROMPTS.but(NO_TOKEN)}
    named = {"buckets": ("buckets", "highest rung")}
    yield Target("generate", dj.generate, options | dict(prompt=PAIR), whole | arrays, named)
    infilled = {"tokens": IDS, "key": KEYS, "token_mask": PADDING}
    yield Target("infill", dj.infill, own | dict(tokens=[[1, MASK_ID, 3]] * 2), common | infilled)
    ladders = {"ladder": LADDERS.but(LADDERS.fixed[-1]), "batch": integers()}
    foreign = {"buckets": instances(), "unknown": instances()}
    warm = common | {"length": integers(), "stop_at_eos": FLAGS} | ladders | foreign
    yield Target("warmup", dj.warmup, options | dict(ladder=Ladder((4,))), warm)
    talk = {"model": MODEL, "tokenizer": instances("tiny-llada"), "messages": CONVERSATIONS, "policy": POLICY}
    yield Target("chat", dj.chat, dict(model=model, tokenizer=Echo(), messages=CONVERSATION, length=4), talk)
    layout = dj.Layout(prompt=3, response=4, block=2, steps=4)
    explained = {"model": MODEL, "batch": integers(), "layout": LAYOUT, "policy": POLICY.but(None)}
    yield Target("explain", dj.explain, dict(model=model, batch=1, layout=layout), explained)


def scoring() -> Iterator[Target]:
    """Likelihoods, full passes and what is measured or predicted."""
    model, layout = tiny("llada"), dj.Layout(prompt=3, response=4, block=2, steps=4)
    ids = dict(model=model, prompt=PAIR, answer=[[1, 2], [3, 4]], key=jax.random.key(0), draws=2, strata=2)
    of_ids = {"prompt": PROMPTS, "answer": PROMPTS, "prompt_mask": PADDING}
    drawn = {"draws": integers(), "strata": integers(), "key": KEYS, "masks": MASKS}
    likelihood = {"model": MODEL, "cfg_scale": NUMBERS, "chunk": integers()} | of_ids | drawn
    yield Target("log_likelihood", dj.log_likelihood, ids, likelihood)
    full = {"model": MODEL, "tokens": TOKENS, "valid": VALID}
    for name, call in (("forward", dj.forward), ("hidden_states", dj.hidden_states)):
        yield Target(name, call, dict(model=model, tokens=np.asarray(PAIR)), full)
    asked = {"prompts": IDS, "prompt_mask": PADDING}
    calibrated = {"model": MODEL, "length": integers()} | asked
    yield Target("calibrate", eviction.calibrate, dict(model=model, prompts=PAIR, length=4), calibrated)
    predicted = {
        "spec": SPEC, "policy": POLICY, "layout": LAYOUT, "batch": integers(),
        "assumed": instances(Assumed), "dtype": Values(("x", Thing(), "float33")),
    }  # fmt: skip
    right = dict(spec=spec("llada"), policy=policies.DualCache(), layout=layout)
    yield Target("roofline.work", work, right, predicted)


def models() -> Iterator[Target]:
    """Where models come from, published settings, and training."""
    model = tiny("llada")
    form = {
        "mesh": MESH, "rules": RULES, "dtype": DTYPES, "weights": WEIGHTS,
        "separate_layers": FLAGS.but(None), "implementation": IMPLEMENTATIONS,
    }  # fmt: skip
    loaded = form | {"rope_factor": NUMBERS, "check_finite": FLAGS}
    yield Target("load", dj.load, dict(path=embedded.path("tiny-llada")), loaded)
    described = form | {"shape": instances(ModelSpec, but=(str,))}
    yield Target("abstract", dj.abstract, dict(shape=spec("llada")), described)
    parts = {"spec": SPEC, "rules": RULES, "implementation": IMPLEMENTATIONS}
    yield Target("Model", dj.Model, dict(params=model.params, spec=model.spec), parts)
    yield Target("embedded.path", embedded.path, dict(name="tiny-llada"), {"name": WORDS})
    named = {"name": ("preset", "among"), "checkpoint": ("preset",)}
    yield Target("presets", lambda name: dj.presets[name], dict(name="dkv-decode"), {"name": WORDS}, named)
    spec_of = dj.presets.model_spec
    yield Target("presets.model_spec", spec_of, dict(name="llada-8b"), {"name": WORDS}, named)
    recipe = dict(checkpoint="llada-8b-instruct", task="gsm8k")
    yield Target("presets.recipe", dj.presets.recipe, recipe, {"checkpoint": WORDS, "task": WORDS}, named)

    batch = lambda step: Batch(np.ones((2, 2), np.int32), np.ones((2, 2), np.int32))
    right = dict(model=model, config=TrainConfig(steps=1, warmup=0))
    trees = "layers", 3, 2.5, {"x": True}, {"layers": 3}, [True], {"layers": False}
    prepared = {
        "model": MODEL, "config": instances(TrainConfig, {"steps": 3}), "mesh": MESH,
        "trainable": Values(trees, lambda rng: rng.normal()), "optimizer": instances("adamw", none=True),
    }  # fmt: skip
    yield Target("prepare", prepare, right, prepared)
    run = {
        "source": instances(Batches, batch), "directory": instances(none=True, but=(str,)),
        "allow_changes": Values(("steps", 3, None, ["nothing"], Thing(), [[1]], [3])), "progress": FLAGS,
    }  # fmt: skip
    yield Target("train", train, right | dict(source=Batches(batch), progress=False), prepared | run)


def settings() -> Iterator[Target]:
    """Constructors that are no options, or take more."""
    shape = {"length": integers(), "block": integers(none=True), "steps": integers(none=True)}
    layout = shape | {"prompt": integers(0), "padded": FLAGS}
    yield Target("Layout.of", dj.Layout.of, dict(prompt=3, length=4, block=2, steps=4), layout)
    ladder = {"smallest": integers(2), "largest": integers(4)}
    yield Target("geometric", geometric, dict(smallest=4, largest=8), ladder)
    evaluated = shape | {
        "length": integers(none=True), "policy": POLICY, "sampler": SAMPLER, "stop_at_eos": FLAGS,
        "seed": Values((*ODD, -1, 2.5, None, True)), "batch": integers(), "bucket": integers(),
        "max_positions": integers(none=True),
    }  # fmt: skip
    yield Target("Decoding", Decoding, dict(length=8, block=4, steps=8), evaluated)


def cases(seed: int) -> Iterator[Case]:
    """Broken calls without end; each argument as often as any other."""
    targets = (*decoding(), *scoring(), *models(), *settings())
    arguments = [(target, name) for target in targets for name in target.wrong]
    for number in itertools.count():
        rng = np.random.default_rng((seed, number))
        target, name = arguments[rng.integers(len(arguments))]
        value = target.wrong[name].one(rng)
        description = f"seed {seed}, case {number}: {target.name}({name}={written(value)})"
        call = functools.partial(target.call, **target.right | {name: value})
        yield Case(description, functools.partial(judge, call, target.named.get(name, (name,)), valid=False))


def written(value: Any) -> str:
    """The value in a line."""
    try:
        return " ".join(repr(value).split())[:100]
    except ValueError:
        return "<a whole number of thousands of digits>"
