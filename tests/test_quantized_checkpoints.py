"""Checkpoints whose weights other tools quantized, and fused experts: against NumPy's loops over numbers."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dllm_jax as dj
from dllm_jax import bundled
from dllm_jax.checkpoint import convert
from tests import refuses
from tests.checkpoints import rewrite, save_sharded, tensors, tiny, write_hf

Parts = tuple[dict[str, np.ndarray], np.ndarray]  # tensors by the end of their names, and what they stand for
SCALE = 2.0**-8


def float8(rng, shape, scale_shape, block, end) -> Parts:
    """Weights of a byte; number [o, i] has the scale [o // block[0], i // block[1]]."""
    q = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, scale_shape).astype(np.float32)
    grid = scale.reshape(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    weight = np.empty(shape, np.float32)
    for o, i in np.ndindex(*shape):
        weight[o, i] = np.float32(q[o, i]) * grid[o // block[0], i // block[1]]
    return {"weight": q, end: scale, "input_scale": np.ones(1, np.float32)}, weight


def int8(rng, shape) -> Parts:
    q = rng.integers(-128, 128, shape).astype(np.int8)
    scale = rng.uniform(0.5, 2, (shape[0], 1)).astype(ml_dtypes.bfloat16)
    zero = rng.integers(-9, 9, (shape[0], 1)).astype(np.int8)
    weight = (q.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
    return {"weight": q, "weight_scale": scale, "weight_zero_point": zero}, weight


def packed(numbers, bits, axis, order=None) -> np.ndarray:
    """int32 of several numbers along an axis; the k-th from the lowest bits is number order[k] of them."""
    numbers, count = np.moveaxis(np.asarray(numbers), axis, -1), 32 // bits
    out = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // count), np.uint64)
    for index in np.ndindex(*out.shape):
        for k in range(count):
            number = int(numbers[(*index[:-1], index[-1] * count + (order or range(count))[k])])
            out[index] |= np.uint64(number << (bits * k))
    return np.ascontiguousarray(np.moveaxis(out.astype(np.uint32).view(np.int32), -1, axis))


def gptq(rng, shape, bits, offset, act_order) -> Parts:
    outputs, inputs, groups = *shape, 4
    q = rng.integers(0, 2**bits, (inputs, outputs))
    zeros = rng.integers(0, 2**bits, (groups, outputs))
    scales = (SCALE * rng.uniform(1, 2, (groups, outputs))).astype(np.float16)
    g_idx = rng.integers(0, groups, inputs) if act_order else np.arange(inputs) // (inputs // groups)
    weight = np.empty(shape, np.float32)
    for o, i in np.ndindex(*shape):
        g = g_idx[i]
        weight[o, i] = np.float32(scales[g, o]) * np.float32(int(q[i, o]) - (int(zeros[g, o]) + offset))
    parts = {"qweight": packed(q, bits, 0), "qzeros": packed(zeros, bits, 1), "scales": scales}
    return parts | ({"g_idx": g_idx.astype(np.int32)} if act_order is not None else {}), weight


def awq(rng, shape, bits) -> Parts:
    outputs, inputs, groups = *shape, 4
    order = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits]
    q = rng.integers(0, 2**bits, (inputs, outputs))
    zeros = rng.integers(0, 2**bits, (groups, outputs))
    scales = (SCALE * rng.uniform(1, 2, (groups, outputs))).astype(np.float16)
    group = np.arange(inputs) // (inputs // groups)
    weight = scales.astype(np.float32)[group] * (q - zeros[group]).astype(np.float32)
    return {
        "qweight": packed(q, bits, 1, order),
        "qzeros": packed(zeros, bits, 1, order),
        "scales": scales,
    }, weight.T


def pack_quantized(rng, shape, bits) -> Parts:
    q = rng.integers(0, 2**bits, shape)
    scale = (SCALE * rng.uniform(1, 2, (shape[0], 4))).astype(np.float32)
    weight = (q - 2 ** (bits - 1)).astype(np.float32) * np.repeat(scale, shape[1] // 4, 1)
    parts = {"weight_packed": packed(q, bits, 1), "weight_scale": scale, "weight_shape": np.array(shape)}
    return parts, np.float32(weight)


COMPRESSED = {"quant_method": "compressed-tensors", "ignore": [f"lm_head.{i}" for i in range(300)]}
GPTQ = {"quant_method": "gptq", "bits": 4}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [12, 10], "modules_to_not_convert": ["lm_head"]}
ceil = lambda shape: (-(-shape[0] // 12), -(-shape[1] // 10))
KINDS = {
    "fp8 in blocks": (BLOCKS, lambda r, s: float8(r, s, ceil(s), (12, 10), "weight_scale_inv")),
    "fp8 by channel": (
        COMPRESSED | {"format": "float-quantized"},
        lambda r, s: float8(r, s, (s[0], 1), (1, s[1]), "weight_scale"),
    ),
    "fp8 by tensor": (COMPRESSED, lambda r, s: float8(r, s, (1,), s, "weight_scale")),
    "fp8 by tensor, static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda r, s: float8(r, s, (), s, "weight_scale"),
    ),
    "fp8 in groups": (
        COMPRESSED | {"config_groups": {"group_0": {"weights": {"group_size": 8}}}},
        lambda r, s: float8(r, s, (s[0], s[1] // 8), (1, 8), "weight_scale"),
    ),
    "int8": (COMPRESSED | {"format": "int-quantized"}, int8),
    "packed, 4 bits": (COMPRESSED | {"format": "pack-quantized"}, lambda r, s: pack_quantized(r, s, 4)),
    "packed, 8 bits": (COMPRESSED | {"format": "pack-quantized"}, lambda r, s: pack_quantized(r, s, 8)),
    "gptq, 4 bits": (GPTQ, lambda r, s: gptq(r, s, 4, 1, False)),
    "gptq, 8 bits, by act": ({"quant_method": "gptq", "bits": 8}, lambda r, s: gptq(r, s, 8, 1, True)),
    "gptq v2, 4 bits, by act": (
        GPTQ | {"checkpoint_format": "gptq_v2"}, lambda r, s: gptq(r, s, 4, 0, True)
    ),
    "gptq without g_idx": (GPTQ, lambda r, s: gptq(r, s, 4, 1, None)),
    "awq, 4 bits": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, lambda r, s: awq(r, s, 4)),
    "awq, 8 bits": ({"quant_method": "awq", "w_bit": 8, "version": "GEMM"}, lambda r, s: awq(r, s, 8)),
}  # fmt: skip


def written(path, kind, seed=0):
    """A directory of quantized matrices, and one of what these stand for in float32."""
    settings, make = KINDS[kind]
    spec, rng = tiny(layers=1), np.random.default_rng(seed)
    stored, plain = {}, {}
    for name, weight in tensors(spec).items():
        if ".blocks." in name and weight.ndim == 2 and "v_proj" not in name:  # others are left as they are
            parts, plain[name] = make(rng, weight.shape)
            stored |= {f"{name.removesuffix('.weight')}.{end}": part for end, part in parts.items()}
        else:
            stored[name] = plain[name] = weight
    quantized, exact = (write_hf(path / name, spec) for name in ("quantized", "exact"))
    rewrite(quantized / "config.json", quantization_config=settings)
    save_file(stored, quantized / "model.safetensors")
    save_sharded(exact, {name: np.ascontiguousarray(weight) for name, weight in plain.items()})
    return quantized, exact


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_are_what_they_stand_for(tmp_path, kind):
    quantized, exact = written(tmp_path, kind)
    for options in ({}, {"dtype": "bfloat16"}, {"weights": "int8"}):
        ours, expected = (dj.load(path, separate_layers=True, **options) for path in (quantized, exact))
        chex.assert_trees_all_equal(ours.params, expected.params, strict=True)

    # What is written is plain, and says so.
    back = dj.save_hf(dj.load(quantized, separate_layers=True), tmp_path / "back")
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    chex.assert_trees_all_equal(load_file(back / "model.safetensors"), load_file(exact / "model.safetensors"))


@pytest.mark.parametrize("kind", ["fp8 in blocks", "gptq, 8 bits, by act", "awq, 4 bits", "packed, 4 bits"])
def test_parts_of_quantized_weights_are_read_on_meshes(tmp_path, kind):
    quantized, exact = written(tmp_path, kind)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"))
    split, expected = (
        dj.load(quantized, mesh=mesh, separate_layers=True),
        dj.load(exact, separate_layers=True),
    )
    jax.tree.map(np.testing.assert_array_equal, split.params, expected.params)


def test_conversions_of_quantized_weights(tmp_path):
    quantized, exact = written(tmp_path, "gptq, 4 bits")
    converted = convert(quantized, tmp_path / "jax")
    chex.assert_trees_all_equal(dj.load(converted).params, dj.load(exact).params, strict=True)
    assert json.loads((converted / "provenance.json").read_text())["quantized"] == "gptq, 4 bits"
    assert "dequantized from gptq, 4 bits" in repr(dj.load(quantized))


REFUSED = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, r"quant_method='bitsandbytes'.*model\.dequantize"),
    "old bitsandbytes": ({"load_in_4bit": True}, r"quant_method=None.*supported: fp8"),
    "no object": (3, "quant_method=None"),
    "of tomorrow": ({"quant_method": "x" * 9999}, "is not supported; supported: fp8"),
    "bits": ({"quant_method": "gptq", "bits": 3}, "bits=3 is not supported; supported: 4, 8"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    "gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv' is not supported"),
    "nvfp4": (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
    "sparse": (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    "other bits": ({"quant_method": "gptq", "bits": 8}, "is not packed in 8 bits"),
    "other blocks": (BLOCKS | {"weight_block_size": [16, 16]}, "weight_block_size=.* does not fit"),
    "no blocks": (BLOCKS | {"weight_block_size": 3}, "weight_block_size=3 must be two whole numbers"),
}  # fmt: skip


def test_unsupported_formats_are_refused_in_short_messages(tmp_path):
    directories = {kind: written(tmp_path / kind, kind)[0] for kind in ("gptq, 4 bits", "fp8 in blocks")}
    for name, (settings, message) in REFUSED.items():
        path = directories["fp8 in blocks" if "blocks" in name else "gptq, 4 bits"]
        rewrite(path / "config.json", quantization_config=settings)
        with pytest.raises(ValueError, match=message) as error:
            dj.load(path)
        assert len(str(error.value)) < 600
    weights = load_file(directories["gptq, 4 bits"] / "model.safetensors")
    name = next(name for name in weights if name.endswith("g_idx"))
    rewrite(directories["gptq, 4 bits"] / "config.json", quantization_config=KINDS["gptq, 4 bits"][0])
    save_file(weights | {name: weights[name] + 9}, directories["gptq, 4 bits"] / "model.safetensors")
    refuses("g_idx has groups 9 to", dj.load, directories["gptq, 4 bits"])
    path = written(tmp_path / "int8", "int8")[0]
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith("_zero_point"))
    save_file(weights | {name: weights[name].astype(np.int16)}, path / "model.safetensors")
    refuses(r"a zero point I16 \[.*\]: scales must be floats, and a zero point I8", dj.load, path)


def fused(weights, layers, kinds):
    """The same weights with the experts of each layer in one tensor."""
    out = {name: weight for name, weight in weights.items() if ".experts." not in name}
    count = len([n for n in weights if ".layers.1.mlp.experts." in n and n.endswith("up_proj.weight")])
    for n in layers:
        start = f"model.layers.{n}.mlp.experts"
        of = lambda p, start=start: np.stack([weights[f"{start}.{e}.{p}_proj.weight"] for e in range(count)])
        for name, (axis, parts) in kinds.items():
            out[f"{start}.{name}"] = np.concatenate([of(part) for part in parts], axis)
    return out


TRANSFORMERS = {"gate_up_proj": (1, ("gate", "up")), "down_proj": (1, ("down",))}
STACKED = {f"{part}_proj": (1, (part,)) for part in ("gate", "up", "down")}


@pytest.mark.parametrize("kinds", [TRANSFORMERS, STACKED], ids=["transformers", "each"])
def test_fused_experts(tmp_path, kinds):
    source = bundled.path("tiny-sdar-moe")
    shutil.copytree(source, tmp_path / "fused")
    weights = load_file(f"{source}/model.safetensors")
    together = fused(weights, range(4), kinds)
    save_file(together, tmp_path / "fused" / "model.safetensors")
    ours, expected = dj.load(tmp_path / "fused"), dj.load(source)
    chex.assert_trees_all_equal(ours.params, expected.params, strict=True)
    assert ours.dtype == jnp.float32
    if kinds is TRANSFORMERS:
        path = dj.save_hf(expected, tmp_path / "written", fused_experts=True)
        chex.assert_trees_all_equal(load_file(path / "model.safetensors"), together)
    chex.assert_trees_all_equal(load_file(dj.save_hf(ours, tmp_path / "b") / "model.safetensors"), weights)
    turned = {n: np.ascontiguousarray(w.swapaxes(1, 2)) if w.ndim == 3 else w for n, w in together.items()}
    save_file(turned, tmp_path / "fused" / "model.safetensors")
    refuses(r"\[experts, outputs, inputs\], gates before ups", dj.load, tmp_path / "fused")
