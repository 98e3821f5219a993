"""Options refuse, at construction, every value and type that they do not mean."""

import dataclasses
import math
import typing

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers
from dllm_jax.decoding.buckets import Ladder
from dllm_jax.published.expressions import call, policy
from tests.models import tiny

pytestmark = pytest.mark.usefixtures("unannotated")  # callers' types are not checked

PARTS = (
    eviction.PyramidKV, eviction.SqueezeAttention, eviction.BoundaryMiddle, eviction.OnlineLayers,
    eviction.PromptPreference, eviction.AdaKV, eviction.PositionVotes, eviction.SnapKV,
    samplers.Confidence, samplers.RandomOrder, samplers.CertaintyPrior, samplers.DreamSchedule,
    samplers.Threshold, samplers.Factor, dj.Layout,
)  # fmt: skip
NEEDED = {
    eviction.SqueezeAttention: {"cosine": (0.5,)},
    dj.Layout: {"prompt": 4, "response": 4, "block": 4, "steps": 4},
}
WRONG = {int: (2.5, True, "4"), float: (math.nan, math.inf, True, "x"), bool: (1, "yes"), tuple: ((), 0.5)}
FIELDS = [
    (kind, field.name, value)
    for kind in (*map(type, policies.ALL), *PARTS)
    for field in dataclasses.fields(kind)
    for type_ in (typing.get_args(field.type) or (field.type,))[:1]
    for value in WRONG.get(typing.get_origin(field.type) or type_, ("unknown",))
]


@pytest.mark.parametrize(("kind", "field", "value"), FIELDS, ids=lambda x: getattr(x, "__name__", repr(x)))
def test_every_field_refuses_another_type(kind, field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        kind(**(NEEDED.get(kind, {}) | {field: value}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: policies.DKVDecode(refresh_every=2.5), "=2.5 must be a whole number of at least 1"),
        (lambda: policies.MaskKV(heads=eviction.SnapKV()), r"heads=SnapKV\(.* must be a HeadBudgets"),
        (lambda: policies.MaskKV(layers=eviction.SnapKV()), r"layers=SnapKV\(.* must be a LayerBudgets"),
        (lambda: policies.MaskKV(votes=eviction.PyramidKV()), r"votes=PyramidKV\(.* must be a Voters"),
        (lambda: policies.SparseDLLM(kernel=4), "kernel=4 must be an odd number of at least 1"),
        (lambda: eviction.BoundaryMiddle([0.5, math.nan]), r"importance=\[0.5, nan\] must be finite"),
        (lambda: eviction.BoundaryMiddle("0.5"), "importance='0.5' must be finite numbers, one per layer"),
        (lambda: eviction.PositionVotes(4), "quarter=4 must be a whole number in 0..3"),
        (lambda: samplers.Threshold("x"), r"threshold='x' must be a number in \[0, 1\]"),
        (lambda: samplers.Confidence(top_p=0), r"top_p=0 must be a number in \(0, 1\], or None"),
        (lambda: samplers.DreamSchedule(eps=1), r"eps=1 must be a number in \(0, 1\)"),
        (lambda: samplers.Confidence(alg="x"), "alg='x' must be one of 'prob', 'margin', 'entropy'"),
        (lambda: Ladder((1.5, 2.5)), r"rungs=\(1.5, 2.5\) must be whole numbers"),
        (lambda: Ladder(64), "rungs=64 must be whole numbers"),
        (lambda: dj.generate(tiny("llada"), [1, 2], length=8.0), "response=8.0 must be a whole number"),
        (lambda: dj.generate(tiny("llada"), [1, 2], buckets=[64, 128]), r"buckets=\[64, 128\] must be"),
        (lambda: dj.warmup(tiny("llada"), 64), r"ladder=64 must be a ladder, such as dj.bu"),
        (lambda: dj.warmup(tiny("llada"), Ladder((4,)), batch=0), "batch=0 must be a whole number"),
        (lambda: dj.warmup(tiny("llada"), buckets=Ladder((4,))), "buckets= is the second argument of warmup"),
        (lambda: dj.warmup(tiny("llada"), Ladder((4,)), blocks=4), "blocks: warmup takes block, key, length"),
    ],
)  # fmt: skip
def test_the_message_has_the_value_and_the_rule(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sequences_and_numbers_of_numpy_become_those_of_python():
    profile = (0.5, 0.25)
    for made in (list(profile), np.array(profile), jnp.array(profile)):
        assert eviction.BoundaryMiddle(made) == eviction.BoundaryMiddle(profile)
        assert hash(eviction.SqueezeAttention(made)) == hash(eviction.SqueezeAttention(profile))
    assert Ladder([64, np.int64(128)]).rungs == (64, 128)
    numpy = policies.DLLMCache(prompt_every=np.int64(4), ratio=np.float64(0.5))
    assert numpy == policies.DLLMCache(prompt_every=4, ratio=0.5)
    assert policy(call(numpy)) == numpy


def test_none_is_refused_where_it_means_nothing():
    with pytest.raises(ValueError, match="k=None must be a whole number"):
        policies.D2Cache(k=None)
    assert policies.D2Cache(rollout_layers=None).rollout_layers is None
