"""Weight-only int8: rounding, the same numbers by every way in, what programs read, and what is refused."""

import dataclasses
import json
import tracemalloc

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from safetensors.numpy import load_file

import dllm_jax as dj
from bench.compiled import traffic
from convert.verify import Tolerance, verify
from dllm_jax.checkpoint import convert, export, save_hf
from dllm_jax.nn import int8, parameters
from dllm_jax.nn.arithmetic import einsum
from dllm_jax.nn.int8 import Int8Matrix, dequantize, quantize
from dllm_jax.nn.sharding import AXES, OUTPUTS, shape
from dllm_jax.nn.spec import ExpertSpec
from dllm_jax.training import TrainConfig, prepare
from tests import refuses
from tests.checkpoints import save_sharded, tiny, write_hf
from tests.policy_cases import matrix

from .ahead_of_time import compiled_for_v5e

CASES = [
    tiny("llada"), tiny("llada", qkv_bias=True, kv_heads=2), tiny("llada", tied=True), tiny("dream"),
    tiny("dream", tied=True),
]  # fmt: skip
BIAS_HEADS_TIED = lambda spec: f"{spec.family}-{spec.qkv_bias}-{spec.tied}"


def bound(matrix: Int8Matrix, array, axes, outputs):
    """Asserts that every number is within half a scale, but for the rounding of float32 itself."""
    inputs = tuple(i for i, axis in enumerate(axes) if axis not in outputs)
    scale = np.expand_dims(np.asarray(matrix.scale, np.float64), inputs)
    far = np.abs(np.asarray(array, np.float64) - np.asarray(matrix.values, np.float64) * scale)
    assert (far <= scale / 2 * (1 + 1e-4)).all()


WITH_EXPERTS = tiny("dream", experts=ExpertSpec(count=4, per_token=2, mlp_width=24, shared=16))


@pytest.mark.parametrize("leaf", OUTPUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_number_is_within_half_a_scale_of_its_channel(monkeypatch, leaf, dtype):
    axes, outputs, spec = AXES[leaf].removeprefix("n"), OUTPUTS[leaf], WITH_EXPERTS
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(shape(spec, axes)) * 10.0 ** rng.uniform(-3, 1, shape(spec, axes))
    array = wide.astype(np.float32).astype(jnp.dtype(dtype))
    found = quantize(array, axes, outputs)
    assert found.values.shape == array.shape
    assert found.scale.shape == shape(spec, outputs)
    assert (found.values.dtype, found.scale.dtype) == (np.int8, np.float32)
    bound(found, array, axes, outputs)

    # Every channel uses the whole range; the scale is that of its largest number alone.
    inputs = tuple(i for i, axis in enumerate(axes) if axis not in outputs)
    assert (np.abs(found.values).max(axis=inputs) == 127).all()
    largest = np.abs(array.astype(np.float32)).max(axis=inputs)
    np.testing.assert_array_equal(found.scale, largest / np.float32(127))

    # Pieces change nothing, nor do strides.
    for piece in (1, array.size // 3):
        monkeypatch.setattr(int8, "PIECE", piece)
        chex.assert_trees_all_equal(quantize(array, axes, outputs), found, strict=True)
    chex.assert_trees_all_equal(quantize(np.asfortranarray(array), axes, outputs), found, strict=True)
    np.testing.assert_allclose(dequantize(found, axes, outputs), array.astype(np.float32), atol=0.2)


FINITE = strategies.floats(width=32, allow_nan=False, allow_infinity=False)


@hypothesis.given(strategies.lists(FINITE, min_size=1, max_size=6))
def test_no_finite_channel_is_out_of_bounds(channel):
    array = np.asarray(channel, np.float32)[:, None]
    bound(quantize(array, "md", "d"), array, "md", "d")


def test_halves_are_even_and_channels_of_nothing_have_the_scale_one():
    array = np.asarray([[127, 0, 1e-40], [2.5, 0, 0], [-1.5, -0.0, 0], [-127, 0, -1e-40]], np.float32)
    found = quantize(array, "md", "d")
    np.testing.assert_array_equal(found.values, [[127, 0, 0], [2, 0, 0], [-2, 0, 0], [-127, 0, 0]])
    np.testing.assert_array_equal(found.scale, [1, 1, 1])


def test_quantizing_holds_a_piece_in_float32(monkeypatch):
    monkeypatch.setattr(int8, "PIECE", 2**14)
    array = np.asarray(jnp.ones((512, 1024), jnp.bfloat16))
    for axes, outputs in (("vm", "v"), ("fm", "m")):
        tracemalloc.start()
        quantize(array, axes, outputs)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < array.size + 16 * 2**14  # the values; a few pieces


DTYPES = "float32", "bfloat16"


@matrix("spec, dtype", CASES, DTYPES, today=[(CASES[1], "float32"), (CASES[3], "bfloat16")])
def test_converted_and_loaded_is_loaded_as_int8(tmp_path, spec, dtype):
    source = write_hf(tmp_path / "hf", spec, dtype=dtype, shards=2)
    converted = convert(source, tmp_path / "jax", weights="int8")
    ways = (source, {"weights": "int8"}), (converted, {}), (converted, {"weights": "int8"})
    models = [dj.load(p, separate_layers=apart, **options) for apart in (False, True) for p, options in ways]
    for model in models:
        assert (model.weights, model.dtype, model.spec) == ("int8", dtype, spec)
        one_form = parameters.stacked(model.params)
        chex.assert_trees_all_equal(one_form, models[0].params, strict=True)
    for model in (models[0], models[-1]):
        apart = model.layers_are_separate
        for where, options in ((source, {"weights": "int8"}), (converted, {}), (spec, {"weights": "int8"})):
            described = dj.abstract(where, dtype=dtype, separate_layers=apart, **options)
            chex.assert_trees_all_equal_shapes_and_dtypes(model.params, described.params)

    # What is not a matrix of the layers or the head is as it was.
    plain = dj.load(source, separate_layers=False)
    held = lambda params: {k: v for k, v in {**params, **params["layers"]}.items() if k != "layers"}
    for name, leaf in held(models[0].params).items():
        assert isinstance(leaf, Int8Matrix) == (name in OUTPUTS), name
        if name not in OUTPUTS:
            np.testing.assert_array_equal(leaf, held(plain.params)[name])
    assert parameters.count(models[0].params) == parameters.count(plain.params)


@pytest.mark.parametrize("spec", CASES, ids=BIAS_HEADS_TIED)
def test_logits_are_those_of_the_numbers_it_stands_for(tmp_path, spec):
    model = dj.load(write_hf(tmp_path / "hf", spec), weights="int8", separate_layers=False)

    def stands_for(leaf, array):
        if not isinstance(array, Int8Matrix):
            return array
        layers = "n" * (leaf != "head")
        return dequantize(jax.tree.map(np.asarray, array), AXES[leaf], layers + OUTPUTS[leaf])

    floats = {k: stands_for(k, v) for k, v in model.params.items() if k != "layers"}
    floats["layers"] = {k: stands_for(k, v) for k, v in model.params["layers"].items()}
    ids = np.random.default_rng(1).integers(0, 60, (2, 12), dtype=np.int32)
    plain = dataclasses.replace(model, params=floats)
    assert plain.weights is None
    assert "float32, int8" in repr(model)
    held = "q, k, v, o, gate, up, down" + ", head" * (not spec.tied)
    assert f"{held}; a float32 scale" in repr(model)
    assert "int8" not in repr(plain)
    np.testing.assert_allclose(dj.forward(model, ids), dj.forward(plain, ids), atol=2e-4)


def test_products_are_scaled_in_float32():
    """In bfloat16 the sums, not the rounded product, meet the scale; values up to 127 convert exactly."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3, 64)), jnp.bfloat16)
    matrix = quantize(rng.standard_normal((64, 4, 8)).astype(np.float32), "mhd", "hd")
    found = einsum("bqm,mhd->bqhd", x, jax.tree.map(jnp.asarray, matrix))
    exact = np.einsum("bqm,mhd->bqhd", np.asarray(x, np.float64), matrix.values.astype(np.float64))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), exact * matrix.scale, rtol=2.0**-8, atol=1e-6)


def test_operations_that_int8_lacks_are_refused(tmp_path, unannotated):
    source = write_hf(tmp_path / "hf", tiny())
    converted = convert(source, tmp_path / "jax", weights="int8")
    for weights in ("bfloat16", "int4"):  # as users call, without checks of annotations
        refuses(f"weights='{weights}' must be None .* or 'int8'", dj.load, source, weights=weights)
        with pytest.raises(ValueError, match="jax holds int8: what rounding took cannot be given back"):
            dj.load(converted, weights=weights)
        refuses("must be None", convert, source, tmp_path / "other", weights=weights)
        refuses("must be None", dj.abstract, tiny(), weights=weights)
    with pytest.raises(ValueError, match=r"jax holds int8 matrices: a Hugging Face directory .* digits"):
        export(converted, tmp_path / "back")
    refuses("model holds int8 matrices", save_hf, dj.load(converted), tmp_path / "back")
    refuses("weights='int8' cannot be trained", prepare, dj.load(converted), TrainConfig(steps=1000))
    assert not (tmp_path / "back").exists()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_matrices_without_a_scale_are_refused_by_name(tmp_path, bad):
    source = write_hf(tmp_path / "hf", tiny())
    weights = load_file(source / "model.safetensors")
    name = "model.transformer.blocks.1.up_proj.weight"
    weights[name][3, 4] = bad
    save_sharded(source, weights)
    refuses(rf"NaN or infinite values, .* in {name}", dj.load, source, weights="int8")
    refuses(name, convert, source, tmp_path / "jax", weights="int8")
    weights[name][3, 4] = 0
    weights["model.transformer.wte.weight"][0, 0] = bad  # kept as it is, unless somebody asks
    save_sharded(source, weights)
    dj.load(source, weights="int8")
    refuses(r"values in model\.transformer\.wte\.weight", dj.load, source, weights="int8", check_finite=True)


def test_damaged_and_mixed_directories(tmp_path):
    source = write_hf(tmp_path / "hf", tiny())
    plain, ours = convert(source, tmp_path / "plain"), convert(source, tmp_path / "jax", weights="int8")
    file = ours / "spec.json"
    written = json.loads(file.read_text())
    assert (written["format"], written["weights"]) == (4, "int8")
    assert json.loads((plain / "spec.json").read_text()).keys() == {"format", "dtype", "spec"}
    assert json.loads((plain / "spec.json").read_text())["format"] == 3
    assert json.loads((ours / "provenance.json").read_text())["weights"] == "int8"

    plain_of = lambda **changes: {k: v for k, v in (written | changes).items() if k != "weights"}
    for content, message in (
        (written | {"format": 5}, "format=5 is not supported; supported: 3 or 4"),
        (written | {"format": 3}, "weights='int8' is not supported; supported: null"),
        (plain_of(), 'weights is missing; supported: "int8"'),
        (written | {"weights": "int4"}, "weights='int4' is not supported"),
        (plain_of(format=3), r"layer_000 holds .*'q.values'.* but spec\.json describes .*'q'"),
    ):
        file.write_text(json.dumps(content))
        refuses(message, dj.load, ours)
    file.write_text(json.dumps(written))

    # A layer of floats among int8 ones, and the other way around.
    (ours / "params" / "layer_001").rename(tmp_path / "kept")
    (plain / "params" / "layer_001").rename(ours / "params" / "layer_001")
    refuses(r"layer_001 holds .*'q': .* but spec\.json describes .*'q.values'", dj.load, ours)
    (tmp_path / "kept").rename(plain / "params" / "layer_001")
    refuses(r"layer_001 holds .*'q.values'", dj.load, plain)


def test_scales_that_no_conversion_writes(tmp_path, monkeypatch):
    source, scale = write_hf(tmp_path / "hf", tiny(layers=1)), 1.0

    def damaged(array, axes, outputs):
        found = quantize(array, axes, outputs)
        found.scale.flat[-1] = scale if outputs == "v" else 1
        return found

    monkeypatch.setattr("dllm_jax.checkpoint.sharded.quantize", damaged)
    for scale in (0.0, -1.0, np.nan, np.inf):
        ours = convert(source, tmp_path / f"jax{scale}", weights="int8")
        refuses(r"head: head\.scale holds numbers that are not positive and finite", dj.load, ours)


def test_verify_compares_int8_as_it_is(tmp_path):
    source = write_hf(tmp_path / "hf", tiny())
    a, b = (convert(source, tmp_path / name, weights="int8") for name in "ab")
    assert verify(a, b, tokens=0).identical
    found = verify(source, a, tokens=0)
    assert not found.ok
    assert {(t.dtype_a, t.dtype_b) for t in found.differing} == {("float32", "int8")}
    assert len(found.differing) == 3 * 7 + 1  # the matrices
    assert 0 < max(t.max_abs for t in found.differing) < 0.02  # half a scale: largest number / 254
    other = verify(convert(write_hf(tmp_path / "hf2", tiny(), seed=1), tmp_path / "c", weights="int8"), a)
    assert len(other.differing) == other.tensors
    assert "verdict: within tolerance" in str(verify(source, a, tokens=8, tolerance=Tolerance(1, 0.01, 0.5)))


def test_tpu_programs_read_half_the_bytes():
    """No copy of a matrix in bfloat16: the scan's body converts what it reads where it multiplies."""
    n, q, m, f = 8, 32, 4096, 12288
    moved = {}
    for name in (None, "int8"):
        matrix = int8.abstract_weights(
            tiny(layers=n, width=m, mlp_width=f), "up", jnp.bfloat16, name, stacked=True
        )
        tree = jax.tree.structure(matrix)

        def program(x, *arrays, tree=tree):
            step = lambda x, w: (einsum("bqm,mf->bqf", x, w)[..., :m], None)
            return jax.lax.scan(step, x, jax.tree.unflatten(tree, arrays))[0]

        x = jax.ShapeDtypeStruct((1, q, m), jnp.bfloat16)
        compiled = compiled_for_v5e(program, x, *jax.tree.leaves(matrix))
        (body,) = (loop for loop in traffic.program(compiled.as_text()).walk() if loop.trips == n)
        moved[name] = body.bytes
    assert moved[None] >= 2 * m * f
    assert moved["int8"] <= 0.55 * moved[None]
