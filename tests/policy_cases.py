"""What the generic tests need to know of each policy in `policies.ALL`, and samplers to go with them."""

import dataclasses
import itertools
from collections.abc import Iterable

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.testing.checks import BLOCK, LENGTH, SEVERAL_AT_ONCE
from tests.models import EXHAUSTIVE as EXHAUSTIVE
from tests.models import WIDE as WIDE
from tests.models import frequencies


@dataclasses.dataclass(frozen=True)
class PolicyCase:
    """One policy under test.

    Attributes:
      policy: settings that bite on a canvas of some twenty positions.
      limit: settings that must reproduce the exact decoder (named in the policy's docstring).
      limit_layout: arguments of `generate` with which they must.
      lossless: settings whose reuse is exact while the canvas does not change; None if the method is lossy
        even then, for the reason in `lossy`.
      lossy: why there are no lossless settings.
      random_order: it must know which positions are decoded next, so it goes with `RandomOrder` only.
      family: of the model on which it is tested every day; --exhaustive takes the other too.
    """

    policy: policies.Policy
    limit: policies.Policy
    limit_layout: dict
    lossless: policies.Policy | None
    lossy: str = ""
    random_order: bool = False
    family: str = "llada"


KEY = jax.random.key(7)  # of no consequence where nothing is drawn


def suited(policy: policies.Policy, sampler: samplers.Sampler) -> samplers.Sampler:
    """The sampler, or its like in random order for a policy that must know what is decoded next."""
    if type(policy) not in CASES or not CASES[type(policy)].random_order:
        return sampler
    return samplers.RandomOrder(
        **{f.name: getattr(sampler, f.name) for f in dataclasses.fields(samplers.Sampler)}
    )


def leaves_out(trace: dj.engine.features.trace.Trace) -> bool:
    """Whether a step attends to less than all positions in front of those that it computes."""
    computed, read = np.asarray(trace.computed), np.asarray(trace.read)
    before = np.arange(computed.shape[2]) < computed.argmax(axis=2)[..., None]
    return bool((before & read[0] & ~read & np.asarray(trace.active)[..., None]).any())


def short(value) -> str:
    """The name of a case in a test's id."""
    return type(value).__name__


def daily(values: Iterable, *kinds: type) -> list:
    """Parameters of a test: instances of these classes every day, the others with --exhaustive."""
    return [value for value in values if EXHAUSTIVE or type(value) in kinds]


def every_pair(*axes: Iterable) -> list[tuple]:
    """Few combinations of the axes' values that hold each pair of values of two axes at least once.

    Of two axes they are all combinations; all of four axes would take a day to test.
    """
    values = [list(axis) for axis in axes]
    pairs_of = lambda case: set(itertools.combinations(enumerate(case), min(2, len(case))))
    left = {case: pairs_of(case) for case in itertools.product(*(range(len(axis)) for axis in values))}
    uncovered, chosen = set().union(*left.values()), []
    while uncovered:
        best = max(left, key=lambda case: len(left[case] & uncovered))
        uncovered -= left.pop(best)
        chosen.append(best)
    return [tuple(axis[i] for axis, i in zip(values, case, strict=True)) for case in chosen]


def matrix(names: str, *axes: Iterable, today: Iterable[tuple]) -> pytest.MarkDecorator:
    """Parameters of a test: the cases of `today` every day, with --exhaustive every pair of the axes' values.

    In a case the class of a policy stands for its settings in `CASES`.
    """
    of_class = lambda kind: CASES[kind].policy if kind in CASES else kind()
    settings = lambda part: of_class(part) if isinstance(part, type) else part
    cases = every_pair(*axes) if EXHAUSTIVE else [tuple(map(settings, case)) for case in today]
    name = lambda part: part if isinstance(part, str) else getattr(part, "__name__", short(part))
    return pytest.mark.parametrize(names.split(", "), cases, ids=name)


# Of limits that are exact by any schedule: the run that other checks look at, and its program where settings
# differ in traced numbers only. With other thresholds it decodes one token per step, or a block.
AS_OTHER_CHECKS = dict(length=LENGTH, block=BLOCK, sampler=SEVERAL_AT_ONCE, widths=None)
ONE_TOKEN_PER_STEP = AS_OTHER_CHECKS | dict(sampler=samplers.Threshold(1.0))
ONE_STEP_PER_BLOCK = AS_OTHER_CHECKS | dict(sampler=samplers.Threshold(0.0))
ONE_STEP = dict(length=8, block=8, steps=1)

CASES: dict[type[policies.Policy], PolicyCase] = {
    policies.PrefixCache: PolicyCase(
        policies.PrefixCache(), policies.PrefixCache(), ONE_STEP_PER_BLOCK, policies.PrefixCache(),
        family="dream",
    ),
    policies.DualCache: PolicyCase(
        policies.DualCache(), policies.DualCache(), ONE_STEP_PER_BLOCK, policies.DualCache()
    ),
    policies.SparseDLLM: PolicyCase(
        policies.SparseDLLM(), policies.SparseDLLM(), ONE_STEP_PER_BLOCK, policies.SparseDLLM(keep=1.0),
        family="dream",
    ),
    policies.DLLMCache: PolicyCase(
        policies.DLLMCache(prompt_every=5, response_every=3),
        policies.DLLMCache(prompt_every=1, response_every=1), AS_OTHER_CHECKS, policies.DLLMCache(),
    ),
    policies.SPACache: PolicyCase(
        policies.SPACache(prompt_every=6, response_every=4, ratio=0.5, start=0.2, end=0.3),
        policies.SPACache(prompt_every=1, response_every=4, ratio=0.5, start=0.2, end=0.3), AS_OTHER_CHECKS,
        policies.SPACache(), family="dream",
    ),
    policies.ESDLLM: PolicyCase(
        policies.ESDLLM(prompt_every=5, block_every=3, ratios=(0.75, 0.5), depths=(0.0, 0.5)),
        policies.ESDLLM(), ONE_STEP, None, lossy="rows leave every step but some",
    ),
    policies.DyLLM: PolicyCase(
        policies.DyLLM(tau=0.95, full_steps=1, prompt_every=3), policies.DyLLM(full_steps=50),
        AS_OTHER_CHECKS, policies.DyLLM(full_steps=1), family="dream",
    ),
    policies.MaskKV: PolicyCase(
        policies.MaskKV(prompt_every=6, response_every=3, budget=4),
        policies.MaskKV(prompt_every=1, response_every=1, budget=4), AS_OTHER_CHECKS, None,
        lossy="the prompt's pairs are evicted after the first step", family="dream",
    ),
    policies.ElasticCache: PolicyCase(
        policies.ElasticCache(window=4, gamma=0.97), policies.ElasticCache(window=8), ONE_STEP,
        policies.ElasticCache(window=4),
    ),
    policies.D2Cache: PolicyCase(
        policies.D2Cache(k=5, p=0.2, inflate=2), policies.D2Cache(k=1, p=1.0), ONE_TOKEN_PER_STEP,
        policies.D2Cache(k=4), family="dream",
    ),
    policies.DKVDecode: PolicyCase(
        policies.DKVDecode(), policies.DKVDecode(refresh_every=1), AS_OTHER_CHECKS, policies.DKVDecode()
    ),
    policies.DKVGreedy: PolicyCase(
        policies.DKVGreedy(), policies.DKVGreedy(refresh_every=1),
        dict(length=LENGTH, block=BLOCK, widths=None), None,
        "scores of a random order are no outputs of the model; see test_policy_dkv_greedy.py",
        random_order=True, family="dream",
    ),
    policies.DKVPrefill: PolicyCase(
        policies.DKVPrefill(), policies.DKVPrefill(), ONE_STEP, policies.DKVPrefill()
    ),
    policies.DKVPD: PolicyCase(
        policies.DKVPD(), policies.DKVPD(), ONE_STEP, policies.DKVPD(), family="dream",
    ),
    policies.EvictPrompt: PolicyCase(
        policies.EvictPrompt(budget=4),
        policies.EvictPrompt(budget=2, policy=policies.DKVDecode(refresh_every=1)),
        ONE_TOKEN_PER_STEP, policies.EvictPrompt(budget=64),
    ),
    policies.WindowDiffusion: PolicyCase(
        policies.WindowDiffusion(window=4, active=3, refresh_every=4),
        policies.WindowDiffusion(window=2, active=2, refresh_every=1), ONE_TOKEN_PER_STEP,
        policies.WindowDiffusion(active=4), family="dream",
    ),
    policies.SlidingCache: PolicyCase(
        policies.SlidingCache(window=2), policies.SlidingCache(), ONE_STEP_PER_BLOCK,
        policies.SlidingCache(window=2),
    ),
    policies.SuffixDropout: PolicyCase(
        policies.SuffixDropout(keep=policies.GaussianDropout(window=6, sigma=2.0)),
        policies.SuffixDropout(policies.Policy(), policies.NearAndLast(8)), ONE_TOKEN_PER_STEP,
        policies.SuffixDropout(),
    ),
}  # fmt: skip

# Made for block-causal models, where stored pairs are those of earlier blocks.
BLOCK_CASES: dict[type[policies.Policy], PolicyCase] = {
    policies.SubBlockCache: PolicyCase(
        policies.SubBlockCache(), policies.SubBlockCache(), ONE_STEP_PER_BLOCK, policies.SubBlockCache()
    ),
    policies.MAGE: PolicyCase(
        policies.MAGE(keep=2),
        policies.MAGE(keep=1.0),
        AS_OTHER_CHECKS,
        None,
        lossy="it computes as many positions as exact decoding, and reads fewer",
    ),
    policies.DelayedCache: PolicyCase(
        policies.DelayedCache(), policies.DelayedCache(), ONE_STEP_PER_BLOCK, policies.DelayedCache()
    ),
    policies.FOCUS: PolicyCase(
        policies.FOCUS(),
        policies.FOCUS(alpha=12, delayed=False),
        AS_OTHER_CHECKS,
        None,
        lossy="masks leave the first step of a block",
    ),
}

CACHED = tuple(case.policy for case in CASES.values())
EVERY = (policies.Policy(), *CACHED)

SAMPLER_CASES = (
    samplers.Confidence(), samplers.RandomOrder(), samplers.CertaintyPrior(),
    samplers.CertaintyPrior(tokens_per_step=2), samplers.Factor(), samplers.EBSampler(3.0),
    samplers.PCSampler(frequencies()), samplers.KLASS(confidence_threshold=0.05, divergence=0.1),
    SEVERAL_AT_ONCE, samplers.DreamSchedule(), samplers.DreamSchedule(alg="origin"),
    samplers.Dynamic(0.25), samplers.Sequential(), samplers.Edit(0.25, 0.2, most_steps=3),
    samplers.LocalLeap(0.2, 0.1),
)  # fmt: skip
