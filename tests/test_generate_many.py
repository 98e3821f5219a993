"""Requests in flight: each is answered as if it were alone, whatever is beside it and whatever interrupts."""

import itertools
import re
import sys
import warnings
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding import generate_many, slots
from dllm_jax.engine.stats import NonFiniteWarning
from dllm_jax.testing.runs import assert_same_run, assert_same_stats, compilations
from tests import refuses
from tests.models import in_int8, separate, tiny
from tests.policy_cases import BLOCK_CASES, EXHAUSTIVE, WIDE, daily, matrix, short
from tests.test_nonfinite import POISON, poisoned

P, SOME = policies, samplers.Threshold(0.25)
RANDOM = samplers.Threshold(0.25, cfg_scale=0.5, temperature=0.3)
LADDER = dj.buckets.Ladder((6, 12))
KEY = jax.random.key(3)
SHORT = dict(length=8, block=4, sampler=SOME, buckets=LADDER, widths=WIDE)


def some_prompts(count: int, longest: int = 12, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 40, size=n).tolist() for n in rng.integers(1, longest + 1, size=count)]


def all_alone(model: dj.Model, asked: list, slots: int = 2, **options) -> dict[int, dj.Output]:
    """The answers to prompts, or to requests with options of their own: each is what it is alone."""
    found = dict(dj.generate_many(model, iter(asked), slots=slots, **options))
    assert sorted(found) == list(range(len(asked)))
    key = options.pop("key", None)
    for i, one in enumerate(asked):
        own = {} if key is None else dict(key=jax.random.fold_in(key, i))
        own |= one if isinstance(one, dict) else dict(prompt=one)
        alone = dj.generate(model, [own.pop("prompt")], **options | own)
        np.testing.assert_array_equal(found[i].tokens, alone.tokens)
        assert_same_stats(found[i].stats, alone.stats)
        if alone.trace is not None:
            assert_same_run(found[i].trace, alone.trace, computed=True)
    return found


CASES = [
    ("llada", P.DualCache(), RANDOM, {}),
    ("dream", P.MaskKV(budget=4), SOME, dict(widths=WIDE)),
    ("dream", P.Policy(), samplers.KLASS(), dict(stop_at_eos=True)),
    ("llada", P.D2Cache(p=0.2), SOME, {}),
    ("llada", P.ElasticCache(), samplers.KLASS(), {}),
    ("llada", P.DualCache(), samplers.WINO(), {}),
    ("sdar", P.Policy(), samplers.FreeDave(), dict(block=None)),
    ("llada", P.DKVPD(), samplers.RandomOrder(), {}),
    ("llada", P.SparseDLLM(), SOME, dict(suffix=[7, 8])),
    *(("sdar", case.policy, SOME, {}) for case in BLOCK_CASES.values()),
    ("sdar", P.SparseDLLM(keep=0.3), SOME, {}),
    ("sdar", P.MaskKV(budget=3), SOME, {}),
    ("a2d-qwen3", P.MAGE(keep=0.3), SOME, {}),
    ("a2d-qwen3", P.FOCUS(), SOME, {}),
]
# Of blocks that are shorter than the prompts, so that earlier ones are stored.
SHORT_BLOCKS = {"sdar": dict(block_size=4), "a2d-qwen3": dict(block_size=4)}


@pytest.mark.parametrize(
    ("family", "policy", "sampler", "more"), CASES if EXHAUSTIVE else CASES[:1], ids=short
)
def test_every_request_is_what_it_is_alone(family, policy, sampler, more):
    options = SHORT | dict(policy=policy, sampler=sampler, trace=True, widths=None) | more
    model = tiny(family, **SHORT_BLOCKS.get(family, {}))
    all_alone(model, some_prompts(7, longest=6), slots=3, **dict(key=KEY) if sampler.draws else {}, **options)


@matrix("form", (separate, in_int8), today=[(separate,)])
def test_models_of_every_form(form):
    all_alone(form(tiny("llada")), some_prompts(4, longest=6), **SHORT | dict(policy=P.DualCache()))


@settings(max_examples=3)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=9),
    responses=st.lists(st.sampled_from((4, 8)), min_size=9, max_size=9),
    seed=st.integers(0, 99),
)
def test_any_prompts_of_any_responses(lengths, responses, seed):
    rng = np.random.default_rng(seed)
    asked = [rng.integers(0, 40, size=n).tolist() for n in lengths]
    each = [dict(prompt=p, length=n) for p, n in zip(asked, responses, strict=False)]
    all_alone(tiny("llada"), each, **SHORT | dict(policy=P.DualCache()))


def test_requests_have_options_of_their_own():
    model, asked = tiny("llada"), some_prompts(4, longest=6)
    options = SHORT | dict(policy=P.DualCache(), sampler=RANDOM)
    plain = dj.generate(model, [asked[1]], key=jax.random.key(8), **options)
    stop = [np.asarray(plain.tokens)[0, -6:-4].tolist()]
    each = [
        dict(length=4, key=jax.random.key(7)), dict(stop=stop, key=jax.random.key(8)),
        dict(suffix=[9, 9], key=jax.random.key(9)), dict(block=2, steps=4, key=jax.random.key(9)),
    ]  # fmt: skip
    requests = [dict(prompt=prompt) | own for prompt, own in zip(asked, each, strict=True)]
    found = all_alone(model, requests, **options)
    assert (found[1].tokens != np.asarray(plain.tokens)).any(), "the stop must have ended it"


def test_embeddings_of_its_own():
    model = tiny("llada")
    embeds = jax.random.normal(KEY, (3, 5, model.spec.width))
    each = [
        dict(prompt=[1, dj.EMBEDS_PLACEHOLDER, 2, dj.EMBEDS_PLACEHOLDER, 3], prompt_embeds=one)
        for one in embeds
    ]
    all_alone(model, each, **SHORT | dict(policy=P.DualCache()))


# -- nothing of the one before, and nothing that others cost ---------------------------------------------


HOLDING = P.DualCache(), P.ElasticCache(), P.MaskKV(budget=4)


@pytest.mark.parametrize("policy", daily(HOLDING, P.MaskKV), ids=short)
def test_nothing_of_the_sequence_before_can_be_read(policy, monkeypatch):
    """What the slots hold is NaN when a sequence enters: none of it is left."""
    enter = slots.enter

    def poison(array):
        return jnp.full_like(array, jnp.nan) if jnp.issubdtype(array.dtype, jnp.floating) else array

    def entering(model, inputs, plan, state, new, slot):
        return enter(model, inputs, plan, jax.tree.map(poison, state), new, slot)

    monkeypatch.setattr(slots, "enter", entering)
    all_alone(tiny("llada"), some_prompts(3, longest=6), slots=1, **SHORT | dict(policy=policy))


def test_the_device_runs_for_those_who_need_it():
    model, asked = tiny("llada"), some_prompts(32, longest=6)
    options = SHORT | dict(length=16, widths=None)
    ratio = lambda outs: (
        sum(o.stats.executed_tokens.sum() for o in outs) / sum(o.stats.computed_tokens.sum() for o in outs)
    )
    flight = [out for _, out in dj.generate_many(model, asked, slots=4, group=4, **options)]
    batches = [dj.generate(model, asked[i : i + 4], group=4, **options) for i in range(0, 32, 4)]
    assert ratio(flight) < 1.15 < 1.2 < ratio(batches)


def test_no_program_is_compiled_for_the_hundredth_request(unannotated):
    model, options = tiny("llada"), SHORT | dict(policy=P.DualCache())
    dj.warmup(model, LADDER, slots=2, **{k: v for k, v in options.items() if k != "buckets"})
    with compilations() as compiled:
        assert len(list(dj.generate_many(model, some_prompts(100), slots=2, **options))) == 100
    assert not compiled


def test_prompts_are_read_as_they_are_needed():
    read = itertools.count()
    endless = ((next(read) and [1, 2]) or [3, 4] for _ in itertools.count())
    answers = dj.generate_many(tiny("llada"), endless, slots=2, **SHORT)
    assert [index for index, _ in itertools.islice(answers, 5)]
    assert next(read) <= 5 + 2 + 2 * generate_many.AHEAD + 2
    answers.close()
    assert list(answers) == []


def test_a_rare_length_is_not_starved():
    """Nine long prompts stand behind a short one, and as many short ones follow as anybody reads."""
    endless = itertools.chain([[1]], [list(range(9))], itertools.repeat([2]))
    found = dj.generate_many(tiny("llada"), endless, slots=1, **SHORT | dict(length=4))
    order = [index for index, _ in itertools.islice(found, generate_many.TURN + 3)]
    assert 1 in order


def rungs_of_slots(asked: list, **options) -> list[int]:
    """The bucket lengths that slots were made for, in turn, where each answer is what it is alone."""
    with mock.patch.object(generate_many, "Slots", side_effect=slots.Slots) as made:
        all_alone(tiny("llada"), asked, **SHORT | options)
    return [call.args[1].plan.layout.prompt for call in made.call_args_list]


LONG, OTHER = list(range(9)), dict(prompt=[2], length=44)  # a long prompt, and one of another lane


@pytest.mark.parametrize(
    ("asked", "length", "rungs"),
    [
        ([LONG, [1]], 8, [12]),  # a slot would be idle
        ([LONG, [1], [1], [1], [1]], 4, [12, 6]),  # they fill slots of their own
        ([[1], LONG, [1], [1], [1]], 40, [12]),  # their canvases grow by less than a fifth
        ([LONG, *[OTHER] * 9, [1]], 40, [12, 12, 12]),  # where programs are compiled
    ],
)
def test_prompts_share_the_slots_of_a_longer_bucket_where_that_costs_little(asked, length, rungs):
    assert rungs_of_slots(asked, length=length) == rungs


def test_lists_are_read_further_ahead_than_generators():
    class Counted(list):
        read = 0

        def __iter__(self):
            for self.read, item in enumerate(super().__iter__(), 1):
                yield item

    prompts = Counted([[1, 2]] * 99)
    next(dj.generate_many(tiny("llada"), prompts, slots=1, **SHORT))
    assert generate_many.AHEAD_IN_LISTS < prompts.read <= 2 + generate_many.AHEAD_IN_LISTS


# -- interrupts and refusals -----------------------------------------------------------------------------


def test_a_refused_request_is_told_with_its_index_and_loses_no_other():
    model, asked = tiny("llada"), [[1], [10**6], dict(prompt=[2], lenght=4), [3] * 13, [[1], [2]], [4]]
    found = dict(dj.generate_many(model, asked, slots=2, errors="return", **SHORT))
    messages = {i: str(found[i]) for i in range(1, 5)}
    assert "vocabulary" in messages[1]
    assert "lenght" in messages[2]
    assert "exceeds the largest bucket length, 12" in messages[3]
    assert "one prompt" in messages[4]
    assert all(isinstance(found[i], dj.Output) for i in (0, 5))

    answers, answered = dj.generate_many(model, asked, slots=2, **SHORT), []
    refused = []
    while len(answered) + len(refused) < 6:
        try:
            answered.append(next(answers)[0])
        except ValueError as error:
            refused.append(str(error))
    assert sorted(answered) == [0, 5]
    assert all(f"request {i}: " in "".join(refused) for i in range(1, 5))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(slots=0), ValueError, "slots=0"),
        (dict(errors="ignore"), ValueError, "errors='ignore'"),
        (dict(noise=None), TypeError, "noise"),
        (dict(block=0), ValueError, "block=0"),
        (dict(policy=P.D2Cache(), sampler=samplers.WINO()), ValueError, "WINO is not supported by"),
        (dict(group=0), ValueError, "group=0"),
        (dict(prompts="text"), ValueError, "must be an iterable of prompts"),
    ],
)
def test_options_that_no_request_could_have_are_refused_at_the_call(unannotated, options, error, message):
    with pytest.raises(error, match=message):
        dj.generate_many(tiny("llada"), **dict(prompts=[[1]]) | SHORT | options)


@pytest.mark.filterwarnings("ignore::dllm_jax.decoding.report.LengthWarning")
@pytest.mark.filterwarnings("error")
def test_each_request_may_say_how_long_its_answer_is(unannotated):
    """The default length is of those alone that give none: here it exceeds the context."""
    model, short = tiny("llada").replace_spec(positions=60), {"prompt": [1, 2], "length": 6}
    growing: dict[str, Any] = dict(sampler=samplers.DAEDAL())
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (growing, short | {"max_length": 8}), (growing | dict(max_length=8), short),
        (dict(block=3), short), (dict(block=3, steps=4), short),
    ]  # fmt: skip
    for common, request in cases:
        with dj.generate_many(model, [request], **common):
            pass
    with pytest.raises(ValueError, match="max_length=8 must be at least length=9"):
        dj.generate_many(model, [short], **growing, length=9, max_length=8)
    ((_, out),) = dj.generate_many(model, [short | {"max_length": 8}], slots=1, **growing)
    assert out.tokens.shape[1] >= 8


def test_steps_that_fit_no_length_are_refused_at_the_call(unannotated):
    for options in (dict(steps=-1), dict(steps="x"), dict(steps=4, sampler=samplers.DAEDAL())):
        refuses(f"steps={options['steps']!r}", dj.generate_many, tiny("llada"), [[1]], **options)


def test_a_sequence_without_finite_logits_ends_alone():
    model, asked = poisoned("llada"), [[1, 2], [POISON, 3], [4]]
    with pytest.warns(NonFiniteWarning):
        found = dict(dj.generate_many(model, asked, slots=2, **SHORT))
    assert [bool(found[i].stats.finite[0]) for i in range(3)] == [True, False, True]
    returned = dict(dj.generate_many(model, asked, slots=2, nonfinite="raise", errors="return", **SHORT))
    assert isinstance(returned[1], FloatingPointError)
    np.testing.assert_array_equal(returned[2].tokens, found[2].tokens)
    with pytest.raises(FloatingPointError, match="request 1: "):
        list(dj.generate_many(model, asked, slots=2, nonfinite="raise", **SHORT))


@pytest.mark.parametrize("where", ["prepare", "enter", "until_one_ends", "vacant", "output", "report"])
@pytest.mark.parametrize("loses", [False, True], ids=["before", "after"])
def test_an_interrupt_anywhere_loses_nothing(where, loses, monkeypatch):
    """Also when a program has taken the state, and what it gave back is lost."""
    calls, at = itertools.count(), 2 if where != "vacant" else 0
    owner = {"prepare": generate_many, "report": generate_many, "output": slots.Slots}.get(where, slots)
    run = getattr(owner, where)

    def interrupted(*args, **options):
        strikes = next(calls) == at
        if strikes and not loses:
            raise KeyboardInterrupt
        found = run(*args, **options)
        if strikes:
            raise KeyboardInterrupt
        return found

    model, asked = tiny("llada"), some_prompts(6)
    options = SHORT | dict(policy=P.DualCache())
    whole = dict(dj.generate_many(model, asked, slots=2, **options))
    answers, found = dj.generate_many(model, asked, slots=2, **options), {}
    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for index, out in answers:
            found[index] = out
    found |= dict(answers)
    assert sorted(found) == sorted(whole)
    for index, out in found.items():
        np.testing.assert_array_equal(out.tokens, whole[index].tokens)


def test_a_request_is_taken_back():
    model, asked = tiny("llada"), some_prompts(6, longest=6)
    with dj.generate_many(model, asked, slots=2, **SHORT) as answers:
        first, _ = next(answers)
        gone = [i for i in range(6) if i != first][:3]
        for index in gone:
            answers.cancel(index)
        assert {index for index, _ in answers} == set(range(6)) - {first, *gone}


def test_the_bar_counts_answers(capsys):
    list(dj.generate_many(tiny("llada"), some_prompts(3, longest=6), slots=2, progress=True, **SHORT))
    assert "3/3" in capsys.readouterr().err


@matrix("axes", ["dp=2", "dp=2 tp=2"], today=[("dp=2 tp=2",)])
def test_slots_are_split_over_devices(axes):
    from tests.test_mesh import mesh_of, on_mesh, one_device

    model, asked = one_device("llada"), some_prompts(5, longest=6)
    placed, options = on_mesh(model, mesh_of(axes)), SHORT | dict(policy=P.DualCache())
    found = dict(dj.generate_many(placed, asked, slots=3, **options))
    with compilations() as compiled:
        again = dict(dj.generate_many(placed, asked, slots=3, **options))
    assert not compiled
    for i, prompt in enumerate(asked):
        alone = dj.generate(model, [prompt], **options)
        for out in (found[i], again[i]):
            np.testing.assert_array_equal(out.tokens, alone.tokens)
        assert_same_stats(found[i].stats, alone.stats)


@pytest.mark.parametrize(("family", "options"), [
    ("llada", dict(policy=policies.DKVGreedy(), sampler=samplers.Threshold(0.9))),
    ("llada", dict(policy=policies.FOCUS())),
    ("sdar", dict(policy=policies.SuffixDropout(), block=None)),
])  # fmt: skip
def test_options_refused_by_tracing_are_refused_once_for_each_request(family, options):
    options = dict(length=8, slots=1) | options
    answers = dj.generate_many(tiny(family), [[7, 8], [9]], errors="return", **options)
    found = dict(itertools.islice(answers, 5))
    assert found.keys() == {0, 1}
    assert all(isinstance(error, ValueError) for error in found.values())
    raising = dj.generate_many(tiny(family), [[7, 8], [9]], **options)
    for index in range(2):
        refuses(f"request {index}: {re.escape(str(found[index]))}", next, raising)
    assert next(raising, None) is None


def test_a_waiting_request_is_prepared_once_for_each_length_of_slots(monkeypatch):
    module, calls = sys.modules["dllm_jax.decoding.generate_many"], []
    real = module.prepare
    monkeypatch.setattr(module, "prepare", lambda *given, **how: calls.append(0) or real(*given, **how))
    options = dict(length=4, block=4, buckets=dj.buckets.Ladder((4, 16)), slots=2)
    asked = [{"prompt": [7] * 9, "steps": 2}] * 4 + [{"prompt": [7, 8], "block": 2}] * 6
    assert len(list(dj.generate_many(tiny("llada"), asked, **options))) == len(asked)
    assert len(calls) <= 1 + len(asked) + 6


def test_warnings_point_at_the_line_of_the_user_once_a_call():
    """Of every way to ask; of `generate_many`, one for all requests."""
    model = tiny("llada")
    model = model.replace_spec(positions=4)
    asked, late = [[7, 8], [9]], dict(length=4, block=4, steps=8)
    tokenizer = dj.load_tokenizer(dj.bundled.path("tiny-llada"))
    talk = [[{"role": "user", "content": letter}] for letter in "ab"]
    asks = dict(template={"nothing": 1}, length=4)
    chatty = tiny("llada", vocab=112, mask_id=2, eos_id=1, eot_id=5)
    calls = {
        "generate": lambda: dj.generate(model, asked, **late),
        "infill": lambda: dj.infill(model, [[7, model.spec.mask_id, 8]], steps=8),
        "stream": lambda: list(dj.stream(model, asked, **late)),
        "many": lambda: list(dj.generate_many(model, asked, **late)),
        "compare": lambda: dj.compare(
            model, asked, [policies.Policy(), policies.DualCache()], repeats=1, **late
        ),
        "warmup": lambda: dj.warmup(model, dj.buckets.Ladder((4, 8)), **late),
        "slots": lambda: dj.warmup(model, dj.buckets.Ladder((4, 8)), slots=2, **late),
        "chat": lambda: dj.chat(chatty, tokenizer, talk, steps=8, **asks),
        "stream_chat": lambda: list(
            dj.stream_chat(chatty, tokenizer, talk, template={"nothing": 1}, length=4)
        ),
        "likelihood": lambda: dj.log_likelihood(model, asked, [[7, 8, 9]] * 2, key=KEY, draws=2, strata=1),
    }
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            call()
        assert told, name
        assert {one.filename for one in told} == {__file__}, (name, [one.filename for one in told])
        kinds = [(one.category, one.lineno) for one in told]
        assert len({*kinds}) == len(kinds), (name, kinds)
