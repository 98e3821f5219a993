"""SPA-Cache: shares by layer, proxies, and what each kind of step renews."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import policies
from dllm_jax.nn.arithmetic import cosine
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.rope import rope_table
from dllm_jax.policies import SPACache, ValueProxy
from dllm_jax.policies.parts.partial import gaussian_ratios
from dllm_jax.testing.runs import assert_same_run, finite
from tests.models import families, generated, in_int8, prompts, separate, tiny
from tests.replay.stepping import states

SOME = dict(prompt_every=6, response_every=4, ratio=0.5, start=0.2, end=0.3)
SHAPE = dict(length=16, block=8)


def test_shares_are_the_published_gaussian():
    """LLaDA's: 0.03 at the start, 0.25 at three quarters of the layers, 0.13 at the end, at least 2^-5."""
    shares = gaussian_ratios(32, 0.25, 0.03, 0.13, 0.75, 2**-5)
    t = np.arange(32) / 32
    left = 0.75 / np.sqrt(2 * np.log(0.25 / 0.03))
    right = 0.25 / np.sqrt(2 * np.log(0.25 / 0.13))
    expected = 0.25 * np.exp(-((t - 0.75) ** 2) / (2 * np.where(t < 0.75, left, right) ** 2))
    np.testing.assert_allclose(shares, np.maximum(expected, 2**-5), rtol=1e-12)
    assert max(shares) == shares[24] == 0.25
    assert gaussian_ratios(4, 0.3, 0.3, 0.3, 0.5, 0.0) == (0.3,) * 4
    assert gaussian_ratios(4, 0.3, 0.0, 0.0, 0.0, 0.0)[0] == 0.3
    assert gaussian_ratios(2, 0.3, 0.0, 0.0, 1.0, 0.0)[0] == 0.0


@families("dream")
def test_each_step_renews_its_share_in_each_layer(family):
    """Keys and values of the whole response; outputs of as many positions as the layer's share says."""
    model, prompt, response = tiny(family), 6, 16
    policy = SPACache(**SOME)
    seen = list(states(model, prompts(model, (prompt,))[0], length=response, policy=policy))
    shares = gaussian_ratios(model.spec.layers, 0.5, 0.2, 0.3, 0.75, 2**-5)
    assert len({int(share * response) for share in shares[1:]}) == len(shares) - 1, "all layers alike"
    for step, (before, after) in enumerate(itertools.pairwise(seen)):
        for layer in range(1, model.spec.layers):
            changed = {}
            for name in ("k", "v", "mlp"):
                old, new = (np.asarray(getattr(s.cache.layers, name))[layer, 0] for s in (before, after))
                apart = old != new
                changed[name] = apart.reshape(len(apart), -1).any(axis=1)
            due = step % 6 == 0, step % 6 == 0 or step % 4 == 0
            for name in ("k", "v"):
                assert changed[name][prompt:].all()
                assert changed[name][:prompt].any() == due[0] or step == 0
            updated = changed["mlp"][-response:].sum()
            assert updated == (response if due[1] else int(shares[layer] * response)), (step, layer)


@families("dream")
def test_proxies_have_the_cosines_of_the_largest_singular_directions(family):
    model, rank = tiny(family), 5
    proxy = ValueProxy.of(model, rank)
    spec, weights = model.spec, {name: a[1] for name, a in model.params["layers"].items()}
    layer = Layer(weights, spec, rope_table(1, spec.head_dim, spec.rope_base), 1)
    x, y = np.random.default_rng(0).normal(size=(2, 1, 7, spec.width)).astype(np.float32)
    ours = cosine(*(proxy(layer, layer.value(jnp.asarray(a))) for a in (x, y)))

    # S_r V_r^T of the normed input, by numpy's decomposition.
    matrix = np.asarray(weights["v"]).reshape(spec.width, -1)
    v, s, _ = np.linalg.svd(matrix, full_matrices=False)
    scale = np.asarray(weights["attn_norm"])
    normed = [a / np.sqrt((a**2).mean(-1, keepdims=True) + spec.norm_eps) * scale for a in (x, y)]
    a, b = (n[0] @ (v[:, :rank] * s[:rank]) for n in normed)
    expected = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(ours[0], expected, atol=1e-5)
    for other, near in ((separate(model), 1e-5), (in_int8(model), 0.05)):
        directions = ValueProxy.of(other, rank)
        again = cosine(*(directions(layer, layer.value(jnp.asarray(a))) for a in (x, y)))
        np.testing.assert_allclose(again, ours, atol=near)


def test_all_directions_are_the_values_themselves():
    model = tiny("llada")
    whole, few = (ValueProxy.of(model, rank) for rank in (model.spec.kv_heads * model.spec.head_dim, 2))
    none, all_of_them, some = (
        generated(policy=SPACache(**SOME, proxy=proxy), **SHAPE).trace for proxy in (None, whole, few)
    )
    assert_same_run(all_of_them, none, computed=True)
    np.testing.assert_allclose(finite(all_of_them.score), finite(none.score), atol=1e-5)
    assert np.abs(finite(some.score) - finite(none.score)).max() > 1e-3


class NewKeys(policies.DLLMCache):
    """dLLM-Cache that renews all keys of the response, and refreshes it with the prompt."""

    renews_keys = True

    def due(self, canvas, first):
        prompt, response = super().due(canvas, first)
        return prompt, response | prompt


@pytest.mark.exhaustive
@families("llada")
def test_one_share_for_all_layers_is_dllm_cache_with_new_keys(family):
    of_all = dataclasses.replace(SPACache(**SOME), start=0.5, end=0.5)
    ours, theirs, stored = (
        generated(family, policy, **SHAPE).trace
        for policy in (of_all, NewKeys(6, 4, 0.5), policies.DLLMCache(6, 4, 0.5))
    )
    assert_same_run(ours, theirs, computed=True)
    np.testing.assert_array_equal(finite(ours.score), finite(theirs.score))
    assert np.abs(finite(ours.score) - finite(stored.score)).max() > 1e-3


def test_settings_that_do_not_fit_are_refused():
    model = tiny("llada")
    with pytest.raises(ValueError, match=r"end=0.4 must be at most the peak's ratio=0.25"):
        SPACache(end=0.4)
    with pytest.raises(ValueError, match="rank=999 must be at most the width of the values"):
        ValueProxy.of(model, 999)
    proxy = ValueProxy.of(tiny("dream"), 2)
    with pytest.raises(ValueError, match=r"proxy is of a model with .* not of llada"):
        generated(policy=SPACache(proxy=proxy), **SHAPE)
    assert SPACache(proxy=proxy) == SPACache(proxy=ValueProxy.of(tiny("dream"), 2))
