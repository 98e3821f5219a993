"""Options of every kind refuse values that make no sense, and say which."""

import math
import operator
import re

import pytest

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers
from dllm_jax.samplers import CertaintyPrior, Confidence, DreamSchedule, Factor, RandomOrder, Threshold
from tests import table
from tests.option_cases import OPTIONS

pytestmark = pytest.mark.usefixtures("unannotated")  # callers' types are not checked

EVERY = [kind for kind in OPTIONS if issubclass(kind, samplers.Sampler)]
OUTSIDE = table("ranges")  # by class; of all samplers "samplers.*"
SETTINGS = dict.fromkeys(EVERY, OUTSIDE.pop("samplers.*"))
for name, text in OUTSIDE.items():
    kind = operator.attrgetter(name)(dj)
    SETTINGS[kind] = f"{SETTINGS.get(kind, '')} {text}"


@pytest.mark.parametrize(
    ("kind", "setting"),
    [(kind, setting) for kind, text in SETTINGS.items() for setting in text.split()],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_out_of_range(kind, setting):
    field, _, text = setting.partition("=")
    value = eval(text, {"inf": math.inf, "nan": math.nan})
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}")):
        kind(**OPTIONS[kind] | {field: value})


def test_settings_that_do_not_go_together():
    for make, message in (
        (lambda: DreamSchedule(alg="origin", alg_temp=0.5), r"alg_temp=0\.5"),
        (lambda: CertaintyPrior(threshold=0.0, alg="entropy"), "threshold=0.0 has no use with alg='entropy'"),
        (lambda: RandomOrder(confidence_eos_eot_inf=True), "has no effect with .*: use logits_eos_inf"),
        (lambda: DreamSchedule(alg="origin", confidence_eos_eot_inf=True), "has no effect with .*"),
        (lambda: samplers.WINO(fewest=21), "fewest=21 must be at most most=20"),
        (lambda: policies.MaskKV(prompt_every=7, response_every=2, reselect=True), "multiple"),
        (lambda: policies.MaskKV(layers=eviction.BoundaryMiddle(beta=0.5)), "beta=0.5.* needs a profile"),
        (lambda: policies.MaskKV(layers=eviction.BoundaryMiddle(first=2)), "first=2.* use OnlineLayers"),
        (lambda: eviction.BoundaryMiddle((0.1, 0.2)).budgets(4, 8, 20), "2 entries"),
        (lambda: eviction.OnlineLayers(eviction.BoundaryMiddle((1.0, 1.0))), "it is measured"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    CertaintyPrior(tokens_per_step=2, alg="entropy")
    RandomOrder(logits_eos_inf=True)
    DreamSchedule(confidence_eos_eot_inf=True)


@pytest.mark.parametrize("kind", EVERY)
def test_edges_are_allowed(kind):
    make = lambda: kind(**OPTIONS[kind], temperature=0.0, top_p=1.0, top_k=1, cfg_scale=0.0)
    assert hash(make()) == hash(make())
    assert make() == make()


def test_random_numbers_are_needed_where_they_are_drawn():
    quiet = (
        Confidence(), Threshold(), samplers.EBSampler(), samplers.KLASS(), CertaintyPrior(),
        DreamSchedule(),
    )  # fmt: skip
    drawing = Confidence(temperature=0.1), RandomOrder(), Factor(temperature=1.0), DreamSchedule(alg_temp=0.5)
    drawing += samplers.WINO(temperature=0.5), DreamSchedule(alg="origin"), DreamSchedule(temperature=0.5)
    assert [sampler.draws for sampler in (*quiet, *drawing)] == [False] * 6 + [True] * 7
