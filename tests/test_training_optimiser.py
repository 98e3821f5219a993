import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dllm_jax.training import TrainConfig
from dllm_jax.training.config import optimiser, schedule
from tests.models import FAMILIES, tiny


def test_the_rate_rises_stays_and_falls():
    config = TrainConfig(steps=100, learning_rate=2.0, muon=0.5, warmup=10, decay=50)
    for peak, rate in ((2.0, schedule(config)), (0.5, schedule(config, config.muon))):
        np.testing.assert_allclose(
            [rate(i) for i in (0, 5, 10, 50, 75, 100)], peak * np.array([0, 0.5, 1, 1, 0.5, 0])
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_muon_makes_the_layers_updates_orthogonal_and_leaves_the_rest_to_adamw(family):
    params = tiny(family).params
    config = TrainConfig(steps=10, learning_rate=1e-3, muon=0.1, warmup=0, weight_decay=0.0)
    gradient = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
    step = optimiser(config)
    updates, _ = jax.jit(step.update)(gradient, jax.jit(step.init)(params), params)
    shapes = {"q": (2, 32, -1), "o": (2, -1, 32), "gate": (2, 32, 48), "down": (2, 48, 32)}
    for name, shape in shapes.items():
        u = updates["layers"][name].reshape(shape)
        scale = max(1, u.shape[2] / u.shape[1]) ** 0.5
        singular = jnp.linalg.svd(u, compute_uv=False) / (0.1 * scale)
        assert 0.5 < float(jnp.quantile(singular, 0.2)) < float(singular.max()) < 1.5, name
    adamw = optax.adamw(1e-3, b2=config.beta2, weight_decay=0.0, nesterov=True)
    clipped = jax.tree.map(lambda g: g / optax.tree.norm(gradient), gradient)
    expected, _ = jax.jit(adamw.update)(clipped, jax.jit(adamw.init)(params), params)
    for name in ("embed", "norm"):
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-5)


@pytest.mark.parametrize("muon", [None, 0.1])
def test_matrices_and_tables_decay_but_norms_and_biases_do_not(muon):
    params = tiny("dream").params
    gradient = jax.tree.map(jnp.ones_like, params)
    updates = []
    for weight_decay in (0.0, 0.5):
        config = TrainConfig(steps=10, learning_rate=1e-3, muon=muon, warmup=0, weight_decay=weight_decay)
        step = optimiser(config)
        updates.append(jax.jit(step.update)(gradient, jax.jit(step.init)(params), params)[0])
    decay = jax.tree.map(jnp.subtract, *updates)
    of_a_matrix = 1e-3 if muon is None else muon
    for name, rate in (("embed", 1e-3), ("norm", 0.0)):
        np.testing.assert_allclose(decay[name], 0.5 * rate * params[name], atol=1e-7, err_msg=name)
    for name, rate in (("gate", of_a_matrix), ("attn_norm", 0.0), ("q_bias", 0.0)):
        layers = params["layers"][name]
        np.testing.assert_allclose(decay["layers"][name], 0.5 * rate * layers, atol=1e-6, err_msg=name)
