"""Numbers that change no shape are arguments of programs: one compilation, the same bits, `vmap`."""

import dataclasses
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers
from dllm_jax.decoding import likelihood
from dllm_jax.decoding.request import Request, prepare
from dllm_jax.engine.loop import denoise
from dllm_jax.options import Options, check_numbers
from dllm_jax.policies.sparse_dllm import SparseBlocks
from dllm_jax.testing.runs import compilations
from dllm_jax.traced import Traced
from tests.models import frequencies, prompts, tiny
from tests.option_cases import OPTIONS
from tests.policy_cases import EXHAUSTIVE, KEY, short
from tests.test_options import kind_of

# Every traced field of the library has in one of these another value than its default. Where arithmetic
# comes before rounding to float32 (2 sigma^2, cfg_scale + 1), values are such as float32 holds.
CASES = [
    (policies.DualCache(), samplers.Threshold(0.31)),
    (policies.ElasticCache(window=4, gamma=0.97), samplers.Confidence(temperature=0.7, top_p=0.83)),
    (
        policies.D2Cache(k=3, sigma=3.5, p=0.13, inflate=2),
        samplers.CertaintyPrior(sigma=2.5, threshold=0.2, cfg_scale=0.5),
    ),
    (policies.DKVDecode(refresh_every=3, delay=2), samplers.Factor(1.7)),
    (policies.DKVPD(refresh_every=3), samplers.CertaintyPrior(tokens_per_step=2)),
    (policies.PrefixCache(), samplers.EBSampler(2.5, temperature=0.4)),
    (policies.PrefixCache(), samplers.KLASS(confidence_threshold=0.125, divergence=0.5)),
    (policies.DualCache(), samplers.WINO(wide_in=0.125, narrow_out=0.25)),
    (policies.DualCache(), samplers.PCSampler(frequencies(), decay=0.125, clip=2.5)),
    (policies.DKVGreedy(refresh_every=3), samplers.RandomOrder(temperature=1.3)),
    (policies.DLLMCache(prompt_every=4, response_every=2), samplers.Confidence(temperature=0.3)),
    (
        policies.MaskKV(5, 3, budget=4, heads=eviction.PromptPreference(0.37), votes=eviction.SnapKV(3, 3)),
        samplers.DreamSchedule(alg="maskgit_plus", temperature=0.4, top_p=0.9, alg_temp=0.3),
    ),
    (policies.MaskKV(6, 3, budget=4, votes=eviction.PositionVotes(1)), samplers.Confidence()),
    (policies.SparseDLLM(delay=0), samplers.Threshold(0.12, alg="margin")),
    (policies.SPACache(4, 2, 0.5), samplers.Dynamic(0.25)),
    (policies.DualCache(), samplers.Edit(0.25, 0.375, most_steps=2)),
    (
        policies.WindowDiffusion(window=3, active=2, refresh_every=3),
        samplers.Threshold(0.2, early_commit=samplers.EarlyCommit(early=1.5, middle=0.75, late=0.375)),
    ),
    (policies.SuffixDropout(keep=policies.GaussianDropout(6, 2.0, seed=3)), samplers.Confidence()),
    (policies.SuffixDropout(keep=policies.UniformDropout(4, 2, seed=3)), samplers.Confidence()),
    (SparseBlocks(0.5, delay=2), samplers.Confidence()),
    (policies.Policy(), samplers.SelfSpeculation(block=4, threshold=0.25)),
    (policies.Policy(), samplers.S2D2(threshold=0.25, gamma=0.75, temperature=0.7)),
    (policies.ESDLLM(block_every=2), samplers.LocalLeap(0.5, relaxed=0.25, radius=2)),
    (policies.DyLLM(tau=0.5, full_steps=2, prompt_every=3), samplers.Confidence()),
    (policies.Policy(), samplers.EntropyNoise(3, 0.25, t_max=0.75, t_min=0.5, certainty=0.125)),
    (policies.Policy(), samplers.DAEDAL(0.25, 0.125, grow_below=0.0625, insert_below=0.75, expansion=2)),
]
REFUSED = {
    (samplers.DAEDAL, "cfg_scale"),
    (samplers.DreamOn, "cfg_scale"),
    *((samplers.EntropyNoise, name) for name in ("cfg_scale", "temperature", "top_p")),
}  # numbers of a base that a class has no meaning for
OF_ALL_TYPES = 1, 0.75, np.float64(0.25), jnp.float32(0.5), *np.linspace(0, 0.9, 6)
doubtful = lambda n: samplers.WINO(wide_in=0.0, narrow_out=n, fewest=2)
TEN = {
    "thresholds": [(policies.DualCache(), samplers.Threshold(t)) for t in OF_ALL_TYPES],
    "doubts": [(policies.DualCache(), doubtful(n)) for n in np.linspace(0, 1, 10)],
    "temperatures": [(policies.Policy(), samplers.Confidence(temperature=t / 5)) for t in range(1, 11)],
}


def model_of(policy, sampler) -> dj.Model:
    """A model that a case runs on."""
    if sampler.procedure.drafts or sampler.procedure.of_noise:
        return tiny("nemotron" if sampler.procedure.drafts else "diffusion-gemma")
    blocks = isinstance(policy, SparseBlocks) or sampler.procedure.verifies_causally
    return tiny("sdar" if blocks else "llada")


def request(policy, sampler, **options) -> Request:
    """Two prompts of different length, whose trace is recorded."""
    model = model_of(policy, sampler)
    prompt, mask = prompts(model, (9, 6))
    block = None if sampler.procedure.drafts or sampler.procedure.of_noise else 4
    options = dict(prompt_mask=mask, length=8, block=block, key=KEY, trace=True) | options
    options |= {"max_length": 12} if sampler.procedure.grows else {}
    return prepare(model, prompt, policy=policy, sampler=sampler, **options)


def run(policy, sampler):
    """Tokens, statistics and trace."""
    made = request(policy, sampler)
    return denoise(model_of(policy, sampler), made.inputs, made.plan)


def run_with_constants(policy, sampler):
    """The same from a program of these numbers alone: what a function closes over is no argument."""
    made = request(policy, sampler)
    program = lambda model, inputs: denoise.__wrapped__(model, inputs, made.plan)
    return jax.jit(program)(model_of(policy, sampler), made.inputs)


def same(one, other) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), one, other)))


def library(cls: type = Options) -> Iterator[type]:
    """Classes of options of the package that can be instantiated."""
    for derived in cls.__subclasses__():
        if derived.__module__.startswith("dllm_jax.") and not getattr(derived, "__abstractmethods__", None):
            yield derived
        yield from library(derived)


def marks(annotation) -> Iterator[Traced]:
    for inner in (*typing.get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from [inner] if isinstance(inner, Traced) else marks(inner)


def traced_fields(cls: type) -> dict[str, Traced]:
    """The marks of the traced fields of a class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {field.name: list(marks(hints[field.name])) for field in dataclasses.fields(cls)}
    return {name: of_field[0] for name, of_field in found.items() if of_field}


TRACED = [
    (cls, name, mark)
    for cls in dict.fromkeys(library())
    for name, mark in traced_fields(cls).items()
    if (cls, name) not in REFUSED
]
every_traced_field = pytest.mark.parametrize(
    ("cls", "name", "mark"), TRACED, ids=lambda x: getattr(x, "__name__", str(x))
)


def made(cls: type, name: str, value) -> Options:
    """An instance with this value of one field."""
    return cls(**OPTIONS.get(cls, {}) | {name: value})


def two_values(cls: type, name: str) -> tuple:
    """Two valid values of a traced field, which change no structure."""
    hint = typing.get_type_hints(cls, include_extras=True)[name]
    return (1, 2) if kind_of(hint) is int else (0.25, 0.5)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("settings", TEN.values(), ids=TEN)
def test_ten_values_compile_once(settings):
    before = denoise._cache_size()  # an earlier test may have left the program
    first = run(*settings[0])
    with compilations() as compiled:
        others = [run(*setting) for setting in settings[1:]]
    assert not compiled
    assert denoise._cache_size() <= before + 1
    assert not all(same(first, other) for other in others), "the numbers make no difference"


def test_warm_programs_are_found_with_other_numbers():
    model, ladder = tiny("llada"), dj.buckets.Ladder((9,))
    prompt, _ = prompts(model, (9,))
    options = dict(length=6, block=3)
    warm = dict(policy=policies.DKVDecode(refresh_every=2), sampler=samplers.Factor(1.0))
    assert dj.warmup(model, ladder, **warm, **options)[0].seconds > 0
    with compilations() as compiled:
        other = dict(policy=policies.DKVDecode(refresh_every=5), sampler=samplers.Factor(2.0))
        dj.generate(model, prompt, buckets=ladder, **other, **options)
    assert not compiled


def test_guidance_of_likelihoods_compiles_once():
    model = tiny("llada")
    prompt, _ = prompts(model, (5,))
    score = lambda w: dj.log_likelihood(model, prompt, prompt[:, :3], cfg_scale=w, draws=16, key=KEY)
    before, plain = likelihood._estimate._cache_size(), score(0)
    assert len({float(score(w)[0]) for w in (0.5, 1, 1.5)} | {float(plain[0])}) == 4
    assert likelihood._estimate._cache_size() == before + 2


@pytest.mark.parametrize(("policy", "sampler"), CASES if EXHAUSTIVE else CASES[3:4], ids=short)
def test_bits_are_those_of_a_program_with_constants(policy, sampler):
    jax.tree.map(np.testing.assert_array_equal, run(policy, sampler), run_with_constants(policy, sampler))


@every_traced_field
def test_every_traced_field_has_a_case(cls, name, mark):
    owner = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    default = {field.name: field.default for field in dataclasses.fields(cls)}[name]
    parts = [part for case in CASES for options in case for part in parts_of(options)]
    values = [getattr(part, name) for part in parts if isinstance(part, owner)]
    assert any(value not in (None, default, mark.unless) for value in values)


def parts_of(options: Options) -> Iterator[Options]:
    """The options, and those in their fields."""
    yield options
    for field in dataclasses.fields(options):
        if isinstance(value := getattr(options, field.name), Options):
            yield from parts_of(value)


@every_traced_field
def test_a_traced_field_is_a_leaf_unless_it_changes_the_structure(cls, name, mark):
    value, other = two_values(cls, name)
    options, structure = made(cls, name, value), lambda value: jax.tree.structure(made(cls, name, value))
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(options)}
    assert leaves[f".{name}"] == value
    assert leaves[f".{name}"].dtype == {int: np.int32, float: np.float32}[type(value)]
    assert structure(value) == structure(other)
    assert hash(structure(value)) == hash(structure(other))
    if mark.unless is not None:
        assert structure(mark.unless) != structure(value)

    # It takes a traced scalar too, and numbers of arrays are those of Python.
    seen = []
    jax.jit(lambda x: seen.append(made(cls, name, x)))(value)
    number = getattr(seen[0], name)
    assert isinstance(number, Tracer)
    assert number.dtype == leaves[f".{name}"].dtype
    known = made(cls, name, jnp.asarray(value))
    assert known == made(cls, name, value)
    assert repr(known) == repr(made(cls, name, value))


@pytest.mark.usefixtures("unannotated")
def test_values_that_are_no_number_are_refused_traced_or_not():
    for cls, name, _ in TRACED:
        value, _ = two_values(cls, name)
        wrong = jnp.asarray([value]), jnp.asarray(True), jnp.asarray(jnp.nan)
        for array in wrong:
            with pytest.raises(ValueError, match=f"{name}=.* must be"):
                made(cls, name, array)
        for array in wrong[:2]:
            with pytest.raises(ValueError, match=f"{name}=.* must be"):
                jax.jit(lambda x, cls=cls, name=name: made(cls, name, x).__class__.__name__)(array)
    for make in (lambda x: policies.ElasticCache(window=x), lambda x: policies.SparseDLLM(keep=x)):
        with pytest.raises(ValueError, match="must be a"):
            jax.jit(make)(1)


def test_numbers_that_jit_returns_are_checked_once_they_are_known():
    for cls, name, _ in TRACED:
        options = made(cls, name, two_values(cls, name)[0])
        check_numbers(jax.tree.map(jnp.asarray, options))
        wrong = lambda leaf: jnp.asarray(-5 if leaf.dtype == jnp.int32 else jnp.nan, leaf.dtype)
        with pytest.raises(ValueError, match=r"=Array\((-5|nan).* must be"):
            check_numbers(jax.tree.map(wrong, options))
    late = lambda delay: policies.EvictPrompt(budget=4, policy=policies.DKVDecode(delay=delay))
    for wrong in ({"sampler": jax.jit(samplers.Threshold)(1.7)}, {"policy": jax.jit(late)(-1)}):
        with pytest.raises(ValueError, match=r"(threshold=1.7|delay=Array\(-1).* must be"):
            prepare(tiny("llada"), [[5, 6]], length=4, **wrong)
    above = jax.jit(lambda relaxed: samplers.LocalLeap(0.5, relaxed))(0.75)
    with pytest.raises(ValueError, match=r"relaxed=0\.75 must be at most threshold=0\.5"):
        prepare(tiny("llada"), [[5, 6]], length=4, sampler=above)


def test_a_threshold_of_entropy_is_in_nats_and_others_are_fractions():
    """A tiny model is unsure: more than one nat lets it unmask several tokens at once."""
    passes = lambda nats: run(policies.Policy(), samplers.Threshold(nats, alg="entropy"))[1].nfe.max()
    assert passes(9.0) < passes(1.0)
    for alg in ("prob", "margin"):
        with pytest.raises(ValueError, match=r"threshold=1.5 must be a number in \[0, 1\]"):
            samplers.Threshold(1.5, alg=alg)
    with pytest.raises(ValueError, match=r"threshold=-1 must be a number in \[0, inf\)"):
        samplers.Threshold(-1, alg="entropy")


def test_a_table_is_an_argument_of_the_program_too():
    tables = [frequencies(), samplers.TokenFrequencies(np.full(61, 1 / 61))]
    run(policies.DualCache(), samplers.PCSampler(tables[0], decay=0.0))
    with compilations() as compiled:
        other = run(policies.DualCache(), samplers.PCSampler(tables[1], decay=0.0))
    assert not compiled
    assert not same(run(policies.DualCache(), samplers.PCSampler(tables[0], decay=0.0)), other)


def test_switching_a_feature_off_is_another_program():
    before = denoise._cache_size()
    for temperature in (0.5, 0.0, 0.7, 0):
        run(policies.Policy(), samplers.Confidence(temperature=temperature, alg="margin"))
    assert denoise._cache_size() == before + 2
    exact = request(policies.D2Cache(p=1), samplers.Confidence()).plan
    assert jax.tree.structure(exact) != jax.tree.structure(
        request(policies.D2Cache(p=0.9), samplers.Confidence()).plan
    )


VALUES = {  # makes of options, and numbers for them
    "threshold": (
        lambda t: dict(policy=policies.DualCache(), sampler=samplers.Threshold(t)),
        (0.05, 0.2, 0.9),
    ),
    "gamma": (lambda g: dict(policy=policies.ElasticCache(window=4, gamma=g)), (-1.0, 0.9, 0.97, 2.0)),
    "refresh_every": (lambda n: dict(policy=policies.DKVDecode(refresh_every=n)), (1, 2, 3)),
}


@pytest.mark.parametrize("name", VALUES if EXHAUSTIVE else ["threshold"])
def test_vmap_over_numbers_equals_a_loop(name):
    (make, values), model = VALUES[name], tiny("llada")
    prompt, mask = prompts(model, (9, 6))
    options = dict(prompt_mask=mask, length=8, block=4)
    generate = lambda value: dj.generate(model, prompt, **options, **make(value))
    mapped = jax.vmap(generate)(jnp.asarray(values))
    alone = [generate(value) for value in values]
    np.testing.assert_array_equal(mapped.tokens, [out.tokens for out in alone])
    stats = jax.tree.map(lambda *of_each: np.stack(of_each), *(out.stats for out in alone))
    jax.tree.map(np.testing.assert_array_equal, mapped.stats, stats)
    assert not all(same(alone[0], other) for other in alone[1:]), "the numbers make no difference"


def test_options_pass_through_jit_and_are_stacked_for_vmap():
    model = tiny("llada")
    prompt, _ = prompts(model, (9, 9))
    generate = lambda sampler: dj.generate(model, prompt, length=8, block=4, sampler=sampler).tokens
    several = [samplers.Threshold(t) for t in (0.1, 0.4, 0.9)]
    expected = [generate(sampler) for sampler in several]
    jitted = jax.jit(generate)
    np.testing.assert_array_equal([jitted(sampler) for sampler in several], expected)
    assert jitted._cache_size() == 1
    stacked = jax.tree.map(lambda *numbers: jnp.stack(numbers), *several)
    np.testing.assert_array_equal(jax.vmap(generate)(stacked), expected)
