"""What is trained, by which transformation, at which rate, and in which precision."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dllm_jax.nn.model import Model
from dllm_jax.nn.sharding import OUTPUTS
from dllm_jax.training import Batch, Batches, TrainConfig, begin, model_of, prepare, train, train_step
from dllm_jax.training.config import MATRICES as OF_MUON
from dllm_jax.training.config import optimizer_of, rate_schedule
from tests import refuses
from tests.models import EXHAUSTIVE, cast, separate, tiny

pytestmark = pytest.mark.usefixtures("unannotated")  # callers' types are not checked

CONFIG = TrainConfig(steps=3)
SGD = optax.sgd(0.1)


def batch_of(step: int = 0, examples: int = 4) -> Batch:
    ids = np.random.default_rng(step).integers(0, 30, (examples, 8)).astype(np.int32)
    return Batch(ids[:, :3], ids[:, 3:])


def steps(model: Model, setup, number: int = 1):
    state = begin(model, setup)
    for step in range(number):
        state, _ = train_step(state, batch_of(step), setup)
    return state


def changed(before: Model, after: Model) -> dict[str, bool]:
    paths = jax.tree_util.tree_leaves_with_path(before.params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): bool((old != new).any())
        for (path, old), new in zip(paths, jax.tree.leaves(after.params), strict=True)
    }


def named(*names: str):
    """A function that gives a mask: True at parameters of these names."""
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, params)


def test_float32_masters_take_steps_that_bfloat16_would_lose():
    model = cast(tiny("llada"), jnp.bfloat16)
    moved = {}
    for masters in (True, False):
        config = TrainConfig(steps=30, learning_rate=1e-4, warmup=0, master_weights=masters)
        setup = prepare(model, config)
        first = begin(model, setup).params
        state = steps(model, setup, 30)
        floats = [leaf for leaf in jax.tree.leaves((state.params, state.moments)) if leaf.ndim]
        assert {leaf.dtype for leaf in floats} == {jnp.dtype(jnp.float32 if masters else jnp.bfloat16)}
        fractions = jax.tree.map(lambda a, b: np.mean(np.asarray(a) != np.asarray(b)), first, state.params)
        moved[masters] = jax.tree.leaves(fractions)
        if masters:
            trained = model_of(model, state, setup)
            assert trained.dtype == jnp.bfloat16
            rounded = jax.tree.map(lambda p: np.asarray(p).astype(jnp.bfloat16), state.params)
            chex.assert_trees_all_equal(jax.tree.map(np.asarray, trained.params), rounded)
            # Of matrices: norms are near 1, where bfloat16 is coarse.
            pairs = zip(*(jax.tree.leaves(m.params["layers"]) for m in (trained, model)), strict=True)
            assert all((np.asarray(leaf) != old).any() for leaf, old in pairs if leaf.ndim > 2)
    assert min(moved[True]) > 0.99
    assert min(moved[False]) < 0.25


@pytest.mark.parametrize(
    ("form", "muon"),
    [(separate, 0.01), pytest.param(lambda model: model, None, marks=pytest.mark.exhaustive)],
    ids=["separate, Muon", "stacked"],
)
def test_frozen_parameters_stay_and_have_no_state(form, muon):
    model = form(tiny("llada"))
    config = TrainConfig(steps=3, warmup=0, muon=muon)
    for trainable, names in (
        (named("q", "v"), {"q", "v"}),
        ({"embed": False, "layers": True, "norm": False, "head": False}, set(model_layer(model))),
    ):
        setup = prepare(model, config, trainable=trainable)
        state = steps(model, setup)
        for path, moved in changed(model, model_of(model, state, setup)).items():
            assert moved == (path.rpartition("/")[2] in names), path
        trained = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        kept = sum(leaf.size for leaf in jax.tree.leaves(state.moments))
        assert kept <= 2 * trained + 8
        assert jax.tree.leaves(state.frozen)[0] is jax.tree.leaves(setup.split(model.params)[1])[0]


def model_layer(model: Model):
    layers = model.params["layers"]
    return layers[0] if isinstance(layers, list) else layers


def test_names_choose_among_transformations():
    model = tiny("dream")
    labels = {"embed": "table", "layers": "rest", "norm": "still", "head": False}
    optimizer = {"table": optax.sgd(1.0), "rest": SGD, "still": None}
    setup = prepare(model, CONFIG, optimizer=optimizer, trainable=labels)
    after = model_of(model, steps(model, setup), setup)
    moved = changed(model, after)
    assert moved["embed"]
    assert moved["layers/q"]
    assert not moved["norm"]
    assert not moved["head"]
    slow = prepare(model, CONFIG, optimizer=optimizer | {"table": SGD}, trainable=labels)
    step = lambda setup: model_of(model, steps(model, setup), setup).params["embed"] - model.params["embed"]
    np.testing.assert_allclose(step(setup), 10 * step(slow), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("make", [optax.adafactor, optax.lbfgs] if EXHAUSTIVE else [optax.adafactor])
def test_any_transformation_of_optax_trains(make):
    run = train(
        tiny("llada"), Batches(batch_of), TrainConfig(steps=2, review_every=1, save_every=1),
        optimizer=make(1e-3), progress=False,
    )  # fmt: skip
    assert all(changed(tiny("llada"), run.model).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainable": {"embed": True}}, "trainable= must be a tree that the parameters extend"),
        ({"trainable": False}, "leaves nothing to train"),
        ({"trainable": 1}, "trainable=1 must be True, False or a name"),
        ({"trainable": "all"}, r"names \['True'\], trainable has \['all'\]: both must have the same"),
        ({"trainable": "a", "optimizer": {"b": SGD}}, r"names \['b'\], trainable has \['a'\]"),
        ({"optimizer": {"a": SGD}}, r"names \['a'\], trainable has \['True'\]"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other_are_refused(options, message):
    refuses(message, prepare, tiny("llada"), CONFIG, **{"optimizer": None} | options)


def test_a_tied_head_has_the_label_of_its_embedding():
    model = tiny("llada", tied=True)
    labels = {"embed": False, "layers": True, "norm": True, "head": False}
    setup = prepare(model, CONFIG, optimizer=SGD, trainable=labels)
    moved = changed(model, model_of(model, steps(model, setup), setup))
    assert [name for name, moves in moved.items() if not moves] == ["embed"]
    named = "trainable={'embed': True, 'head': False} is not supported by tied parameters"
    refuses(named, prepare, model, CONFIG, trainable=labels | {"embed": True})


def test_options_of_the_optimizer_that_is_replaced_are_refused():
    with pytest.raises(ValueError, match=r"learning_rate=0\.1 has no effect with optimizer="):
        prepare(tiny("llada"), TrainConfig(steps=1, learning_rate=0.1), optimizer=SGD)
    for wrong in ("adam", optax.MultiSteps(SGD, 2), 1e-3):
        with pytest.raises(TypeError, match="must be a transformation of optax"):
            prepare(tiny("llada"), TrainConfig(steps=1), optimizer=wrong)


def test_micro_batches_make_the_step_of_the_whole_batch():
    model = separate(tiny("llada"))
    ids = np.random.default_rng(0).integers(0, 30, (6, 9)).astype(np.int32)
    # Answers of different length: the loss is a mean over examples of means over their tokens.
    lengths = np.array([5, 1, 4, 2, 3, 5])[:, None]
    batch = Batch(ids[:, :4], ids[:, 4:], None, np.arange(5) < lengths, t_min=0.2)
    results = []
    for parts in (1, 3):
        setup = prepare(model, TrainConfig(steps=9, warmup=0, accumulate=parts, clip=1e6))
        state, metrics = train_step(begin(model, setup), batch, setup)
        results.append((metrics, state.moments[1][0].mu))
    (whole, moments), (of_parts, summed) = results
    np.testing.assert_allclose(of_parts.loss, whole.loss, rtol=1e-6)
    np.testing.assert_allclose(of_parts.accuracy, whole.accuracy, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), summed, moments)
    with pytest.raises(ValueError, match="a batch of 6 examples must be a multiple of 4: accumulate=4"):
        train_step(begin(model, setup), batch, prepare(model, TrainConfig(steps=9, accumulate=4)))


def test_the_rate_rises_stays_and_falls():
    config = TrainConfig(steps=100, learning_rate=2.0, muon=0.5, warmup=10, decay=50)
    for peak, rate in ((2.0, rate_schedule(config)), (0.5, rate_schedule(config, config.muon))):
        np.testing.assert_allclose(
            [rate(i) for i in (0, 5, 10, 50, 75, 100)], peak * np.array([0, 0.5, 1, 1, 0.5, 0])
        )


MATRICES = {
    "llada": {"q": (2, 32, -1), "o": (2, -1, 32), "gate": (2, 32, 48), "down": (2, 48, 32)},
    "llada-moe": {"expert_gate": (12, 32, 24), "expert_down": (12, 24, 32)},
}


@pytest.mark.parametrize("family", MATRICES)
def test_muon_makes_the_layers_updates_orthogonal_and_leaves_the_rest_to_adamw(family):
    params = tiny(family).params
    config = TrainConfig(steps=10, learning_rate=1e-3, muon=0.1, warmup=0, weight_decay=0.0)
    gradient = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
    step = optimizer_of(config)
    updates, _ = jax.jit(step.update)(gradient, jax.jit(step.init)(params), params)
    for name, shape in MATRICES[family].items():
        u = updates["layers"][name].reshape(shape)
        scale = max(1, u.shape[2] / u.shape[1]) ** 0.5
        singular = jnp.linalg.svd(u, compute_uv=False) / (0.1 * scale)
        assert 0.5 < float(jnp.quantile(singular, 0.2)) < float(singular.max()) < 1.5, name
    adamw = optax.adamw(1e-3, b2=config.beta2, weight_decay=0.0, nesterov=True)
    clipped = jax.tree.map(lambda g: g / optax.tree.norm(gradient), gradient)
    expected, _ = jax.jit(adamw.update)(clipped, jax.jit(adamw.init)(params), params)
    for name in ("embed", "norm"):
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-5)


def test_muon_takes_every_matrix_of_the_layers():
    outside = {"head", "soft_gate", "soft_up", "soft_down"}
    assert OUTPUTS.keys() - outside <= OF_MUON.keys()


@pytest.mark.parametrize("muon", [None, 0.1])
def test_matrices_and_tables_decay_but_norms_and_biases_do_not(muon):
    params = tiny("dream").params
    gradient = jax.tree.map(jnp.ones_like, params)
    updates = []
    for weight_decay in (0.0, 0.5):
        config = TrainConfig(steps=10, learning_rate=1e-3, muon=muon, warmup=0, weight_decay=weight_decay)
        step = optimizer_of(config)
        updates.append(jax.jit(step.update)(gradient, jax.jit(step.init)(params), params)[0])
    decay = jax.tree.map(jnp.subtract, *updates)
    of_a_matrix = 1e-3 if muon is None else muon
    for name, rate in (("embed", 1e-3), ("norm", 0.0)):
        np.testing.assert_allclose(decay[name], 0.5 * rate * params[name], atol=1e-7, err_msg=name)
    for name, rate in (("gate", of_a_matrix), ("attn_norm", 0.0), ("q_bias", 0.0)):
        layers = params["layers"][name]
        np.testing.assert_allclose(decay["layers"][name], 0.5 * rate * layers, atol=1e-6, err_msg=name)
