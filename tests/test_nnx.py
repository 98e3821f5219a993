"""Models as flax.nnx modules: optimizers of nnx and tunix step as a loop over `masked_diffusion_loss`."""

import dataclasses
import functools
import importlib.util
import sys
import types
from pathlib import Path

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import dllm_jax as dj
from dllm_jax import lora
from dllm_jax.nnx import tunix
from dllm_jax.nnx.view import ModelView
from dllm_jax.testing.models import tiny
from dllm_jax.training import Batch, masked_diffusion_loss
from tests import refuses

GOLDEN = Path(__file__).parent / "goldens" / "models"
BATCH = Batch([[10, 11, 12], [13]], [[14, 15, 16, 17, -100], [18, 19]])
KEYS = jax.random.split(jax.random.key(1), 5)
FAMILIES = {
    "llada": {},
    "dream": dict(tied=True),
    "sdar": dict(block_size=4, completes_blocks=False),
    "diffusion-gemma": {},
}


@functools.cache
def by_optax(family: str) -> tuple[dj.Model, list[float]]:
    """Five steps of a loop without any module: the model, and the losses."""
    model, losses, optimizer = tiny(family, **FAMILIES[family]), [], optax.sgd(1e-2)
    state, loss_of = optimizer.init(model.params), masked_diffusion_loss

    @jax.jit
    def step(params, state, key):
        of = lambda params: loss_of(dataclasses.replace(model, params=params), BATCH, key)[0]
        loss, gradient = jax.value_and_grad(of)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = model.params
    for key in KEYS:
        params, state, loss = step(params, state, key)
        losses.append(float(loss))
    return dataclasses.replace(model, params=params), losses


@nnx.jit
def nnx_step(view: ModelView, optimizer: nnx.Optimizer, key) -> jax.Array:
    kind = nnx.DiffState(0, optimizer.wrt)
    loss = lambda view: masked_diffusion_loss(view.model(), BATCH, key)[0]
    value, gradient = nnx.value_and_grad(loss, argnums=kind)(view)
    optimizer.update(view, gradient)
    return value


@pytest.mark.parametrize("family", FAMILIES)
def test_nnx_optimizer_steps_as_optax(family):
    view = ModelView(model := tiny(family, **FAMILIES[family]))
    optimizer = nnx.Optimizer(view, optax.sgd(1e-2), wrt=nnx.Param)
    losses = [float(nnx_step(view, optimizer, key)) for key in KEYS]
    trained, wanted = by_optax(family)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    chex.assert_trees_all_close(view.model().params, trained.params, atol=1e-6)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), view.model().params, model.params)
    assert any(jax.tree.leaves(moved))


def test_states_split_merge_filter_and_come_back_from_orbax(tmp_path):
    model = tiny("sdar", block_size=4)
    model, tokens = (
        dataclasses.replace(model, params=dj.nn.parameters.separate(model.params)),
        jnp.ones((1, 6), int),
    )
    graph, state = nnx.split(ModelView(model))
    np.testing.assert_array_equal(
        dj.forward(nnx.merge(graph, state).model(), tokens), dj.forward(model, tokens)
    )
    found = nnx.to_flat_state(nnx.state(ModelView(model), nnx.All(nnx.Param, nnx.PathContains("q"))))
    assert [path for path, _ in found] == [
        ("params", "layers", str(i), "q") for i in range(model.spec.layers)
    ]
    chex.assert_trees_all_equal(found[1][1].get_value(), model.params["layers"][1]["q"])

    # Restored into a view of other weights.
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        other = ModelView(jax.tree.map(jnp.zeros_like, model))
        restored = checkpointer.restore(tmp_path / "state", nnx.to_pure_dict(nnx.state(other)))
    target = nnx.state(other)
    nnx.replace_by_pure_dict(target, restored)
    nnx.update(other, target)
    chex.assert_trees_all_equal(other.model().params, model.params, strict=True)


def test_adapters_alone_move(tmp_path):
    model = lora.attach(tiny("llada"), lora.LoRA(rank=2), jax.random.key(0))
    view = ModelView(model)
    factors = nnx.to_flat_state(nnx.state(view, nnx.LoRAParam))
    assert {path[-1] for path, _ in factors} == {"a", "b"}
    optimizer = nnx.Optimizer(view, optax.sgd(1e-1), wrt=nnx.LoRAParam)
    for key in KEYS[:2]:
        nnx_step(view, optimizer, key)
    before, after = model.params["layers"]["q"], view.model().params["layers"]["q"]
    np.testing.assert_array_equal(before.base, after.base)
    assert (np.asarray(before.a) != after.a).any()
    np.testing.assert_array_equal(model.params["embed"], view.model().params["embed"])


def test_a_trained_view_is_saved_beside_its_origin(tmp_path):
    model = dj.load(GOLDEN / "illada-tiny")
    view = ModelView(model)
    view.params["norm"].set_value(view.params["norm"].get_value() * 2)
    trained = view.onto(model)
    assert (trained.origin, trained.is_rebuilt) == (model.origin, False)
    again = dj.load(dj.save_hf(trained, tmp_path / "hf"))
    np.testing.assert_array_equal(again.params["norm"], np.asarray(model.params["norm"]) * 2)
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    refuses("model is ModelSpec.*they must be alike", view.onto, tiny("llada"))
    changed = dataclasses.replace(
        model, params=lora.attach(model, lora.LoRA(rank=2), jax.random.key(0)).params
    )
    refuses("model has the form .*they must be alike", view.onto, changed)
    refuses("model=3 must be", ModelView, 3)
    refuses(
        r"weights='int8', which ModelView does not support: .*. Load the original without weights=\.$",
        ModelView,
        dj.load(GOLDEN / "illada-tiny", weights="int8"),
    )


def test_moments_are_split_as_the_model_is():
    """On a mesh, where the optimizer takes its sharding from the variables."""
    mesh = jax.make_mesh((2, 4), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = dj.load(GOLDEN / "illada-tiny", mesh=mesh)
    view = ModelView(model)
    optimizer = nnx.Optimizer(view, optax.adam(1e-2), wrt=nnx.Param)
    alone = ModelView(dj.load(GOLDEN / "illada-tiny"))
    single = nnx.Optimizer(alone, optax.adam(1e-2), wrt=nnx.Param)
    loss, wanted = nnx_step(view, optimizer, KEYS[0]), nnx_step(alone, single, KEYS[0])
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for kept in (view.params["layers"]["q"], optimizer.opt_state[0].mu["params"]["layers"]["q"]):
        assert kept.get_value().sharding.is_equivalent_to(model.params["layers"]["q"].sharding, 4)


# -- tunix ------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class TokenBatch:
    """Test double of tunix' `DiffusionTokenBatch`: the rules of its contract."""

    model_inputs: dict
    target_ids: jax.Array
    loss_weights: jax.Array

    @classmethod
    def create(cls, *, model_inputs, target_ids, loss_weights):
        return cls(model_inputs, target_ids, loss_weights).validate()

    def validate(self):
        assert jnp.issubdtype(self.target_ids.dtype, jnp.integer)
        assert self.target_ids.shape == self.loss_weights.shape
        leaves = jax.tree.leaves(self.model_inputs)
        assert leaves
        for leaf in leaves:
            assert leaf.shape[0] == self.target_ids.shape[0]
            assert leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.number)
        if not isinstance(self.loss_weights, jax.core.Tracer):
            assert np.isfinite(self.loss_weights).all()
            assert (np.asarray(self.loss_weights) >= 0).all()
        return self


@flax.struct.dataclass
class WeightedMetric:
    """Test double of tunix' metric: a sum and what it is divided by."""

    unreduced_sum: jax.Array
    denominator: jax.Array


@flax.struct.dataclass
class LossOutput:
    """Test double of what tunix' trainer takes of a loss."""

    primary_loss: WeightedMetric
    aux_metrics: dict


def scored(model, batch, logits_fn):
    """Test double of `compute_diffusion_logits`: validates both sides of the logits function."""
    batch.validate()
    logits = logits_fn(model, batch.model_inputs)
    if logits.shape[:2] != batch.target_ids.shape or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits of shape {logits.shape} do not align with the targets")
    if not isinstance(batch.target_ids, jax.core.Tracer):
        active = np.asarray(batch.target_ids)[np.asarray(batch.loss_weights) > 0]
        if (active >= logits.shape[-1]).any():
            raise ValueError("targets lie outside the vocabulary")
    return logits


@pytest.fixture(params=["double", "package"])
def contract(request, monkeypatch):
    """The contract of tunix/diffusion, as a double and as the package has it."""
    if request.param == "package":
        if importlib.util.find_spec("tunix") is None or importlib.util.find_spec("tunix.diffusion") is None:
            pytest.skip("google-tunix with tunix/diffusion is not installed")
        return
    members = {
        "tunix": {}, "tunix.diffusion": {}, "tunix.sft": {},
        "tunix.diffusion.types": {"DiffusionTokenBatch": TokenBatch},
        "tunix.diffusion.interfaces": {"compute_diffusion_logits": scored},
        "tunix.sft.utils": {"LossOutput": LossOutput, "WeightedMetric": WeightedMetric},
    }  # fmt: skip
    for name, values in members.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


@nnx.jit
def tunix_step(view: ModelView, optimizer: nnx.Optimizer, batch) -> jax.Array:
    """A step as `PeftTrainer` takes it: arguments of the loss from a batch, sum over denominator."""

    def mean(view):
        out = tunix.loss(view, **tunix.loss_inputs(batch)).primary_loss
        return out.unreduced_sum / out.denominator

    loss, gradient = nnx.value_and_grad(mean)(view)
    optimizer.update(view, gradient)
    return loss


@pytest.mark.parametrize("family", FAMILIES)
def test_tunix_steps_as_the_loss_of_this_library(family, contract):
    view = ModelView(tiny(family, **FAMILIES[family]))
    adapter, optimizer = (
        tunix.BatchAdapter(view.model().spec),
        nnx.Optimizer(view, optax.sgd(1e-2), wrt=nnx.Param),
    )
    losses = [float(tunix_step(view, optimizer, adapter((BATCH, key)))) for key in KEYS]
    trained, wanted = by_optax(family)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    chex.assert_trees_all_close(view.model().params, trained.params, atol=1e-6)


def test_batches_that_do_not_align_are_refused(contract):
    model = tiny("llada")
    view, batch = ModelView(model), tunix.BatchAdapter(model.spec)((BATCH, KEYS[0]))
    shorter = batch.replace(target_ids=batch.target_ids[:, :-1], loss_weights=batch.loss_weights[:, :-1])
    refuses("logits|align", tunix.loss, view, shorter)
    outside = jnp.full_like(batch.target_ids, model.spec.vocab)
    refuses("vocabulary", tunix.loss, view, batch.replace(target_ids=outside))
    refuses("spec=3 must be", tunix.BatchAdapter, 3)
    refuses("batch=.* must be", tunix.BatchAdapter(model.spec), ([[1]], KEYS[0]))
