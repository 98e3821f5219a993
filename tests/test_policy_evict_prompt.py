import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool
from typing_extensions import override

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.tasks import FewShot, accuracy, examples
from dllm_jax.testing.runs import assert_same_run
from tests.models import families, tiny
from tests.policy_cases import short, suited

KEY = jax.random.key(3)
UNDER = (
    policies.DualCache(),
    policies.PrefixCache(),
    policies.DKVDecode(refresh_every=3),
    policies.DKVPD(refresh_every=3),
    policies.DKVGreedy(refresh_every=3),
)


EVERY_DAY = (policies.DualCache, policies.DKVDecode)
MASK = np.arange(9) >= np.array([[0], [4]])


def prompts(model: dj.Model) -> np.ndarray:
    """Two, of nine and five positions."""
    ids = np.random.default_rng(0).integers(0, model.spec.vocab - 20, MASK.shape)
    return np.where(MASK, ids, model.spec.eos_id)


def run(
    model: dj.Model,
    policy: policies.Policy,
    under: policies.Policy,
    prompt: np.ndarray | None = None,
    mask: np.ndarray | None = MASK,
) -> dj.Output:
    """A generation."""
    prompt, sampler = prompts(model) if prompt is None else prompt, suited(under, samplers.Confidence())
    options = dict(policy=policy, sampler=sampler, key=KEY, trace=True)
    return dj.generate(model, prompt, prompt_mask=mask, length=16, block=8, **options)


def scores(out: dj.Output) -> np.ndarray:
    """Those of all steps; 0 where a position has none."""
    assert out.trace is not None
    return np.where(np.isfinite(out.trace.score), out.trace.score, 0)


@families("llada")
@pytest.mark.parametrize(
    "under",
    [
        pytest.param(u, marks=() if type(u) in EVERY_DAY else pytest.mark.exhaustive, id=short(u))
        for u in UNDER
    ],
)
def test_a_budget_for_the_whole_prompt_is_the_policy_without_eviction(under, family):
    model = tiny(family)
    alone = run(model, under, under)
    whole, few = (run(model, policies.EvictPrompt(budget=n, policy=under), under) for n in (9, 1))
    assert_same_run(whole.trace, alone.trace, computed=True)
    np.testing.assert_allclose(scores(whole), scores(alone), atol=1e-5)
    assert np.abs(scores(few) - scores(alone)).max() > 1e-3, "an eviction that changes nothing would pass too"


def test_the_storage_is_the_response_and_the_budget():
    spec, layout = dj.presets.model_spec("llada-8b"), dj.Layout(1024, 256, 32, 256)
    policy = policies.EvictPrompt(budget=64, layers=eviction.UniformLayers())
    made = jax.eval_shape(lambda: policy.init(spec, layout, 2, jnp.bfloat16))
    pairs = spec.layers * spec.kv_heads * spec.head * 2  # scalars for a position of two sequences
    assert made.layers.k.size == 256 * pairs
    assert made.shared.pairs.k.size == 64 * pairs
    assert made.shared.policy == ()


def test_what_the_first_row_looks_at_is_kept():
    """With a shifted head it is no mask: `tiny-dream` misses few-shot examples for which it has no vote."""
    path = dj.embedded.path("tiny-dream")
    model, tokenizer = dj.load(path), read_tokenizer(path)
    asked = examples(FewShot(), 31, 5, 16, "held_out")
    right = lambda votes: accuracy(
        model, tokenizer, asked, 16, length=4, policy=policies.EvictPrompt(budget=8, votes=votes)
    )
    assert policies.EvictPrompt().votes == eviction.PredictingVotes()
    assert right(eviction.PredictingVotes()) > 0.9 > 0.3 > right(eviction.MaskVotes())


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
    np.testing.assert_array_equal(scores(anew)[:8], scores(kept)[:8])
    assert np.abs(scores(anew)[8:] - scores(kept)[8:]).max() > 1e-4


@pytest.mark.parametrize(
    ("under", "message"),
    [
        (policies.Policy(), "recomputes the prompt in every step"),
        (policies.MaskKV(), r"policy=MaskKV\(.* has a layer of its own"),
        (policies.SparseDLLM(), r"policy=SparseDLLM\(.* has a layer of its own"),
        (policies.DLLMCache(), r"policy=DLLMCache\(.* has a layer of its own"),
        (policies.DKVPrefill(), r"policy=DKVPrefill\(.* has a layer of its own"),
        (policies.D2Cache(), r"policy=D2Cache\(.* has a layer of its own"),
        (policies.ElasticCache(), r"policy=ElasticCache\(.* has a layer of its own"),
        (policies.EvictPrompt(), r"policy=EvictPrompt\(.* has a layer of its own"),
    ],
)
def test_policies_that_store_in_a_way_of_their_own_are_refused(under, message):
    with pytest.raises(ValueError, match=message):
        policies.EvictPrompt(policy=under)
