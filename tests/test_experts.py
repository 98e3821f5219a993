"""Mixtures of experts: router and ragged products against plain loops; meshes, int8, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import lora
from dllm_jax.nn.mlp import mixture, route
from dllm_jax.nn.parameters import form_of_layers, stacked
from dllm_jax.nn.spec import ExpertSpec
from dllm_jax.testing.runs import finite
from pallas_kernels.experts.xla import by_all_experts, by_expert, by_tiles
from tests.models import generated, in_int8, prompts, random_tokens, separate, tiny
from tests.test_mesh import assert_same, mesh_of, on_mesh

EVERYTHING = ExpertSpec(
    count=12, per_token=3, mlp_width=5, shared=7, sigmoid=True, renormalized=True, scale=2.5, bias=True,
    groups=4, groups_per_token=2,
)  # fmt: skip
SPECS = {
    "softmax": ExpertSpec(count=6, per_token=2, mlp_width=5),
    "renormalized": ExpertSpec(count=6, per_token=6, mlp_width=5, renormalized=True),
    "everything": EVERYTHING,
}
WIDTH = 8


def weights(spec: ExpertSpec) -> dict[str, jax.Array]:
    rng, m, e, i, j = np.random.default_rng(3), WIDTH, spec.count, spec.mlp_width, spec.shared
    shapes = {"router": (m, e), "expert_gate": (e, m, i), "expert_up": (e, m, i), "expert_down": (e, i, m)}
    shapes |= {"router_bias": (e,)} if spec.bias else {}
    shapes |= {"shared_gate": (m, j), "shared_up": (m, j), "shared_down": (j, m)} if j else {}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def silu(x):
    return x / (1 + np.exp(-x))


def routed_by_hand(spec: ExpertSpec, w: dict[str, np.ndarray], x: np.ndarray) -> dict[int, float]:
    """The experts of one token and their weights, choice by choice, in float64."""
    logits = x @ w["router"]
    score = 1 / (1 + np.exp(-logits)) if spec.sigmoid else np.exp(logits) / np.exp(logits).sum()
    choice = score + (w["router_bias"] if spec.bias else 0)
    size = spec.count // spec.groups
    pairs = [np.sort(choice[g * size : (g + 1) * size])[-2:].sum() for g in range(spec.groups)]
    groups = np.argsort(pairs)[-spec.groups_per_token :] if spec.groups > 1 else range(spec.groups)
    allowed = [e for g in groups for e in range(g * size, (g + 1) * size)]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: spec.per_token]
    total = sum(score[e] for e in chosen) if spec.renormalized else 1
    return {e: spec.scale * score[e] / total for e in chosen}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_mixture_is_what_a_loop_over_tokens_and_experts_makes(spec):
    x = np.random.default_rng(4).standard_normal((2, 9, WIDTH)).astype(np.float32)
    w = weights(spec)
    wide = {name: np.asarray(a, np.float64) for name, a in w.items()}
    mlp = lambda x, gate, up, down: (silu(x @ gate) * (x @ up)) @ down
    routed = jax.jit(functools.partial(route, spec=spec))
    chosen, weight = map(np.asarray, routed(w, x.reshape(-1, WIDTH)))
    ours = np.asarray(jax.jit(functools.partial(mixture, spec=spec))(w, x)).reshape(-1, WIDTH)
    for token, of_token in enumerate(x.reshape(-1, WIDTH).astype(np.float64)):
        wanted = routed_by_hand(spec, wide, of_token)
        assert set(chosen[token]) == set(wanted)
        np.testing.assert_allclose(weight[token], [wanted[e] for e in chosen[token]], rtol=1e-5)
        out = sum(
            share * mlp(of_token, *(wide[f"expert_{name}"][e] for name in ("gate", "up", "down")))
            for e, share in wanted.items()
        )
        if spec.shared:
            out = out + mlp(of_token, *(wide[f"shared_{name}"] for name in ("gate", "up", "down")))
        np.testing.assert_allclose(ours[token], out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tokens", "rows"), [(13, 39), pytest.param(91, 512, marks=pytest.mark.exhaustive)])
def test_gradients_of_ragged_products_are_those_of_all_experts(tokens, rows):
    """TPUs' form beside the others', where each token is sent to an expert that is not here.

    A TPU's tile divides the rows: of 3 x 91 it would be one row, a multiple of 256 has whole tiles.
    """
    w, rng = weights(EVERYTHING), np.random.default_rng(6)
    own = [w[f"expert_{name}"] for name in ("gate", "up", "down")]
    x = rng.standard_normal((tokens, WIDTH), np.float32)
    chosen, weight = map(np.array, jax.jit(route, static_argnums=2)(w, x, EVERYTHING))
    chosen[:, 1] = EVERYTHING.count
    chosen, weight = jax.device_put((chosen, weight))
    in_parts = functools.partial(by_all_experts, wide_bytes=4000)
    squares = [
        lambda own, x, form=form: jnp.sum(form(x, chosen, weight, *own) ** 2)
        for form in (by_expert, by_tiles, by_all_experts, in_parts)
    ]
    ragged, *others = (jax.jit(jax.grad(of, argnums=(0, 1)))(own, x) for of in squares)
    for plain in others:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), ragged, plain)
    forward = [jax.jvp(jax.jit(of), (own, x), (own, x))[1] for of in squares[1:3]]
    np.testing.assert_allclose(*forward, err_msg="forward mode of tiles", rtol=1e-6)
    traced = jax.make_jaxpr(by_expert)(x, chosen, weight, *own)
    products = [e for e in traced.jaxpr.eqns if e.primitive.name == "custom_jvp_call"]
    assert [e.invars[0].aval.shape[0] for e in products] == [rows] * 3


def test_mapped_tokens_give_what_each_gives_by_itself():
    """By the library's forms, one of which JAX traces on any platform and maps over no shared matrix."""
    w, rng = weights(EVERYTHING), np.random.default_rng(8)
    x = rng.standard_normal((3, 1, 7, WIDTH), np.float32)
    run = functools.partial(mixture, w, spec=EVERYTHING)
    want = np.stack([run(each) for each in x])
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(x), want, rtol=1e-4, atol=1e-5)
    matrices = [w[f"expert_{name}"] for name in ("gate", "up", "down")]
    by_form = {}
    for form in (by_expert, by_all_experts):
        of_tokens = lambda x, form=form: form(x, *route(w, x, EVERYTHING), *matrices)
        by_form[form] = jax.jit(jax.vmap(of_tokens))(x[:, 0])
    np.testing.assert_allclose(by_form[by_expert], by_form[by_all_experts], rtol=1e-4, atol=1e-5)


def test_groups_and_bias_change_what_is_chosen():
    """Guards the comparison above: where they decide nothing, it would prove nothing about them."""
    x, w = (
        jnp.asarray(np.random.default_rng(4).standard_normal((64, WIDTH)), jnp.float32),
        weights(EVERYTHING),
    )
    chosen = lambda **changes: np.sort(route(w, x, dataclasses.replace(EVERYTHING, **changes))[0], axis=1)
    for changes in (dict(groups=1, groups_per_token=1), dict(bias=False)):
        assert (chosen(**changes) != chosen()).any(axis=1).sum() > 10


def test_a_router_decides_in_float32_whatever_the_models_dtype():
    x = jnp.asarray(np.random.default_rng(5).standard_normal((512, WIDTH)), jnp.bfloat16)
    w = {name: jnp.asarray(a, jnp.bfloat16) for name, a in weights(SPECS["softmax"]).items()}
    wide = {name: a.astype(jnp.float32) for name, a in w.items()}
    for ours, wanted in zip(
        jax.jit(route, static_argnums=2)(w, x, SPECS["softmax"]),
        jax.jit(route, static_argnums=2)(wide, x.astype(jnp.float32), SPECS["softmax"]),
        strict=True,
    ):
        assert ours.dtype == wanted.dtype
        np.testing.assert_allclose(ours, wanted, rtol=1e-6)
    assert jax.eval_shape(functools.partial(mixture, spec=SPECS["softmax"]), w, x[None]).dtype == jnp.bfloat16


def test_stacked_and_separate_layers_and_gradients():
    model = tiny("llada-moe")
    tokens = jnp.asarray(random_tokens(model.spec, 2, 7))
    logits = dj.forward(model, tokens)
    np.testing.assert_allclose(dj.forward(separate(model), tokens), logits, atol=1e-5)
    gradient = jax.grad(lambda model: jnp.sum(dj.forward(model, tokens) ** 2))(model)
    for name in ("router", "expert_gate", "expert_down", "q_norm"):
        assert (jnp.abs(gradient.params["layers"][name]).max(axis=-1) > 0).any(), name


@pytest.mark.parametrize(("mesh", "kernels"), [("ep=2 tp=2 dp=2", "pallas"), ("dp=2 ep=3", None)])
def test_experts_over_a_mesh(mesh, kernels):
    """What does not divide is on all devices: three sequences over dp, four kv heads over tp."""
    model = separate(tiny("llada-moe", vocab=64))
    prompt, mask = prompts(model, (9, 6, 8))
    options = dict(prompt_mask=mask, length=8, block=4, policy=dj.policies.DualCache(), trace=True)
    split = dataclasses.replace(on_mesh(model, mesh_of(mesh)), implementation=kernels)
    axes = split.params["layers"][0]["expert_gate"].sharding.spec
    assert axes[0] == "ep"
    assert (axes[2] == "tp") == ("tp" in mesh)
    assert_same(dj.generate(split, prompt, **options), dj.generate(model, prompt, **options))
    tokens = jnp.asarray(random_tokens(model.spec, 2, 7))
    np.testing.assert_allclose(dj.forward(split, tokens), dj.forward(model, tokens), atol=1e-4)


def test_int8_experts_decode_near_the_original():
    model = tiny("llada-moe")
    floats, held = (generated(m, length=4) for m in (model, in_int8(model)))
    first = [finite(out.trace.score)[0] for out in (floats, held)]
    assert 1e-5 < np.abs(first[0] - first[1]).max() < 0.2
    assert in_int8(model).params["layers"]["expert_down"].scale.shape == (2, 6, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(groups=5), "count=12 experts must be a multiple of groups=5"),
        (dict(groups=12), "groups=12 of count=12 experts must hold at least 2 each"),
        (dict(groups_per_token=5), "groups_per_token=5 must be at most groups=4"),
        (dict(per_token=7), "per_token=7 must be at most 6, the experts of its groups"),
    ],
)
def test_experts_that_no_router_can_choose_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(EVERYTHING, **changes)


@pytest.mark.parametrize("dense", [(0, 1), (2,), (1, 0), (0, 0)])
def test_dense_layers_that_are_not_some_of_the_layers_are_refused(dense):
    model = tiny("llada-moe")
    with pytest.raises(ValueError, match="must be some of the layers 0 to 1 in ascending order, not all"):
        model.replace_spec(experts=dataclasses.replace(model.spec.experts, dense=dense))


@pytest.mark.usefixtures("layers_of_the_platform")
def test_functions_without_experts_say_so():
    model = tiny("llada-moe")
    with pytest.raises(ValueError, match="matrices=gate, down: layers of the model have experts"):
        lora.attach(model, lora.LoRA(matrices=("q", "gate", "down")), jax.random.key(0))
    mixed = tiny("llada-moe", experts=dataclasses.replace(model.spec.experts, dense=(0,)))
    assert mixed.layers_are_separate
    forms = [form_of_layers(of, None, "tpu") for of in (mixed.spec, model.spec, tiny("llada").spec)]
    assert forms == [True, True, False], "a TPU's ragged product would copy experts out of a stack"
    with pytest.raises(ValueError, match="do not stack"):
        stacked(mixed.params)
    with pytest.raises(ValueError, match="separate_layers=False must be None or True for llada-moe"):
        dj.abstract(mixed.spec, separate_layers=False)


def test_adapters_of_attention_train_beside_experts():
    model = lora.attach(tiny("llada-moe"), lora.LoRA(rank=2), jax.random.key(0))
    tokens = jnp.asarray(random_tokens(model.spec, 1, 7))
    np.testing.assert_array_equal(dj.forward(model, tokens), dj.forward(lora.detach(model), tokens))
