"""Every sampler refuses a value that makes no sense, and says which."""

import math

import pytest

from dllm_jax import samplers
from dllm_jax.samplers import (
    KLASS,
    WINO,
    CertaintyPrior,
    Confidence,
    DreamSchedule,
    EBSampler,
    Factor,
    PCSampler,
    RandomOrder,
    Threshold,
)
from tests.option_cases import OPTIONS

pytestmark = pytest.mark.usefixtures("unannotated")  # callers' types are not checked

EVERY = [
    Confidence,
    RandomOrder,
    CertaintyPrior,
    DreamSchedule,
    Threshold,
    Factor,
    EBSampler,
    PCSampler,
    KLASS,
    WINO,
]
SHARED = [
    ("temperature", -0.1),
    ("temperature", math.inf),
    ("temperature", math.nan),
    ("cfg_scale", -1.0),
    ("cfg_scale", math.inf),
    ("cfg_scale", math.nan),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", 0),
    ("top_k", -3),
]
OWN = [
    (Threshold, "alg", "entropy"),
    (Threshold, "threshold", -0.01),
    (Threshold, "threshold", 1.01),
    (Threshold, "threshold", math.nan),
    (Factor, "factor", 0.0),
    (Factor, "factor", -1.0),
    (Factor, "factor", math.nan),
    (EBSampler, "gamma", -0.01),
    (EBSampler, "gamma", math.nan),
    (EBSampler, "alg", "origin"),
    (PCSampler, "decay", -0.1),
    (PCSampler, "clip", 0.0),
    (PCSampler, "frequencies", None),
    (KLASS, "confidence_threshold", 1.1),
    (KLASS, "divergence", -1.0),
    (KLASS, "divergence", math.nan),
    (KLASS, "history", 0),
    (WINO, "wide_in", -0.1),
    (WINO, "narrow_out", 1.1),
    (WINO, "fraction", 1.5),
    (WINO, "fewest", 0),
    (WINO, "most", 0),
    (WINO, "most", 4),
    (CertaintyPrior, "sigma", 0.0),
    (CertaintyPrior, "sigma", -2.0),
    (CertaintyPrior, "sigma", math.nan),
    (CertaintyPrior, "threshold", -0.1),
    (CertaintyPrior, "threshold", 1.1),
    (DreamSchedule, "eps", 0.0),
    (DreamSchedule, "eps", 1.0),
    (DreamSchedule, "eps", math.nan),
    (DreamSchedule, "alg_temp", -1.0),
    (DreamSchedule, "alg_temp", math.nan),
]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [(kind, field, value) for kind in EVERY for field, value in SHARED] + OWN,
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_out_of_range(kind, field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        kind(**OPTIONS[kind] | {field: value})


def test_alg_temp_needs_a_confidence():
    with pytest.raises(ValueError, match=r"alg_temp=0\.5"):
        DreamSchedule(alg="origin", alg_temp=0.5)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_a_threshold_needs_scores_that_can_reach_it(threshold):
    with pytest.raises(ValueError, match=rf"threshold={threshold} has no use with alg='entropy'"):
        CertaintyPrior(threshold=threshold, alg="entropy")
    CertaintyPrior(tokens_per_step=2, alg="entropy")


@pytest.mark.parametrize(("kind", "options"), [(RandomOrder, {}), (DreamSchedule, {"alg": "origin"})])
def test_ends_cannot_come_last_in_an_order_without_confidence(kind, options):
    with pytest.raises(
        ValueError, match=r"confidence_eos_eot_inf=True has no effect with .*: use logits_eos_inf"
    ):
        kind(confidence_eos_eot_inf=True, **options)
    kind(logits_eos_inf=True, **options)
    DreamSchedule(confidence_eos_eot_inf=True)


@pytest.mark.parametrize("kind", EVERY)
def test_edges_are_allowed(kind):
    make = lambda: kind(**OPTIONS[kind], temperature=0.0, top_p=1.0, top_k=1, cfg_scale=0.0)
    assert hash(make()) == hash(make())
    assert make() == make()


def test_fields_after_the_main_one_are_named():
    assert Threshold(0.7).threshold == 0.7
    assert Factor(2.0).factor == 2.0
    with pytest.raises(TypeError):
        Confidence("margin")


@pytest.mark.parametrize(
    ("sampler", "draws"),
    [
        (Confidence(), False),
        (Confidence(temperature=0.1), True),
        (RandomOrder(), True),
        (Threshold(), False),
        (Factor(temperature=1.0), True),
        (EBSampler(), False),
        (KLASS(), False),
        (WINO(temperature=0.5), True),
        (CertaintyPrior(), False),
        (DreamSchedule(), False),
        (DreamSchedule(alg="origin"), True),
        (DreamSchedule(alg_temp=0.5), True),
        (DreamSchedule(temperature=0.5), True),
    ],
    ids=str,
)
def test_who_needs_random_numbers(sampler, draws):
    assert sampler.draws is draws


def test_the_base_is_abstract():
    with pytest.raises(TypeError):
        samplers.Sampler()
