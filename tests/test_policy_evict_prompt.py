import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool
from typing_extensions import override

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from tests.models import FAMILIES, tiny
from tests.policy_cases import suited
from tests.traces import assert_same_run

KEY = jax.random.key(3)
UNDER = (
    policies.DualCache(),
    policies.PrefixCache(),
    policies.DKVDecode(refresh_every=3),
    policies.DKVPD(refresh_every=3),
    policies.DKVGreedy(refresh_every=3),
)


def run(model: dj.Model, policy: policies.Policy, under: policies.Policy, **options) -> dj.Output:
    """Prompts of nine and five positions."""
    mask = np.arange(9) >= np.array([[0], [4]])
    ids = np.random.default_rng(0).integers(0, model.spec.vocab - 20, mask.shape)
    prompt = np.where(mask, ids, model.spec.eos_id)
    shape = dict(length=16, block=8) | options
    sampler = suited(under, samplers.Confidence())
    return dj.generate(
        model, prompt, prompt_mask=mask, policy=policy, sampler=sampler, key=KEY, trace=True, **shape
    )


@pytest.mark.rotate(every=3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("under", UNDER, ids=lambda policy: type(policy).__name__)
def test_a_budget_for_the_whole_prompt_is_the_policy_without_eviction(under, family):
    model = tiny(family)
    alone = run(model, under, under)
    whole, few = (run(model, policies.EvictPrompt(budget=n, policy=under), under) for n in (9, 1))
    assert_same_run(whole.trace, alone.trace, computed=True)
    scores = [np.where(np.isfinite(out.trace.score), out.trace.score, 0) for out in (alone, whole, few)]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)
    assert np.abs(scores[2] - scores[0]).max() > 1e-3, "an eviction that changes nothing would pass too"


def test_the_storage_is_the_response_and_the_budget():
    spec, layout = dj.presets.model_spec("llada-8b"), dj.Layout(1024, 256, 32, 256)
    policy = policies.EvictPrompt(budget=64, layers=eviction.UniformLayers())
    made = jax.eval_shape(lambda: policy.init(spec, layout, 2, jnp.bfloat16))
    pairs = spec.layers * spec.kv_heads * spec.head * 2  # scalars for a position of two sequences
    assert made.layers.k.size == 256 * pairs
    assert made.shared.pairs.k.size == 64 * pairs
    assert made.shared.policy == ()


@dataclasses.dataclass(frozen=True)
class PartOfThePrompt(policies.DualCache):
    """Recomputes two prompt positions in every step."""

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return super().select(cache, canvas) | (canvas.position < 2)


def test_a_part_of_the_prompt_is_never_recomputed():
    model = tiny("llada")
    part = run(model, policies.EvictPrompt(budget=3, policy=PartOfThePrompt()), policies.DualCache())
    none = run(model, policies.EvictPrompt(budget=3), policies.DualCache())
    assert_same_run(part.trace, none.trace, computed=True)


def test_pairs_are_chosen_anew_or_kept():
    """The first block alone has the same pairs either way."""
    model, under = tiny("llada"), policies.DualCache()
    anew, kept = (run(model, policies.EvictPrompt(budget=2, reselect=r), under) for r in (True, False))
    scores = [np.where(np.isfinite(out.trace.score), out.trace.score, 0) for out in (anew, kept)]
    np.testing.assert_array_equal(scores[0][:8], scores[1][:8])
    assert np.abs(scores[0][8:] - scores[1][8:]).max() > 1e-4


@pytest.mark.parametrize(
    ("under", "message"),
    [
        (policies.Policy(), "recomputes the prompt in every step"),
        (policies.MaskKV(), r"policy=MaskKV\(.* in a way of its own"),
        (policies.SparseDLLM(), r"policy=SparseDLLM\(.* in a way of its own"),
        (policies.ElasticCache(), r"policy=ElasticCache\(.* in a way of its own"),
        (policies.D2Cache(), r"policy=D2Cache\(.* in a way of its own"),
        (policies.EvictPrompt(), r"policy=EvictPrompt\(.* in a way of its own"),
    ],
)
def test_policies_that_store_in_a_way_of_their_own_are_refused(under, message):
    with pytest.raises(ValueError, match=message):
        policies.EvictPrompt(policy=under)
