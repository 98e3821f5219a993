"""Options refuse, at construction, every value and type that they do not mean."""

import dataclasses
import fractions
import functools
import inspect
import math
import pydoc
import re
import sys
import types
import typing
from collections import UserDict
from typing import Annotated, Any, ClassVar, Literal

import annotated_types
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt, MinLen

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers
from dllm_jax.decoding import options as keywords
from dllm_jax.decoding.buckets import Ladder
from dllm_jax.expressions import call, policy
from dllm_jax.options import (
    Fraction,
    NoneMeans,
    NonNegativeInt,
    Odd,
    Options,
    PositiveInt,
    Profile,
    check_argument,
    hints,
)
from dllm_jax.traced import Traced
from dllm_jax.training import TrainConfig
from tests import DOCS, refuses
from tests.models import tiny
from tests.option_cases import OPTIONS
from tests.policy_cases import daily, short

pytestmark = pytest.mark.usefixtures("unannotated")  # callers' types are not checked

WRONG = {
    int: (2.5, True, "4", math.nan, -math.inf), float: (math.nan, math.inf, True, "x", 10**400),
    bool: (1, "yes", None), tuple: ((), 0.5, ("x",)), str: (3, None),
}  # fmt: skip


def kind_of(annotation):
    """int, float, bool or tuple: an annotation without marks, None and arrays; None for other kinds."""
    while typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
        annotation = typing.get_args(annotation)[0]
    return typing.get_origin(annotation) or annotation


ODD = (object(), object, len, {"a": 1}, b"1", 1j, [[1]])


@pytest.mark.parametrize("kind", [kind for kind in OPTIONS if kind is not dj.MeshRules])  # axes: any words
def test_every_field_refuses_another_type(kind):
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in (field.name for field in dataclasses.fields(kind) if field.init):
        of = kind_of(hints[field])
        for value in (*WRONG[of], *ODD) if of in WRONG else ("unknown", 0):
            refuses(field, kind, **OPTIONS[kind] | {field: value}, error=(ValueError, TypeError))


MOST = 2**31 - 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: policies.MaskKV(heads=eviction.SnapKV()), r"heads=SnapKV\(.* must be a HeadBudgets"),
        (lambda: policies.MaskKV(layers=eviction.SnapKV()), r"layers=SnapKV\(.* must be a LayerBudgets"),
        (lambda: policies.MaskKV(votes=eviction.PyramidKV()), r"votes=PyramidKV\(.* must be a Voters"),
        (lambda: eviction.BoundaryMiddle([0.5, math.nan]), r"importance=\[0.5, nan\] must be .* finite"),
        (lambda: eviction.BoundaryMiddle("0.5"), "must be values, one per layer, each a finite number"),
        (lambda: Ladder((1.5, 2.5)), r"rungs=\(1.5, 2.5\) must be 1 or more values, each a whole number"),
        (lambda: Ladder(64), "rungs=64 must be 1 or more values, each a whole number"),
        (lambda: Ladder((64, 32)), r"rungs=\(64, 32\) must ascend, such as"),
        (lambda: dj.generate(tiny("llada"), [1, 2], length=8.0), "length=8.0 must be a whole number"),
        (lambda: dj.generate(tiny("llada"), [1, 2], buckets=[64, 128]), r"buckets=\[64, 128\] must be"),
        (lambda: dj.warmup(tiny("llada"), 64), r"ladder=64 must be a ladder, such as dj.bu"),
        (lambda: dj.warmup(tiny("llada"), Ladder((4,)), batch=0), "batch=0 must be a whole number"),
        (lambda: dj.warmup(tiny("llada"), buckets=Ladder((4,))), "buckets= is the second argument of warmup"),
        # What programs cannot hold.
        (lambda: policies.DKVDecode(refresh_every=MOST + 1), "refresh_every=2147483648 .* int32 holds"),
        (lambda: policies.D2Cache(k=MOST + 1), "k=2147483648 .* int32 holds, below 2"),
        (lambda: policies.SparseDLLM(kernel=MOST + 2), "kernel=2147483649 .* int32 holds"),
        (lambda: dj.Layout(4, *[MOST + 1] * 3), "response=2147483648 .* int32 holds"),
        (lambda: Ladder((MOST + 1,)), r"rungs=\(2147483648,\) must be 1 or more .* int32 holds"),
        (lambda: TrainConfig(steps=MOST + 1), "steps=2147483648 .* int32 holds"),
        (lambda: TrainConfig(steps=10, seed=2**32), "seed=4294967296 must be a whole number in 0..4294967"),
        (lambda: samplers.Factor(10**1000), "factor=1000.*0[.][.][.] must be a number"),
        (lambda: samplers.Factor(10**5000), "factor=<16610 bits> must be a number"),
        (lambda: samplers.Factor(1e39), r"factor=1e\+39 .* float32 holds, 0 or of a size from 1.2e-38 to 3"),
        (lambda: samplers.Confidence(temperature=1e-50), "temperature=1e-50 .* float32 holds"),
        (lambda: samplers.CertaintyPrior(sigma=1e-30), r"sigma=1e-30 must be a number in \[1e-18, inf\)"),
    ],
)  # fmt: skip
def test_the_message_has_the_value_and_the_rule(make, message):
    refuses(message, make)


@pytest.mark.parametrize(
    "policy",
    daily([policies.D2Cache(k=MOST, inflate=MOST), policies.ElasticCache(window=MOST, track=MOST),
     policies.MaskKV(budget=MOST, votes=eviction.SnapKV(window=MOST, kernel=MOST))], policies.MaskKV),
    ids=short,
)  # fmt: skip
def test_the_largest_numbers_that_they_hold_work(policy):
    sampler = samplers.CertaintyPrior(tokens_per_step=MOST, sigma=1e-18, top_k=MOST, temperature=2e-38)
    model, key = tiny("llada"), jax.random.key(0)
    out = dj.generate(model, [[1, 2, 3]], length=4, block=2, policy=policy, sampler=sampler, key=key)
    assert out.stats.decoded_tokens[0] == 4
    assert out.stats.nfe[0] == 2


@dataclasses.dataclass(frozen=True)
class Part(Options):
    """A class that options hold instances of."""


@dataclasses.dataclass(frozen=True)
class Everything(Options):
    """Every kind of option."""

    whole: int = 0
    positive: PositiveInt = 1
    between: Annotated[int, Gt(0), Lt(4)] = 1
    most: Annotated[int, Le(4)] = 1
    odd: Annotated[PositiveInt, Odd()] = 3
    number: float = 0.0
    fraction: Fraction = 0.5
    inside: Annotated[float, Interval(gt=0, lt=1)] = 0.5
    narrowed: Annotated[Fraction, Gt(0)] = 0.5
    flag: bool = False
    word: Literal["both", "prefix"] = "both"
    level: Literal[0, 1] = 1
    text: str = ""
    part: Part = Part()
    never: Annotated[PositiveInt | None, NoneMeans("never")] = 8
    optional: float | None = None
    bare: None | Fraction = None  # noqa: RUF036 (the order must not matter)
    profile: Profile = (0.5,)
    counts: tuple[NonNegativeInt, ...] = ()
    parts: Annotated[tuple[Part, ...], MinLen(2)] = (Part(), Part())
    words: tuple[Literal["a", "b"], ...] = ()
    anything: Any = None
    either: int | str = 1
    pair: tuple[int, int] = (1, 2)
    made: int = dataclasses.field(default=2.5, init=False)  # no argument, so not checked
    constant: ClassVar[int] = 2.5


ACCEPTED = [
    ("whole", -3, -3), ("whole", np.int32(3), 3), ("whole", 10**400, 10**400), ("between", 3, 3),
    ("most", -1, -1), ("odd", np.uint8(5), 5), ("number", -2, -2), ("number", np.float32(0.5), 0.5),
    ("number", np.int64(2), 2.0), ("number", fractions.Fraction(1, 4), 0.25), ("fraction", 0, 0),
    ("fraction", 1.0, 1.0), ("narrowed", 1, 1), ("flag", np.True_, True), ("word", "prefix", "prefix"),
    ("level", 0, 0), ("text", "x", "x"), ("never", None, None), ("never", np.int16(1), 1),
    ("optional", 0.5, 0.5), ("bare", None, None), ("bare", 1, 1),
    ("profile", [0.5, np.float64(0.25)], (0.5, 0.25)),
    ("profile", np.array([0.5, 0.25], np.float32), (0.5, 0.25)),
    ("profile", jnp.array([0.5, 0.25]), (0.5, 0.25)), ("counts", [], ()), ("counts", np.arange(3), (0, 1, 2)),
    ("parts", [Part(), Part()], (Part(), Part())), ("words", ["a"], ("a",)), ("anything", "x", "x"),
    ("either", np.int8(2), 2), ("either", "x", "x"), ("pair", 3, 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "stored"), ACCEPTED, ids=lambda x: repr(x)[:20])
def test_each_kind_stores_a_value_of_python(name, value, stored):
    options = Everything(**{name: value})
    assert getattr(options, name) == stored
    assert type(getattr(options, name)) is type(stored)
    assert hash(options) == hash(Everything(**{name: stored}))
    assert dataclasses.replace(Everything(), **{name: value}) == options


def test_numbers_of_numpy_are_written_as_those_of_python():
    numpy = policies.DLLMCache(prompt_every=np.int64(4), ratio=np.float64(0.5))
    assert policy(call(numpy)) == numpy == policies.DLLMCache(prompt_every=4, ratio=0.5)


REFUSED = [
    ("whole", 1.0, "a whole number$"), ("whole", np.float64(1), "a whole number$"),
    ("whole", True, "a whole number$"), ("whole", np.True_, "a whole number$"),
    ("whole", math.nan, "a whole number$"), ("whole", None, "a whole number$"),
    ("either", 2.5, "a whole number or a str, such as 1$"), ("either", None, "a whole number or a str"),
    ("positive", 0, "a whole number of at least 1$"), ("between", 0, r"a whole number in 1\.\.3$"),
    ("between", np.int64(4), r"a whole number in 1\.\.3$"), ("most", 5, "a whole number of at most 4$"),
    ("odd", 4, "an odd number of at least 1$"), ("odd", -1, "an odd number of at least 1$"),
    ("number", math.nan, "a finite number$"), ("number", -math.inf, "a finite number$"),
    ("number", np.float32(math.inf), "a finite number$"),
    ("number", 10**400, "a finite number, and one that float32 holds"), ("number", False, "a finite number$"),
    ("number", "1", "a finite number$"), ("number", 1j, "a finite number$"),
    ("number", np.ones(()), "a finite number$"), ("fraction", math.nan, r"a number in \[0, 1\]$"),
    ("fraction", 1.0000001, r"a number in \[0, 1\]$"), ("fraction", -1e-30, r"a number in \[0, 1\]$"),
    ("inside", 0, r"a number in \(0, 1\)$"), ("inside", 1.0, r"a number in \(0, 1\)$"),
    ("narrowed", 0, r"a number in \(0, 1\]$"), ("flag", 1, "True or False$"),
    ("flag", None, "True or False$"), ("word", "suffix", "one of 'both', 'prefix'$"),
    ("word", ["both"], "one of 'both', 'prefix'$"), ("word", None, "one of 'both', 'prefix'$"),
    ("level", True, "one of 0, 1$"), ("text", 3, "a str, such as ''$"),
    ("part", Part, r"a Part, such as Part\(\)$"), ("part", None, r"a Part, such as Part\(\)$"),
    ("never", 0, "a whole number of at least 1, or None for never$"),
    ("optional", math.inf, "a finite number, or None$"), ("bare", 2, r"a number in \[0, 1\], or None$"),
    ("profile", (), "values, one per layer, each a finite number$"),
    ("profile", 0.5, "values, one per layer, each a finite number$"),
    ("profile", "0.5", "values, one per layer, each a finite number$"),
    ("profile", (0.5, True), "values, one per layer, each a finite number$"),
    ("profile", np.ones((2, 2)), "values, one per layer, each a finite number$"),
    ("profile", np.ones(()), "values, one per layer, each a finite number$"),
    ("profile", None, "values, one per layer, each a finite number$"),
    ("counts", (1, -1), "values, each a whole number of at least 0$"),
    ("parts", (Part(),), "2 or more values, each a Part$"), ("words", ("a", "c"), "each one of 'a', 'b'$"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "valid"), REFUSED, ids=lambda x: repr(x)[:20])
def test_each_kind_refuses_with_name_value_and_range(name, value, valid):
    with pytest.raises(ValueError, match=valid) as caught:
        Everything(**{name: value})
    assert str(caught.value).startswith(f"{name}={value!r} must be ")
    refuses(valid, dataclasses.replace, Everything(), **{name: value})


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (Annotated[str, Ge(1)], r"Bad.x: Ge\(ge=1\) does not apply to str"),
        (Annotated[float, Odd()], r"Odd\(\) does not apply to float"),
        (Annotated[int, annotated_types.MultipleOf(2)], "MultipleOf.* does not apply to int"),
        (Annotated[int, NoneMeans("never")], "NoneMeans.'never'. marks an annotation that does not allow"),
        (Annotated[Any, Interval(ge=0)], r"Ge\(ge=0\) does not apply to .*Any"),
        (tuple[Annotated[bool, Gt(0)], ...], r"Gt\(gt=0\) does not apply to bool"),
        (Annotated[bool, Traced()], r"Traced\(.* does not apply to bool"),
    ],
)
def test_marks_that_would_not_be_read_are_errors(annotation, message):
    Bad = dataclasses.make_dataclass("Bad", [("x", annotation)], bases=(Options,), frozen=True)
    refuses(message, Bad, 1, error=TypeError)


def test_policies_of_users_are_checked_even_inside_of_functions():
    class Local:
        """A class that only this function knows."""

    @dataclasses.dataclass(frozen=True)
    class Recent(policies.Policy):
        refresh: int = 8
        local: Local | None = None

    @dataclasses.dataclass(frozen=True)
    class Rarely(Recent):
        refresh: Annotated[PositiveInt | None, NoneMeans("never")] = None

    refuses(r"refresh=2\.5 must be a whole number$", Recent, refresh=2.5)
    refuses("local=3 must be a Local, or None", Rarely, local=3)
    refuses("refresh=0 must be a whole number of at least 1, or None for never", Rarely, 0)
    assert Recent(refresh=0).refresh == 0


POSTPONED = """
from __future__ import annotations
import dataclasses
from typing import TYPE_CHECKING, ClassVar
from dllm_jax.options import Options, PositiveInt
if TYPE_CHECKING:
    from decimal import Decimal
@dataclasses.dataclass(frozen=True)
class Late(Options):
    width: PositiveInt = 1
    price: Decimal | None = None
    same: Late | None = None
    kind: ClassVar[str] = "x"
def inside():
    Own = PositiveInt
    @dataclasses.dataclass(frozen=True)
    class Inner(Late):
        own: Own = 1
        depth: PositiveInt = 1
    return Inner
"""


def test_postponed_annotations_resolve_in_the_module_of_their_class(monkeypatch):
    module = types.ModuleType("postponed")
    monkeypatch.setitem(sys.modules, "postponed", module)
    exec(POSTPONED, vars(module))

    @dataclasses.dataclass(frozen=True)
    class Here(module.Late):  # in a module without the name Decimal
        depth: PositiveInt = 1

    for kind, name in ((kind, name) for kind in (Here, module.inside()) for name in ("width", "depth")):
        refuses(f"{name}=0 must be a whole number of at least 1", kind, **{name: 0})
    refuses("same=0 must be a Late, or None", Here, same=0)
    # Names that do not exist at run time are not checked, as the module's docstring says.
    assert Here(price=0).price == module.inside()(own=0).own == 0


def test_arguments_of_functions_are_checked_alike():
    assert check_argument("batch", np.int64(2), PositiveInt) == 2
    assert check_argument("batch", 2, Annotated[int, "of another package"]) == 2
    refuses("batch=0 must be a whole number of at least 1", check_argument, "batch", 0, PositiveInt)
    refuses("is no kind of option", check_argument, "batch", 0, Any, error=TypeError)


def hinted(call, name: str, hint: str):
    with pytest.raises(TypeError, match=rf"unexpected argument '{name}'\. {hint}"):
        call()


def test_arguments_of_other_libraries_are_answered_with_ours():
    model, path = tiny("llada"), dj.bundled.path("tiny-llada")
    generate = functools.partial(dj.generate, model, [[1, 2]])
    for name, value, hint in (
        ("max_new_tokens", 32, r"Did you mean length=32\?"),
        ("block_length", 8, r"Did you mean block=8\?"),
        ("attention_mask", [[1, 1]], r"Did you mean prompt_mask=\?"),
        (
            "temperature",
            0.7,
            r"Set it on the sampler: .*Confidence\(temperature=0\.7\); DiffusionGemma has EntropyNoise",
        ),
        ("num_return_sequences", 4, r"Repeat the prompt: \[prompt\] \* 4"),
        ("lenght", 4, r"Did you mean length=\?"),
        ("eos_token_id", 1, r"Did you mean stop=\[\[1\]\]\? stop_at_eos=True ends at"),
        ("bad_words_ids", [], r"Did you mean forbid=\[id, \.\.\.\]\? It takes single ids\.$"),
        ("enable_prefix_caching", True, r"Did you mean prefix=dj.prefill\(model, ids\)\?$"),
        ("batch_size", 2, "Not needed: pass a list of that size"),
        ("zzz", 4, "Arguments: allow, block, buckets, "),
    ):
        hinted(functools.partial(generate, **{name: value}), name, hint)
    for ask, name, hint in (
        (lambda: dj.infill(model, [[1]], attention_mask=1), "attention_mask", r"Did you mean token_mask=\?"),
        (lambda: dj.generate_many(model, [[1]], batch_size=3), "batch_size", r"Did you mean slots=3\?"),
        (lambda: dj.stream(model, [[1]], gen_length=3), "gen_length", r"Did you mean length=3\?"),
        (lambda: dj.warmup(model, blocks=4), "blocks", r"Did you mean block=\?"),
        (lambda: dj.load(path, torch_dtype="bf16"), "torch_dtype", r"Did you mean dtype='bf16'\?"),
        (lambda: dj.load(path, trust_remote_code=True), "trust_remote_code", "Not needed: no code"),
        (lambda: TrainConfig(steps=3, max_grad_norm=1.0), "max_grad_norm", r"Did you mean clip=1\.0\?"),
        (lambda: dj.load(path, device="cpu"), "device", r"Choose one by jax\.default_device"),
        (lambda: dj.load(path, device_map="auto"), "device_map", r"Did .*\? It splits a model over"),
        (lambda: dj.chat(model, None, [], trace=True), "trace", r"The answer is text alone\."),
        (lambda: dj.stream_chat(model, None, [], progress=True), "progress", r"The parts show"),
        (lambda: dj.tune(model, None, [], batch_size=2), "batch_size", r"Did you mean slots=2\?"),
        (lambda: dj.lora.LoRA(r=8), "r", r"Did you mean rank=8\?"),
        (lambda: policies.DualCache(size=1), "size", "Arguments: none"),
    ):  # fmt: skip
        hinted(ask, name, hint)
    many = dj.generate_many(model, [{"prompt": [1], "stops": 3}])
    refuses(r"request 0: request\(\) got an unexpected argument 'stops'. Did you mean stop=", next, many)
    many = dj.generate_many(model, [{"prompt": [1], "sampler": samplers.Threshold()}])
    refuses(r"argument 'sampler'\. It is one for all requests: generate_many\(", next, many)
    assert "trace" not in inspect.signature(dj.chat).parameters
    assert "progress" not in inspect.signature(dj.stream_chat).parameters
    page = (DOCS / "coming-from.md").read_text()
    for asked in ({"max_new_tokens": 32}, {"top_p": 0.9}):
        with pytest.raises(TypeError) as refused:
            generate(**asked)
        assert f"\n{refused.value}\n" in page


def test_every_hint_names_arguments_and_samplers_that_exist():
    known = {
        *keywords.GenerateOptions.__annotations__,
        "token_mask",
        "slots",
        "batch",
        *inspect.signature(dj.load).parameters,
    }
    known |= {field.name for kind in (TrainConfig, dj.lora.LoRA) for field in dataclasses.fields(kind)}
    for name, (library, fixes) in hints.NAMES.items():
        assert library, name
        assert fixes, name
        for fix in fixes:
            argument = fix.partition("=")[0]
            assert not argument.isidentifier() or argument in known, fix
            for sampler in re.findall(r"samplers\.(\w+)|, (\w+)\(\) for", fix):
                assert hasattr(samplers, "".join(sampler)), fix
    assert "| `max_new_tokens` | transformers, Dream | `length=...` |" in hints.names_table()


def test_hints_propose_arguments_of_what_was_called():
    """Every name of the table, asked of every function that takes options and every class of options."""
    model, ids = tiny("llada"), [[1, 2]]
    ask: dict = {
        dj.generate: (model, ids), dj.infill: (model, ids), dj.generate_many: (model, ids),
        dj.warmup: (model,), dj.stream: (model, ids), dj.compare: (model, ids, {}), dj.load: ("x",),
        dj.chat: (model, None, []), dj.stream_chat: (model, None, []), dj.tune: (model, None, []),
        dj.log_likelihood: (model, ids, ids), dj.token_log_likelihoods: (model, ids, ids),
    }  # fmt: skip
    places = policies, samplers, dj.eviction, dj.lora, dj.training, dj
    public = {thing for place in places for thing in vars(place).values() if inspect.isclass(thing)}
    ask |= dict.fromkeys((kind for kind in public if issubclass(kind, Options)), ())
    for function, arguments in ask.items():
        known = {*inspect.signature(function).parameters}
        for name in hints.NAMES.keys() - known:
            with pytest.raises(TypeError) as refused:
                function(*arguments, **{name: 3})
            _, _, hint = str(refused.value).partition(f"unexpected argument {name!r}. ")
            assert hint, refused.value
            assert hints.arguments_of(hint.partition("? ")[0]) <= known, (function, hint)
            # An option of a class may mean something else than a function's of this name.
            meant = name in hints.OF_CLASSES.get(function.__name__, ()) or function not in public
            assert meant or re.match(r"Arguments: |Did you mean \w+=\?$", hint), (function, hint)
    hinted(lambda: samplers.EntropyNoise(denoising_steps=8), "denoising_steps", "Arguments: ")
    hinted(lambda: dj.lora.LoRA(lora_dropout=0.1), "lora_dropout", "Not supported: adapters have no dropout")


def test_help_describes_every_option_of_every_policy_and_sampler():
    """Inherited ones too, once each."""
    found = {name: getattr(module, name) for module in (policies, samplers) for name in module.__all__}
    kinds = {n: kind for n, kind in found.items() if inspect.isclass(kind) and dataclasses.is_dataclass(kind)}
    assert len(kinds) > 40
    for name, kind in kinds.items():
        told = re.findall(r"^  (\w+): ", inspect.getdoc(kind) or "", re.MULTILINE)
        fields = [field.name for field in dataclasses.fields(kind) if field.init]
        assert [told.count(field) for field in fields] == [1] * len(fields), name


def test_prompts_of_a_tokenizer_are_taken_and_text_is_refused():
    model = tiny("llada")
    run = lambda prompt, **options: dj.generate(model, prompt, length=2, **options).tokens[:, -2:].tolist()
    alone, other = run([[1, 2, 3], [4]])
    assert run({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}) == [alone]
    assert run(UserDict(input_ids=[[1, 2, 3], [4]], attention_mask=[[1, 1, 1], [1]])) == [alone, other]
    padded = {
        "input_ids": np.array([[1, 2, 3], [9, 9, 4]]),
        "attention_mask": np.array([[1, 1, 1], [0, 0, 1]]),
    }
    assert run(padded) == [alone, other]
    many = dict(dj.generate_many(model, [UserDict(input_ids=[1, 2, 3], attention_mask=[1, 1, 1])], length=2))
    assert many[0].tokens[0, -2:].tolist() == alone
    refuses("not left padding", run, padded | {"attention_mask": np.array([[1, 1, 1], [1, 0, 0]])})
    refuses("takes its mask from attention_mask: pass no other", run, padded, prompt_mask=[[1, 1, 1]] * 2)
    refuses("must have input_ids", run, {"ids": [1]})
    question = [{"role": "user", "content": "T=211;T="}]
    for asked in (question, [question], question[0]):
        refuses(r"is a conversation. Call dj.chat\(model, tokenizer, messages\)", run, asked)
    refuses("A prompt is token ids", next, dj.generate_many(model, question))
    refuses(r"stop=\['x'\] holds text. Use stop=dj.StopTexts\(tokenizer, \['x'\]\)", run, [[1]], stop=["x"])
    refuses(r"delimiters=\(\) must .* Use delimiters=dj.delimiters\(tokenizer\)", dj.AdaBlock, 4)
    refuses("max_length=9 .*length=9, which counts generated tokens only", run, [[1]], max_length=9)
    with pytest.raises(FileNotFoundError, match=r"no hub id.*Published models: .*llada-8b, "):
        dj.abstract("llada-9b")
    with pytest.raises(AttributeError) as found:
        _ = dj.generat  # pyright: ignore[reportAttributeAccessIssue]
    assert (found.value.name, found.value.obj) == ("generat", dj)  # of which Python makes "Did you mean"
    refuses("response=5 must be a multiple of block=3", dj.Layout, 4, 5, 3, 5)
    refuses("response=8 less suffix=2 must be a multiple of block=4", dj.Layout, 4, 8, 4, 8, suffix=2)
    for text in ("ab", ["ab", "c"]):
        refuses(r"prompt=.*ab.* is text: pass token ids", run, text)


def test_old_field_names_work_with_a_warning():
    spec = tiny("llada").spec
    with pytest.warns(DeprecationWarning, match=r"ModelSpec\.hidden is deprecated: use mlp_width"):
        assert spec.hidden == spec.mlp_width
    with pytest.warns(DeprecationWarning, match=r"ModelSpec\(head=\.\.\.\) is deprecated: use head_dim"):
        assert dataclasses.replace(spec, head=4).head_dim == 4
    with pytest.warns(DeprecationWarning, match=r"dllm_jax\.embedded is deprecated: use dllm_jax\.bundled"):
        assert dj.embedded is dj.bundled
    # Files of earlier versions have the old names, and nobody is warned of them.
    fields = dataclasses.asdict(spec)
    fields |= {"hidden": fields.pop("mlp_width"), "head": fields.pop("head_dim")}
    assert dj.ModelSpec.of_fields(fields) == spec


def test_every_function_shows_its_options_and_their_defaults():
    declared = keywords.GenerateOptions.__annotations__
    assert {f.name: f.type for f in dataclasses.fields(keywords.RequestOptions) if f.init} == declared
    for function in (dj.generate, dj.infill, dj.stream, dj.chat, dj.compare, dj.warmup, dj.generate_many):
        *_, group, widths = inspect.signature(function).parameters.values()
        assert (group.name, widths.name, widths.default) == ("group", "widths", None), function
    assert inspect.signature(dj.generate).parameters["length"].default == 128
    assert inspect.signature(dj.log_likelihood).parameters["draws"].default == 128
    assert (
        inspect.signature(dj.generate).parameters["block"].annotation == int | dj.Sliding | dj.AdaBlock | None
    )


def test_help_begins_with_a_short_signature():
    """Of every public function; those whose annotations are long name parameters and defaults alone."""
    functions = {name: value for name, value in vars(dj).items() if inspect.isfunction(value)}
    assert {name: n for name, f in functions.items() if (n := len(str(inspect.signature(f)))) > 600} == {}
    lines = pydoc.plain(pydoc.render_doc(dj.generate)).splitlines()
    begin, end = lines.index("generate("), lines.index(") -> Output")
    shown = " ".join(line.strip() for line in lines[begin + 1 : end])
    assert shown.startswith("model, prompt, *, prompt_mask=None, ")
    assert "sampler=Confidence(), " in shown
    assert max(map(len, lines[begin:end])) < 80
    shown = str(inspect.signature(dj.tune))
    assert "score=exact_match" in shown
    assert shown.endswith("**old\n) -> Tuned")
