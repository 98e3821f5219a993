"""Checkpoints of block-causal models and mixtures of experts: bit for bit both ways, and refusals."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import dllm_jax as dj
from dllm_jax.checkpoint import convert, export, save_hf
from tests.checkpoints import rewrite, save_sharded, weights, write_tokenizer

MODELS = Path(__file__).parent / "goldens" / "models"
NEW = ("llada-moe-tiny-dense0",)


def copied(name: str, to: Path, dtype=None, own: str = "expert_bias", shards: int = 1) -> Path:
    """One of the recorded models in another dtype; what is named `own` stays in float32."""
    to.mkdir()
    config = json.loads((MODELS / name / "config.json").read_text())
    config["torch_dtype"] = "float32" if dtype is None else "bfloat16"
    (to / "config.json").write_text(json.dumps(config))
    tensors = load_file(MODELS / name / "model.safetensors")
    narrow = {n: x if dtype is None or own in n else x.astype(dtype) for n, x in tensors.items()}
    save_sharded(to, narrow, shards)
    write_tokenizer(to, dj.load(to).spec)
    return to


@pytest.mark.parametrize("dtype", [None, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NEW)
def test_both_ways_bit_for_bit(tmp_path, name, dtype):
    """Converted and back, and out of memory; what a router keeps in float32 beside bfloat16 as well."""
    source = copied(name, tmp_path / "hf", dtype, shards=3)
    converted = convert(source, tmp_path / "jax")
    export(converted, tmp_path / "back", shard_bytes=100_000)
    assert weights(tmp_path / "back") == weights(source)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()

    # The same model from either, and the same files out of it.
    model = dj.load(converted)
    chex.assert_trees_all_equal(model.params, dj.load(source).params, strict=True)
    described = dj.abstract(source).params
    assert jax.tree.map(lambda a: (a.shape, a.dtype), described) == jax.tree.map(
        lambda a: (a.shape, a.dtype), model.params
    )
    assert weights(save_hf(model, tmp_path / "saved")) == weights(source)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


@pytest.mark.parametrize("name", NEW)
def test_a_model_that_never_had_a_config_gets_one_that_reads_as_its_spec(tmp_path, name):
    spec = dj.load(MODELS / name).spec
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), dj.abstract(spec, "float32").params)
    assert dj.load(save_hf(dj.Model(params, spec), tmp_path / "made")).spec == spec


def test_experts_in_int8_are_converted_as_they_load(tmp_path):
    name = "llada-moe-tiny-dense0"
    converted = dj.load(convert(copied(name, tmp_path / "hf"), tmp_path / "jax", weights="int8"))
    loaded = dj.load(MODELS / name, weights="int8")
    chex.assert_trees_all_equal(converted.params, loaded.params, strict=True)
    assert loaded.params["layers"][1]["expert_gate"].values.dtype == np.int8


def test_tensors_that_do_not_fit_are_named(tmp_path):
    source = copied("llada-moe-tiny-dense0", tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight")
    tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.1.mlp.gate.weight"]
    save_sharded(source, tensors)
    with pytest.raises(ValueError, match=r"(?s)missing: .*experts\.2\.up.*unmapped: .*0\.mlp\.gate\."):
        dj.load(source)


REFUSED = {
    "llada-moe-tiny-dense0": [
        ({"num_experts_per_tok": 7}, "per_token=7 must be at most 6"),
        ({"num_experts": 0}, "num_experts=0 must be"),
        ({"moe_layer_freq": [1, 2, 1]}, "moe_layer_freq=.* must be a list of 3 numbers"),
        ({"moe_layer_freq": [0, 0, 0]}, "must be some of the layers"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function='sigmoid' is not supported"),
        ({"router_num_group": 2}, "router_num_group=2 is not supported"),
        ({"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size=32 is not supported"),
        ({"qk_layernorm": False}, "qk_layernorm=False is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling=.* is not supported"),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "message"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, name, changes, message):
    source = copied(name, tmp_path / "hf")
    rewrite(source / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        dj.load(source)
