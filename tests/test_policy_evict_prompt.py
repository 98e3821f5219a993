import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool
from typing_extensions import override

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers
from dllm_jax.decoding.request import prepare
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.testing.runs import assert_same_run, finite
from tests import refuses
from tests.models import families, generated, tiny
from tests.policy_cases import short, suited
from tests.test_policy_reads import NearBlocks

KEY = jax.random.key(3)
EXACT = policies.Policy()
UNDER = (
    policies.DualCache(), policies.PrefixCache(), policies.DKVDecode(refresh_every=3),
    policies.DKVPD(refresh_every=3), policies.DKVGreedy(refresh_every=3), NearBlocks(),
    policies.SuffixDropout(policies.DualCache(), policies.NearAndLast(2, 1)),
)  # fmt: skip


def run(policy: policies.Policy, under: policies.Policy, family: str = "llada") -> dj.Output:
    """Of prompts of nine and five positions, by a sampler that suits the policy under the eviction."""
    options = dict(sampler=suited(under, samplers.Confidence()), key=KEY, length=16, block=8)
    return generated(family, policy, (9, 5), **options)


def scores(out: dj.Output) -> np.ndarray:
    """Those of all steps; 0 where a position has none."""
    assert out.trace is not None
    return finite(out.trace.score)


@pytest.mark.exhaustive
@families("llada")
@pytest.mark.parametrize("under", UNDER, ids=short)
def test_a_budget_for_the_whole_prompt_is_the_policy_without_eviction(under, family):
    alone = run(under, under, family)
    whole, few = (run(policies.EvictPrompt(budget=n, policy=under), under, family) for n in (9, 1))
    assert_same_run(whole.trace, alone.trace, computed=True)
    np.testing.assert_allclose(scores(whole), scores(alone), atol=1e-5)
    # Scores of a random order are no outputs of the model.
    differs = np.abs(scores(few) - scores(alone)).max() > 1e-3 or (few.tokens != alone.tokens).any()
    assert differs, "an eviction that changes nothing would pass too"


def test_the_storage_is_the_response_and_the_budget():
    spec, layout = dj.presets.model_spec("llada-8b"), dj.Layout(1024, 256, 32, 256)
    policy = policies.EvictPrompt(budget=64, layers=eviction.UniformLayers())
    made = jax.eval_shape(lambda: policy.init(spec, layout, 2, jnp.bfloat16))
    pairs = spec.layers * spec.kv_heads * spec.head_dim * 2  # scalars for a position of two sequences
    assert made.layers.k.size == 256 * pairs
    assert made.shared.pairs.k.size == 64 * pairs
    assert made.shared.policy == ()


class PartOfThePrompt(policies.DualCache):
    """Recomputes two prompt positions in every step."""

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return super().select(cache, canvas) | (canvas.position < 2)


@pytest.mark.exhaustive
def test_a_part_of_the_prompt_is_never_recomputed():
    part = run(policies.EvictPrompt(budget=3, policy=PartOfThePrompt()), policies.DualCache())
    none = run(policies.EvictPrompt(budget=3), policies.DualCache())
    assert_same_run(part.trace, none.trace, computed=True)


def test_pairs_are_chosen_anew_or_kept():
    """The first block alone has the same pairs either way."""
    anew, kept = (
        run(policies.EvictPrompt(budget=2, reselect=reselect), policies.DualCache())
        for reselect in (True, False)
    )
    np.testing.assert_array_equal(scores(anew)[:8], scores(kept)[:8])
    assert np.abs(scores(anew)[8:] - scores(kept)[8:]).max() > 1e-4


def test_voters_of_a_rank_are_those_of_the_first_block():
    """Also where a block-causal model chooses its pairs once: those of the first block are the same."""
    model, ids = tiny("sdar", block_size=4), np.arange(5, 21)[None]
    once, anew = (
        policies.EvictPrompt(
            budget=6, votes=eviction.MiddleVote(), policy=policies.Policy(), reselect=reselect,
            layers=eviction.UniformLayers(), heads=eviction.EvenHeads(),
        )
        for reselect in (False, True)
    )  # fmt: skip
    found, expected = (
        scores(dj.generate(model, ids, length=8, policy=policy, trace=True)) for policy in (once, anew)
    )
    np.testing.assert_allclose(found[:4], expected[:4], atol=1e-5)


def test_policies_that_recompute_the_prompt_are_refused():
    with pytest.raises(ValueError, match="recomputes the prompt in every step"):
        generated(policy=policies.EvictPrompt(policy=policies.Policy()))


@pytest.mark.parametrize("over", [policies.EvictPrompt, policies.SuffixDropout])
def test_policies_that_decide_what_they_attend_to_are_refused(over):
    kinds = policies.MaskKV, policies.SparseDLLM, policies.DLLMCache, policies.D2Cache
    for kind in (*kinds, policies.ElasticCache, policies.EvictPrompt):
        with pytest.raises(
            ValueError, match=rf"policy={kind.__name__}\(.* is not supported by {over.__name__}"
        ):
            over(policy=kind())


NAMES = {name: getattr(place, name) for place in (dj.eviction, dj.policies) for name in place.__all__}


def advised(message: str) -> list[str]:
    """The calls of policies that a message proposes."""
    calls = re.findall(r"(?:Use|or) ((?:EvictPrompt|MaskKV)\(.*?\)), which", message)
    assert calls, message
    return calls


REFUSED = ["EvictPrompt(budget=16)", "EvictPrompt(budget=2, policy=PrefixCache(), votes=SnapKV())"]
REFUSED += ["EvictPrompt(3, policy=Policy())", "MaskKV(budget=4, reselect=True, layers=PyramidKV())"]
REFUSED += ["MaskKV(budget=4, reselect=True, heads=EvenHeads(), layers=UniformLayers(), votes=PromptVotes())"]
SETS = [policy for policy in (*policies.ALL, *policies.BLOCK_CAUSAL) if policy.only_sets]
REFUSED += [f"EvictPrompt(3, policy={type(policy).__name__}())" for policy in SETS]


@pytest.mark.parametrize("family", ["sdar", "fast-dllm-v2"])
@pytest.mark.parametrize("policy", REFUSED)
def test_refusals_in_blocks_give_calls_that_run(policy, family):
    """Complete ones, of the same class and budget, which are not refused again."""
    model, asked = tiny(family), eval(policy, NAMES)
    with pytest.raises(ValueError, match="selects once") as refusal:
        prepare(model, [[7, 8, 9]], length=4, policy=asked)
    calls = advised(str(refusal.value))
    assert len(calls) == 2 - model.spec.shifted
    for text in calls:
        other = eval(text, NAMES)
        assert (type(other), other.budget) == (type(asked), asked.budget)
        shaped(family, other)


def shaped(family: str, policy: policies.Policy, block: dj.Sliding | None = None):
    """Raises what a generation raises before its first step."""
    jax.eval_shape(lambda: dj.generate(tiny(family), [[7, 8, 9]], length=4, policy=policy, block=block))


def test_refused_layers_get_advice_for_each_kind_of_model():
    """Under eviction, and in blocks that slide, where a model may not support the policy either."""
    own = r"Use (.*), or an integer block where \w+ supports the model"
    for policy in (*policies.ALL, *policies.BLOCK_CAUSAL):
        if policy.only_sets:
            continue
        sets = r"of sets: DualCache\(\), or on block-causal models Policy\(\) with reselect=False"
        refuses(sets, policies.EvictPrompt, policy=policy)
        refuses(own, shaped, "llada", policy, dj.Sliding(4))
    for policy in (policies.SlidingCache(), policies.DualCache(), policies.DKVDecode()):
        shaped("llada", policy, dj.Sliding(4))
    refuses(r"nothing can be evicted\. Use DualCache", shaped, "llada", policies.EvictPrompt(policy=EXACT))
    shaped("llada", policies.EvictPrompt(policy=policies.DualCache()))
    for family in ("sdar", "fast-dllm-v2"):
        shaped(family, policies.EvictPrompt(policy=EXACT, reselect=False))
