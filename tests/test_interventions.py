"""Interventions: other values at named places, under every policy, as data of unchanged programs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.engine.loop import denoise
from dllm_jax.testing.checks import SEVERAL_AT_ONCE
from dllm_jax.testing.runs import assert_same_run, compilations, of_sequence
from tests.models import FAMILIES, prompts, random_tokens, separate, tiny
from tests.policy_cases import EVERY, KEY, daily, matrix, short, suited

Intervention = dj.Intervention
PLACES = ("residual", "attention_output", "mlp_output", "head_output", "k", "v")


def of_shape(spec, place):
    heads = {"head_output": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
    return (heads[place], spec.head_dim) if place in heads else (spec.width,)


def drawn(spec, place, *lead):
    return np.random.default_rng(1).standard_normal((*lead, *of_shape(spec, place))).astype(np.float32)


CAPTURED = tuple(place for place in PLACES if place != "head_output")


@matrix("place, family", CAPTURED, FAMILIES, today=[("residual", "llada"), ("k", "llada"), ("v", "dream")])
def test_forward_with_a_patch_is_the_network_with_that_value(place, family):
    """By hand, of a layer's own functions: the patched value is there, everything before it is as it was."""
    model = tiny(family)
    tokens = random_tokens(model.spec, 2, 7)
    value = drawn(model.spec, place, 1, 2, 2)
    patch = Intervention.patch(place, value, layers=1, positions=[[2, 5], [0, 3]])
    what = tuple(dj.analysis.activations.AXES)
    plain, seen = (dj.capture(model, tokens, what, interventions=i) for i in ((), (patch,)))
    at, sequence = np.array([[2, 5], [0, 3]]), np.arange(2)[:, None]
    np.testing.assert_array_equal(getattr(seen, place)[0, 1][sequence, at], value[0])
    elsewhere = np.ones((2, 7), bool)
    elsewhere[sequence, at] = False
    ours, usual = (getattr(of, place)[0] for of in (seen, plain))
    np.testing.assert_allclose(ours[1][elsewhere], usual[1][elsewhere], atol=1e-6)
    np.testing.assert_allclose(ours[0], usual[0], atol=1e-6)
    assert not np.array_equal(seen.residual[0, 2], plain.residual[0, 2])
    hidden = dj.hidden_states(model, tokens, None, (patch,))
    np.testing.assert_allclose(seen.residual[0], hidden, atol=1e-5)
    changed, usual = (dj.forward(model, tokens, interventions=i) for i in ((patch,), ()))
    assert np.abs(changed - usual).max() > 1e-3
    again = dj.forward(separate(model), tokens, interventions=(patch,))
    np.testing.assert_allclose(again, changed, atol=1e-4)


def test_steering_adds_and_masking_takes_away():
    model = tiny("llada")
    tokens, direction = random_tokens(model.spec, 1, 6), drawn(model.spec, "residual")
    usual = np.asarray(dj.hidden_states(model, tokens))
    steer = Intervention.steer("residual", direction, 0.5, layers=(0, 2), positions=3)
    stream = np.asarray(dj.hidden_states(model, tokens, None, (steer,)))
    np.testing.assert_allclose(stream[0, 0, 3], usual[0, 0, 3] + 0.5 * direction, rtol=1e-6)
    last = dj.hidden_states(model, tokens, None, (Intervention.steer("residual", direction, layers=2),))
    np.testing.assert_allclose(
        last - usual, np.stack([0 * usual[0], 0 * usual[0], 0 * usual[0] + direction]), atol=1e-5
    )
    twice = dj.hidden_states(model, tokens, None, (steer, steer))
    np.testing.assert_allclose(twice[0, 0, 3], usual[0, 0, 3] + direction, rtol=1e-6)
    masked = Intervention.mask("attention_output", layers=0), Intervention.mask("mlp_output", layers=0)
    stream = dj.hidden_states(model, tokens, None, masked)
    np.testing.assert_array_equal(stream[1], stream[0])


def test_one_head_is_changed_as_its_rows_of_the_output_projection():
    """Without the head's rows it adds nothing; other heads, of other values too, compile nothing anew."""
    model = tiny("llada")
    tokens, spec = random_tokens(model.spec, 2, 6), model.spec
    o = model.params["layers"]["o"]  # [n h d m]
    run = lambda *some: np.asarray(dj.forward(model, tokens, interventions=some))
    for heads in ((1,), (2,)):
        layers = {**model.params["layers"], "o": o.at[1, np.array(heads)].set(0)}
        without = dataclasses.replace(model, params={**model.params, "layers": layers})
        with compilations() as compiled:
            masked = run(Intervention.mask("head_output", layers=1, heads=heads))
        np.testing.assert_allclose(masked, dj.forward(without, tokens), atol=1e-5)
        assert heads == (1,) or not compiled
    assert np.abs(masked - run()).max() > 1e-3

    # What the heads 3 and 0 add to the stream is their own directions through their own rows.
    d = drawn(spec, "head_output")[:2]
    added = np.einsum("hd,hdm->m", d, o[1, np.array([3, 0])])
    both = run(Intervention.steer("head_output", d, layers=1, heads=(3, 0), positions=2))
    stream = run(Intervention.steer("attention_output", added, layers=1, positions=2))
    np.testing.assert_allclose(both, stream, atol=1e-4)

    # Of keys and values, heads are kv heads: each by itself, in the order of the values.
    v = drawn(spec, "v")
    each = [Intervention.patch("v", v[i], heads=i, layers=0) for i in range(spec.kv_heads)]
    np.testing.assert_array_equal(run(*each), run(Intervention.patch("v", v, layers=0)))
    turned = Intervention.patch("v", v[::-1], heads=range(spec.kv_heads)[::-1], layers=0)
    np.testing.assert_array_equal(run(turned), run(*each))


STEPS, LAYOUT = (1, 2, 3), dict(length=8, block=4)


@matrix("policy, family", EVERY, FAMILIES, today=[(policies.DualCache, "dream")])
def test_without_effect_nothing_changes_and_with_effect_a_sequence_is_as_alone(policy, family):
    """One program: values, layers, positions and steps are data."""
    model = tiny(family)
    prompt, mask = prompts(model, (9, 4), seed=1)
    sampler = suited(policy, SEVERAL_AT_ONCE)
    keys = jax.random.split(KEY, 2)
    options = dict(policy=policy, sampler=sampler, trace=True, **LAYOUT)
    run = lambda some: dj.generate(model, prompt, prompt_mask=mask, key=keys, interventions=some, **options)

    def everywhere(scale: float, moved: int = 0, sequence: slice = slice(None), left: int = 0):
        """Changes every place at two positions of each sequence."""
        at = np.array([[6, 11], [6 + moved, 13]])[sequence] - left
        where = dict(layers=1, positions=at, steps=STEPS)
        added = [
            Intervention.steer(place, 3 * drawn(model.spec, place, 2, 2)[sequence], scale, **where)
            for place in PLACES
            if place != "k"
        ]
        # Keys are rotated by their position on the canvas, which padding moves: only their length is changed.
        longer = dataclasses.replace(Intervention.mask("k", **where), gain=np.asarray(1 + scale, np.float32))
        return [*added, longer]

    usual = dj.generate(model, prompt, prompt_mask=mask, key=keys, **options)
    before = denoise._cache_size()
    nothing = run(everywhere(0.0))
    assert_same_run(nothing.trace, usual.trace, computed=True)
    np.testing.assert_array_equal(nothing.trace.score, usual.trace.score)
    with compilations() as compiled:
        steered = run(everywhere(1.0, moved=1))
    assert not compiled
    assert denoise._cache_size() == before + 1
    seen = lambda out: np.stack([out.trace.score[1:4], out.trace.proposed[1:4]])  # scores may be random
    assert not np.array_equal(seen(steered), seen(usual))
    own = everywhere(1.0, 1, slice(1, 2), left=5)
    alone = dj.generate(model, prompt[1:, 5:], key=keys[1:], interventions=own, **options)
    assert_same_run(of_sequence(steered.trace, 1, 12), alone.trace, computed=True)


def test_every_policy_of_the_library_passes_every_place():
    """At trace time: a policy that went round one would be refused."""
    model = tiny("llada")
    every = [Intervention.mask(place, layers=0, positions=0) for place in PLACES]
    for policy in (*EVERY, policies.ElasticCache(window=4, gamma=2.0)):
        sampler = suited(policy, samplers.Confidence())
        layout = dict(length=8, block=4, policy=policy, sampler=sampler, key=KEY)
        trace = lambda prompt, layout=layout: dj.generate(model, prompt, interventions=every, **layout).tokens
        jax.eval_shape(trace, jnp.zeros((1, 9), jnp.int32))


def test_layer_budgets_are_measured_under_interventions():
    """In the pass before the first step, as by a profile of the changed network."""
    model, changes = tiny("llada", layers=4), (Intervention.mask("attention_output", layers=1),)
    changes += (Intervention.steer("residual", drawn(model.spec, "residual"), 2.0, layers=(0, 2)),)
    prompt, _ = prompts(model, (9,))
    canvas = np.concatenate([prompt, np.full((1, 8), model.spec.mask_id)], axis=1)
    seen = dj.capture(model, canvas, ("residual", "attention_output"), interventions=changes)
    before, branch = (
        np.asarray(a[0, :, 0], np.float64) for a in (seen.residual[:, :4], seen.attention_output)
    )
    after, norm = before + branch, lambda x: np.linalg.norm(x, axis=-1)
    profile = np.mean(1 - np.sum(before * after, axis=-1) / norm(before) / norm(after), axis=1)
    known = dj.eviction.BoundaryMiddle(importance=tuple(np.maximum(profile, 0.0)), beta=0.1)
    for over in (policies.MaskKV, functools.partial(policies.EvictPrompt, policy=policies.DualCache())):
        run = lambda layers, over=over: (
            dj.generate(
                model,
                prompt,
                length=8,
                interventions=changes,
                policy=over(budget=3, layers=layers),
                trace=True,
            ).trace.score
        )
        online, offline = run(dj.eviction.OnlineLayers(dj.eviction.BoundaryMiddle(beta=0.1))), run(known)
        np.testing.assert_allclose(online, offline, rtol=1e-4)


@dataclasses.dataclass(frozen=True)
class WithoutInterventions(policies.DualCache):
    """A policy of a user's that was written before `before_first_step` got interventions."""

    def before_first_step(self, cache, canvas, model, x):
        return cache


@pytest.mark.parametrize("over", [policies.EvictPrompt, policies.SuffixDropout])
def test_a_first_step_without_interventions_gets_none(over):
    own, ours = over(policy=WithoutInterventions()), over(policy=policies.DualCache())
    found, expected = (dj.generate(tiny("llada"), [[5, 6]], length=4, policy=p).tokens for p in (own, ours))
    np.testing.assert_array_equal(found, expected)


STORING = policies.ElasticCache(window=4, gamma=2.0), policies.DLLMCache(1, 1)


@pytest.mark.parametrize("policy", daily(STORING, policies.DLLMCache), ids=short)
def test_values_recomputed_from_stores_are_changed_once(policy):
    """Where every layer recomputes everything, steering in every step is as under the exact decoder."""
    model = tiny("llada")
    prompt, _ = prompts(model, (6,))
    steer = Intervention.steer("residual", drawn(model.spec, "residual"), layers=(0, 1, 2))
    options = dict(length=4, trace=True, interventions=(steer,))
    ours, exact = (dj.generate(model, prompt, policy=p, **options) for p in (policy, policies.Policy()))
    np.testing.assert_allclose(ours.trace.score[0], exact.trace.score[0], rtol=1e-4)
    if type(policy) is policies.DLLMCache:
        assert_same_run(ours.trace, exact.trace)


def test_streams_buckets_infilling_and_vmap():
    model = tiny("dream")
    prompt, mask = prompts(model, (6, 4))
    value, guided = drawn(model.spec, "v", 2, 1), samplers.Confidence(cfg_scale=0.5)
    patch, own = (Intervention.patch("v", v, positions=at) for v, at in ((value, [[4], [5]]), (value[1:], 3)))
    options = dict(length=4, sampler=guided, trace=True)
    batch = dict(prompt_mask=mask, interventions=(patch,)) | options
    run = lambda **more: dj.generate(model, prompt, **batch, **more)
    plain = run()
    assert_same_run(run(buckets=dj.buckets.Ladder((8,))).trace, plain.trace)
    sequence = dj.generate(model, prompt[1:, 2:], interventions=(own,), **options)
    assert_same_run(of_sequence(plain.trace, 1, 8), sequence.trace)
    template = np.where(np.arange(6) % 3 == 1, model.spec.mask_id, prompt[:1])
    other = drawn(model.spec, "residual")

    def one(layer):
        patch = Intervention.patch("residual", other, layers=layer, positions=0)
        return dj.infill(model, template, steps=2, trace=True, interventions=(patch,)).trace.score

    swept = jax.vmap(one)(jnp.arange(3))
    for layer in range(3):
        np.testing.assert_allclose(swept[layer][:2], one(layer), rtol=1e-4)


def test_gradients_reach_values():
    model = tiny("llada")
    tokens = jnp.asarray(random_tokens(model.spec, 1, 5))
    steer = lambda d: (Intervention.steer("residual", d, layers=1),)
    loss = lambda d: dj.forward(model, tokens, interventions=steer(d))[0, 0, 0]
    gradient, step = jax.grad(loss)(jnp.zeros(model.spec.width)), 1e-2
    numeric = (loss(step * gradient) - loss(-step * gradient)) / (2 * step)
    np.testing.assert_allclose(numeric, jnp.sum(gradient**2), rtol=2e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i: i.mask("heads"), "place='heads' must be one of 'residual', 'attention_output', "),
        (lambda i: i.mask("v", layers=2), r"layers=2 is out of range: v has the layers 0 to 1"),
        (lambda i: i.mask("residual", layers=3), r"layers=3 is out of range: residual has the layers 0 to 2"),
        (lambda i: i.mask("k", layers=-1), "layers=-1 must be whole numbers of at least 0"),
        (lambda i: i.mask("k", layers=(1, 1)), r"layers=\[1, 1\] hold a number twice"),
        (
            lambda i: i.mask("v", positions=10),
            r"positions=10 is out of range: the canvas has the positions 0 to 9",
        ),
        (lambda i: i.mask("v", positions=[[1]] * 3), r"have shape \(3, 1\); expected \(j,\) or \(2, j\)"),
        (lambda i: i.mask("v", positions=1.5), "positions=1.5 must be whole numbers"),
        (
            lambda i: i.mask("v", steps=8),
            r"steps=8 is out of range: this generation has at most the steps 0 to 7\.",
        ),
        (lambda i: i.mask("v", heads=4), r"heads=4 is out of range: v has the heads 0 to 3"),
        (lambda i: i.mask("head_output", heads=(0, 0)), r"heads=\[0, 0\] hold a number twice"),
        (lambda i: i.mask("k", heads="x"), "heads='x' must be whole numbers of at least 0"),
        (lambda i: i.mask("attention_output", heads=0), 'attention_output has no heads.*"head_output"'),
        (lambda i: i.mask("residual", heads=0), "residual has no heads"),
        (lambda i: i.patch("v", np.ones((3, 8)), heads=(1, 2)), r"1, 3, 8\); expected \(2, 2, 10, 2, 8\)"),
        (lambda i: i.patch("v", np.ones(4)), r"has shape \(1, 1, 1, 1, 4\); expected \(2, 2, 10, 4, 8\)"),
        (lambda i: i.patch("residual", np.ones((3, 32)), positions=(1, 2)), r"has shape \(1, 1, 3, 32\)"),
        (lambda i: i.patch("residual", np.ones((1,) * 5)), "expected at most 4 axes at residual"),
        (lambda i: i.patch("residual", "x"), "value='x' must be numbers"),
        (lambda i: i.steer("residual", np.ones(32), float("nan")), "scale=nan must be a finite number"),
        (lambda i: "residual", "interventions='residual' must be an Intervention, such as"),
    ],
)
@pytest.mark.usefixtures("unannotated")
def test_bad_places_are_refused_by_name(make, message):
    model = tiny("llada")
    with pytest.raises(ValueError, match=message):
        dj.generate(model, np.ones((2, 6), int), length=4, interventions=make(Intervention))
    with pytest.raises(ValueError, match="a single pass has no denoising steps"):
        dj.forward(model, np.ones((1, 3), int), interventions=[Intervention.mask("v", steps=0)])


class AddsByHand(policies.Policy):
    """Builds the stream without `finish`, so that nothing can be changed there."""

    def layer(self, layer, x, cache, rows, canvas):
        q, k = layer.qk(x, rows.index)
        x = x + layer.out(layer.attention(q, k, layer.value(x))[0])
        return x + layer.mlp(x), cache


class OtherPositions(policies.Policy):
    """Runs the layer over fewer positions than its rows, and does not say so."""

    def layer(self, layer, x, cache, rows, canvas):
        layer.value(x[:, :2])
        return super().layer(layer, x, cache, rows, canvas)


def test_a_policy_that_goes_round_a_place_is_refused():
    model, prompt = tiny("llada"), np.ones((1, 3), int)
    run = lambda policy, place: dj.generate(
        model, prompt, length=2, policy=policy, interventions=[Intervention.mask(place)]
    )
    run(AddsByHand(), "attention_output")
    with pytest.raises(ValueError, match=r"AddsByHand.layer never calls layer.residual: an interv"):
        run(AddsByHand(), "residual")
    with pytest.raises(ValueError, match=r"told of positions \(1, 5\) and computes \(1, 2\) at v"):
        run(OtherPositions(), "v")


VECTOR, SCALES = jnp.ones(32), {"residual": 1.0}


class ReadsItsModule(policies.Policy):
    def layer(self, layer, x, cache, rows, canvas):
        return super().layer(layer, x + VECTOR, cache, rows, canvas)


class ReadsADictionary(policies.Policy):
    def layer(self, layer, x, cache, rows, canvas):
        return super().layer(layer, jax.tree.map(lambda x: x * SCALES["residual"], x), cache, rows, canvas)


def test_arrays_outside_of_a_policy_are_refused():
    """They would go stale: a program is found again by the policy's class and fields."""
    model, prompt, vector = tiny("llada"), np.ones((1, 3), int), np.ones(32, np.float32)

    class Closure(policies.Policy):
        def layer(self, layer, x, cache, rows, canvas):
            return super().layer(layer, x + vector, cache, rows, canvas)

    class Attribute(policies.Policy):
        def select(self, cache, canvas):
            return canvas.tokens == canvas.tokens  # `tokens` is no variable, whoever defines it

    message = r"policy: .*Closure.layer reads vector, an array float32\[32\] outside of the class"
    with pytest.raises(ValueError, match=message):
        dj.generate(model, prompt, length=2, policy=Closure())
    with pytest.raises(ValueError, match=r"ReadsItsModule.layer reads VECTOR, an array float32\[32\]"):
        dj.generate(model, prompt, length=2, policy=ReadsItsModule())
    dj.generate(model, prompt, length=2, policy=Attribute())


def test_numbers_outside_of_a_policy_are_part_of_the_program():
    """Also what a dictionary of the module holds, which may change; an array in it is refused."""
    model, prompt = tiny("llada"), np.ones((1, 3), int)
    run = lambda: dj.generate(model, prompt, length=2, policy=ReadsADictionary(), trace=True).trace.score
    one = run()
    SCALES["residual"] = 2.0
    assert not np.array_equal(one, run())
    SCALES["residual"] = np.ones(3)
    with pytest.raises(ValueError, match=r"ReadsADictionary.layer reads SCALES, an array float64\[3\]"):
        run()
    SCALES["residual"] = 1.0


def test_a_sampler_with_a_shadow_block_is_refused():
    """Its shadow runs beside the layers' places."""
    steering = (dj.Intervention.steer("residual", jnp.ones(32)),)
    with pytest.raises(
        ValueError, match="interventions= is not supported by WINO: it verifies tokens by a shadow block"
    ):
        dj.generate(tiny("llada"), [[1]], length=2, sampler=samplers.WINO(), interventions=steering)
