"""A user's subclass of a policy keeps its methods where the library runs the policy as another one."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import eviction, policies
from dllm_jax.policies.base import for_model
from dllm_jax.samplers import EntropyNoise
from dllm_jax.testing import tiny
from tests import refuses

FAMILIES = ("sdar", "nemotron", "diffusion-gemma")
EVEN = dict(heads=eviction.EvenHeads(), layers=eviction.UniformLayers(), policy=policies.Policy())
ASKED = (
    *policies.ALL,
    *policies.BLOCK_CAUSAL,
    policies.MaskKV(reselect=True, prompt_every=10),
    policies.EvictPrompt(**EVEN),
    policies.EvictPrompt(policy=policies.Policy(), reselect=False),
)


def derived(policy, **methods):
    """The policy as an instance of a user's class with an option and methods of its own."""
    body = {"__annotations__": {"mine": int}, "mine": 3, "__module__": __name__} | methods
    kind = dataclasses.dataclass(frozen=True)(type("Mine", (type(policy),), body))
    return kind(**{field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)})


def runs_as_another(policy, spec):
    """Whether the library's own policy is refused, or runs as one that has none of its methods."""
    try:
        return not isinstance(for_model(policy, spec), type(policy))
    except ValueError:
        return True


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ASKED, ids=repr)
def test_a_subclass_runs_its_own_methods_or_is_refused_by_name(policy, family):
    spec = tiny(family).spec
    mine = derived(policy, extra=lambda self: self.mine)
    if runs_as_another(policy, spec):
        refuses("Mine", for_model, mine, spec)
        return
    runs = for_model(mine, spec)
    assert isinstance(runs, type(mine))
    assert (runs.extra(), type(runs).__name__, hash(runs)) == (3, "Mine", hash(for_model(mine, spec)))
    assert runs == for_model(mine, spec)


def everything(self, cache, canvas):
    return canvas.everything


def test_a_rule_that_is_read_by_its_options_is_no_subclass():
    mine = derived(policies.SparseDLLM())
    with pytest.raises(ValueError, match=r"evict=.*Mine\(.* must be a SparseDLLM itself"):
        policies.ESDLLM(evict=mine)


@pytest.mark.parametrize("policy", [policies.D2Cache(k=2), policies.DLLMCache(ratio=0.25)], ids=repr)
def test_a_subclass_in_a_canvas_computes_what_it_selects(policy):
    calls: dict[str, int] = {}

    def observe(self, cache, canvas, rows, proposal):
        calls[type(self).__name__] = self.mine
        return super(kind, self).observe(cache, canvas, rows, proposal)

    model, key = tiny("diffusion-gemma"), jax.random.key(0)
    options = dict(length=8, key=key, sampler=EntropyNoise(steps=4, certainty=0.0), widths=(8,))
    methods = {"observe": observe}
    if isinstance(policy, policies.D2Cache):
        methods["select"] = everything
    mine = derived(policy, **methods)
    kind = type(mine)
    exact = dj.generate(model, [[1, 2, 3]], policy=policies.Policy(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dj.generate(model, [[1, 2, 3]], policy=mine, **options)
    assert calls == {"Mine": 3}
    if isinstance(policy, policies.D2Cache):
        np.testing.assert_array_equal(found.tokens, exact.tokens)
        assert found.stats.idle.tolist() == [0]
