"""DiffusionGemma: layers of two kinds, a second input, and what has no meaning without a mask."""

import dataclasses
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import lora
from dllm_jax.nn.parameters import abstract, count
from dllm_jax.published.presets import presets
from dllm_jax.roofline import steps
from tests import refuses
from tests.models import spec, tiny

FAMILY, TOKENS = "diffusion-gemma", np.arange(20)[None] % 50
MODEL = pathlib.Path(__file__).parent / "goldens" / "models" / "diffusion-gemma-tiny"


def test_a_causal_pass_reads_nothing_later_and_a_canvas_everything_in_its_window():
    """Of the layers, the last one sees all; a window alone bounds what the first position changes."""
    model = tiny(FAMILY, layers=1, gemma=dataclasses.replace(spec(FAMILY).gemma, full=()))
    run = lambda tokens, **options: np.asarray(dj.forward(model, tokens, **options))[0]
    plain, begins, window = run(TOKENS), 12, model.spec.gemma.window
    changed = lambda at, **options: np.flatnonzero(
        np.any(run(TOKENS, **options) != run(np.where(np.arange(20) == at, 55, TOKENS), **options), axis=1)
    )
    np.testing.assert_allclose(plain[:5], run(TOKENS[:, :5]), atol=1e-4)
    assert changed(3).tolist() == [*range(3, 3 + window)]
    assert changed(15, response=begins).tolist() == [*range(begins, 20)]
    assert changed(begins - window + 1, response=begins)[-1] == 19
    assert changed(begins - window, response=begins)[-1] < begins


def test_each_kind_of_pass_has_its_scalars_and_denoising_alone_reads_expectations():
    model = tiny(FAMILY)
    soft = jnp.asarray(np.random.default_rng(0).standard_normal((1, 20, 32)), jnp.float32)
    run = lambda **options: np.asarray(dj.forward(model, TOKENS, **options))[0]
    plain, read = run(response=12), run(response=12, soft=soft)
    assert np.array_equal(plain[:12], read[:12])
    assert np.array_equal(run(), run(soft=soft))
    assert np.all(np.any(plain[12:] != read[12:], axis=1))
    other = [layer | {"causal_scalar": layer["causal_scalar"] * 2} for layer in model.params["layers"]]
    twice = dataclasses.replace(model, params=model.params | {"layers": other})
    assert np.any(np.asarray(dj.forward(twice, TOKENS))[0] != run())


def test_a_mesh_int8_and_updates_compute_what_they_should(tmp_path):
    model = tiny(FAMILY)
    plain = dj.forward(model, TOKENS, response=12)
    matrices = ("q", "k", "v", "o", "gate", "up", "down")
    adapted = lora.attach(model, lora.LoRA(rank=2, matrices=matrices), jax.random.key(0))
    assert "v" not in adapted.params["layers"][2]
    assert np.array_equal(dj.forward(adapted, TOKENS, response=12), plain)
    moved = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 0.1 if getattr(path[-1], "name", "") == "b" else leaf, adapted.params
    )
    changed = dataclasses.replace(adapted, params=moved)
    ours = dj.forward(changed, TOKENS, response=12)
    merged = dj.forward(lora.merge(changed), TOKENS, response=12)
    assert np.abs(ours - plain).max() > 0.1
    np.testing.assert_allclose(merged, ours, atol=1e-3)
    refuses("adapters in PEFT's files are not supported by diffusion-gemma", lora.save, changed, tmp_path)


def test_gradients_reach_every_parameter_of_a_pass():
    model = tiny(FAMILY)
    soft = jnp.ones((1, 20, 32))
    loss = lambda params: jnp.sum(
        dj.forward(dataclasses.replace(model, params=params), TOKENS, response=12, soft=soft) ** 2
    )
    found = jax.grad(loss)(model.params)
    chex.assert_tree_all_finite(found)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(found))


def test_methods_that_need_a_mask_are_refused_by_name():
    model, calls = tiny(FAMILY), "does not support diffusion-gemma: it denoises uniform noise and has no mask"
    refuses(f"infill {calls}", dj.infill, model, [[1, 2, 3]])
    refuses(f"log_likelihood {calls}", dj.log_likelihood, model, [[1]], [[2]])
    refuses(f"prefill {calls}", dj.prefill, model, [1, 2, 3])
    refuses("rope_factor=2.0 is not supported by diffusion-gemma", dj.load, MODEL, rope_factor=2.0)
    refuses("soft is not supported by llada", dj.forward, tiny("llada"), TOKENS, soft=jnp.zeros((1, 20, 32)))
    steer = dj.Intervention.mask("k")
    refuses("are of several shapes", dj.forward, model, TOKENS, interventions=(steer,))
    of_full = dj.Intervention.mask("k", layers=2)
    assert np.any(dj.forward(model, TOKENS, interventions=(of_full,)) != dj.forward(model, TOKENS))


def test_costs_count_every_parameter_and_windows_bound_what_is_read():
    for of in (spec(FAMILY), presets.model_spec("diffusiongemma-26b-a4b")):
        counted = steps.layers_size(of, of.experts.count) + of.vocab * of.width + of.width
        assert counted == count(abstract(of))
    short, long = (steps.cost(steps.Step(False, 256, slots, 256), of, 1, 2).pairs for slots in (1279, 32768))
    assert long / short < 5  # one layer in six reads all of a context
    described = dj.abstract("diffusiongemma-26b-a4b", weights="int8")
    assert count(described.params) == counted
