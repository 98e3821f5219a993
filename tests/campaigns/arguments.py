"""Random invalid arguments of public functions and constructors: each must be refused by its name.

Every case takes a call that is right and breaks one of its arguments. What is invalid is known by the kind of
the argument, for fields of options from their annotations (`invalid`).
"""

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax import embedded, eviction, policies, samplers
from dllm_jax.decoding.buckets import Ladder, geometric
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.roofline import Assumed, work
from dllm_jax.training import Batch, Batches, TrainConfig, prepare, train
from tests.campaigns import invalid
from tests.campaigns.invalid import (
    FLAGS,
    MODEL,
    ODD,
    POLICY,
    SAMPLER,
    WORDS,
    Thing,
    Values,
    floats,
    instances,
    integers,
)
from tests.campaigns.verdicts import Case, Verdict, judge
from tests.models import spec, tiny
from tests.option_cases import OPTIONS

NAME = "arguments"
SAMPLE = 400


class Target(NamedTuple):
    """A call that is right, and what breaks it.

    Attributes:
      name: of the function.
      call: takes all arguments by name.
      right: arguments with which it works.
      wrong: invalid values by argument.
      named: for arguments that are called otherwise in messages, the words that may stand there.
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
        "sampler": SAMPLER, "noise": invalid.NOISES, "trace": FLAGS, "widths": invalid.WIDTHS,
        "nonfinite": invalid.HOW,
    }  # fmt: skip
    whole = common | {"length": integers(), "stop_at_eos": FLAGS, "buckets": invalid.LADDERS}
    arrays = {"key": invalid.KEYS, "prompt_mask": invalid.PADDING, "prompt": invalid.PROMPTS}
    named = {"buckets": ("buckets", "highest rung")}
    yield Target("generate", dj.generate, options | dict(prompt=PAIR), whole | arrays, named)
    infilled = {"tokens": invalid.IDS, "key": invalid.KEYS, "token_mask": invalid.PADDING}
    yield Target("infill", dj.infill, own | dict(tokens=[[1, invalid.MASK_ID, 3]] * 2), common | infilled)
    ladders = {"ladder": invalid.LADDERS.but(invalid.LADDERS.fixed[-1]), "batch": integers()}
    foreign = {"buckets": instances(), "unknown": instances()}
    warm = common | {"length": integers(), "stop_at_eos": FLAGS} | ladders | foreign
    yield Target("warmup", dj.warmup, options | dict(ladder=Ladder((4,))), warm)
    talk = {"model": MODEL, "tokenizer": instances("tiny-llada"), "messages": CONVERSATIONS, "policy": POLICY}
    yield Target("chat", dj.chat, dict(model=model, tokenizer=Echo(), messages=CONVERSATION, length=4), talk)
    layout = dj.Layout(prompt=3, response=4, block=2, steps=4)
    explained = {"model": MODEL, "batch": integers(), "layout": invalid.LAYOUT, "policy": POLICY.but(None)}
    yield Target("explain", dj.explain, dict(model=model, batch=1, layout=layout), explained)


def scoring() -> Iterator[Target]:
    """Likelihoods, full passes and what is measured or predicted."""
    model, layout = tiny("llada"), dj.Layout(prompt=3, response=4, block=2, steps=4)
    ids = dict(model=model, prompt=PAIR, answer=[[1, 2], [3, 4]], key=jax.random.key(0), draws=2, strata=2)
    of_ids = {"prompt": invalid.PROMPTS, "answer": invalid.PROMPTS, "prompt_mask": invalid.PADDING}
    drawn = {"draws": integers(), "strata": integers(), "key": invalid.KEYS, "masks": MASKS}
    likelihood = {"model": MODEL, "cfg_scale": floats(0), "chunk": integers()} | of_ids | drawn
    yield Target("log_likelihood", dj.log_likelihood, ids, likelihood)
    full = {"model": MODEL, "tokens": TOKENS, "valid": VALID}
    for name, call in (("forward", dj.forward), ("hidden_states", dj.hidden_states)):
        yield Target(name, call, dict(model=model, tokens=np.asarray(PAIR)), full)
    calibrated = {"model": MODEL, "length": integers()} | {
        "prompts": invalid.IDS,
        "prompt_mask": invalid.PADDING,
    }
    yield Target("calibrate", eviction.calibrate, dict(model=model, prompts=PAIR, length=4), calibrated)
    predicted = {
        "spec": invalid.SPEC, "policy": POLICY, "layout": invalid.LAYOUT, "batch": integers(),
        "assumed": instances(Assumed), "dtype": Values(("x", Thing(), "float33")),
    }  # fmt: skip
    right = dict(spec=spec("llada"), policy=policies.DualCache(), layout=layout)
    yield Target("roofline.work", work, right, predicted)


def models() -> Iterator[Target]:
    """Where models come from, published settings, and training."""
    model = tiny("llada")
    form = {
        "mesh": invalid.MESH, "rules": invalid.RULES, "dtype": invalid.DTYPES, "weights": invalid.WEIGHTS,
        "separate_layers": FLAGS.but(None), "implementation": invalid.IMPLEMENTATIONS,
    }  # fmt: skip
    loaded = form | {"rope_factor": floats(0), "check_finite": FLAGS}
    yield Target("load", dj.load, dict(path=embedded.path("tiny-llada")), loaded)
    described = form | {"shape": instances(ModelSpec, but=(str,))}
    yield Target("abstract", dj.abstract, dict(shape=spec("llada")), described)
    parts = {"spec": invalid.SPEC, "rules": invalid.RULES, "implementation": invalid.IMPLEMENTATIONS}
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
        "model": MODEL, "config": instances(TrainConfig, {"steps": 3}), "mesh": invalid.MESH,
        "trainable": Values(trees, lambda rng: rng.normal()), "optimizer": instances("adamw", none=True),
    }  # fmt: skip
    yield Target("prepare", prepare, right, prepared)
    run = {
        "source": instances(Batches, batch), "directory": instances(none=True, but=(str,)),
        "allow_changes": Values(("steps", 3, None, ["nothing"], Thing(), [[1]], [3])), "progress": FLAGS,
    }  # fmt: skip
    yield Target("train", train, right | dict(source=Batches(batch), progress=False), prepared | run)


def settings() -> Iterator[Target]:
    """Constructors that are no options, and options in other ways."""
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
    for kind, right in OPTIONS.items():
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}
        found = {name: invalid.of_field(hint) for name, hint in fields.items()}
        if wrong := {name: values for name, values in found.items() if values is not None}:
            yield Target(kind.__name__, kind, right, wrong)


@functools.cache
def targets() -> tuple[Target, ...]:
    """All calls."""
    return (*decoding(), *scoring(), *models(), *settings())


def cases(seed: int) -> Iterator[Case]:
    """Broken calls without end; each argument as often as any other."""
    arguments = [(target, name) for target in targets() for name in target.wrong]
    for number in itertools.count():
        rng = np.random.default_rng((seed, number))
        target, name = arguments[rng.integers(len(arguments))]
        value = target.wrong[name].one(rng)
        description = f"seed {seed}, case {number}: {target.name}({name}={written(value)})"
        yield Case(description, functools.partial(refused, target, name, value))


def refused(target: Target, name: str, value: Any) -> Verdict:
    """Calls with the broken argument."""
    broken = target.right | {name: value}
    return judge(lambda: target.call(**broken), target.named.get(name, (name,)), valid=False)


def written(value: Any) -> str:
    """The value in a line."""
    try:
        return " ".join(repr(value).split())[:100]
    except ValueError:
        return "<a whole number of thousands of digits>"
