"""Policies, samplers and rules of eviction refuse values that make no sense, and say which."""

import math
import re

import pytest

from dllm_jax import eviction, policies, samplers
from dllm_jax.samplers import CertaintyPrior, Confidence, DreamSchedule, Factor, RandomOrder, Threshold
from tests.option_cases import OPTIONS

pytestmark = pytest.mark.usefixtures("unannotated")  # callers' types are not checked

EVERY = [kind for kind in OPTIONS if issubclass(kind, samplers.Sampler)]
OF_SAMPLERS = (
    "temperature=-0.1 temperature=inf temperature=nan cfg_scale=-1.0 cfg_scale=inf cfg_scale=nan "
    "top_p=0.0 top_p=-0.5 top_p=1.01 top_p=nan top_k=0 top_k=-3"
)
OF_DKV = "refresh_every=0 refresh_every=-2 delay=-1 shift='right'"
OUTSIDE = {
    Threshold: "alg='entropy' threshold=-0.01 threshold=1.01 threshold=nan",
    Factor: "factor=0.0 factor=-1.0 factor=nan",
    samplers.EBSampler: "gamma=-0.01 gamma=nan alg='origin'",
    samplers.PCSampler: "decay=-0.1 clip=0.0 frequencies=None",
    samplers.KLASS: "confidence_threshold=1.1 divergence=-1.0 divergence=nan history=0",
    samplers.EarlyCommit: "answer=-1 positions=0 early=-1.0 middle=nan late=inf",
    samplers.WINO: "wide_in=-0.1 narrow_out=1.1 fraction=1.5 fewest=0 most=0 most=4 fewest=21 "
    "confidence_eos_eot_inf=True",
    CertaintyPrior: "sigma=0.0 sigma=-2.0 sigma=nan threshold=-0.1 threshold=1.1 tokens_per_step=0",
    DreamSchedule: "eps=0.0 eps=1.0 eps=nan alg_temp=-1.0 alg_temp=nan",
    policies.SparseDLLM: "keep=-0.1 keep=1.5 keep=nan kernel=2 kernel=0 kernel=-1 delay=-1 side='suffix'",
    policies.D2Cache: "k=0 sigma=0.0 p=1.5 p=-0.1 inflate=-1 rollout_layers=0",
    policies.DLLMCache: "prompt_every=0 response_every=0 ratio=1.5",
    policies.SPACache: "prompt_every=0 ratio=1.5 start=-0.1 end=1.1 peak=1.5 least=-0.1 proxy=3",
    policies.MaskKV: "budget=0 ratio=1.5",
    policies.ElasticCache: "window=0 track=-1 gamma=nan",
    policies.WindowDiffusion: "window=0 active=0 refresh_every=0 window=2**31",
    policies.GaussianDropout: "window=0 seed=-1 sigma=-1.0 sigma=nan scale=0.0",
    policies.UniformDropout: "window=0 number=0",
    policies.NearAndLast: "near=-1 last=-1",
    policies.DKVDecode: OF_DKV,
    policies.DKVPD: OF_DKV,
    policies.DKVGreedy: "refresh_every=0 window=-1 around='both'",
    eviction.BoundaryMiddle: "beta=2.0 importance=(0.1,-0.2)",
    eviction.PromptPreference: "alpha=-1.0",
    eviction.SnapKV: "kernel=4",
    eviction.PositionVotes: "quarter=4",
    eviction.AdaKV: "floor=1.2",
}
SETTINGS = dict.fromkeys(EVERY, OF_SAMPLERS)
SETTINGS |= {kind: f"{SETTINGS.get(kind, '')} {text}" for kind, text in OUTSIDE.items()}


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


def test_fields_after_the_main_one_are_named():
    assert Threshold(0.7).threshold == 0.7
    assert Factor(2.0).factor == 2.0
    with pytest.raises(TypeError):
        Confidence("margin")


def test_who_needs_random_numbers():
    quiet = (
        Confidence(), Threshold(), samplers.EBSampler(), samplers.KLASS(), CertaintyPrior(),
        DreamSchedule(),
    )  # fmt: skip
    drawing = Confidence(temperature=0.1), RandomOrder(), Factor(temperature=1.0), DreamSchedule(alg_temp=0.5)
    drawing += samplers.WINO(temperature=0.5), DreamSchedule(alg="origin"), DreamSchedule(temperature=0.5)
    assert [sampler.draws for sampler in (*quiet, *drawing)] == [False] * 6 + [True] * 7


def test_the_base_is_abstract():
    with pytest.raises(TypeError):
        samplers.Sampler()
