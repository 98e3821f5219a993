"""Checkpoints of block-causal models and mixtures of experts: bit for bit both ways, and refusals."""

import dataclasses
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
from dllm_jax import lora
from dllm_jax.checkpoint import convert, export, save_hf
from dllm_jax.checkpoint.config import Config, MaskTokenWarning, read_config, read_model_config
from dllm_jax.checkpoint.families import FAMILIES, config_to_spec, spec_to_config
from dllm_jax.testing.models import spec as tiny_spec
from tests import refuses
from tests.checkpoints import rewrite, save_sharded, weights, write_tokenizer

MODELS = Path(__file__).parent / "goldens" / "models"
NEW = ("llada-moe-tiny-dense0", "llada2-tiny-dense2", "sdar-tiny-tied", "fast-dllm-v2-tiny-tied")
NEW += "a2d-qwen3-tiny", "rnd1-tiny", "nemotron-tiny-wide", "illada-tiny", "stable-diffcoder-tiny"
NEW += "dream-reasoner-tiny", "diffusion-gemma-tiny", "diffusion-gemma-tiny-wide"
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::dllm_jax.checkpoint.config.{kind}")
    for kind in ("MaskTokenWarning", "BlockSizeWarning")
]


STABLE = FAMILIES["stable-diffcoder"]


def read_spec(values: dict):
    return config_to_spec(Config("here", values))


def copied(name: str, to: Path, dtype=None, own: str = "expert_bias", shards: int = 1) -> Path:
    """One of the recorded models in another dtype; what is named `own` stays in float32."""
    to.mkdir()
    config = json.loads((MODELS / name / "config.json").read_text())
    config["dtype" if "dtype" in config else "torch_dtype"] = "float32" if dtype is None else "bfloat16"
    (to / "config.json").write_text(json.dumps(config))
    files = sorted((MODELS / name).glob("*.safetensors"))
    tensors = {key: value for file in files for key, value in load_file(file).items()}
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
    chex.assert_trees_all_equal_shapes_and_dtypes(dj.abstract(source).params, model.params)
    assert weights(save_hf(model, tmp_path / "saved")) == weights(source)
    saved, original = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "saved", source))
    assert saved == original


@pytest.mark.parametrize("name", NEW)
def test_a_model_that_never_had_a_config_gets_one_that_reads_as_its_spec(tmp_path, name):
    spec = dj.load(MODELS / name).spec
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), dj.abstract(spec, "float32").params)
    assert dj.load(save_hf(dj.Model(params, spec), tmp_path / "made")).spec == spec


def test_experts_in_int8_are_converted_as_they_load_and_none_may_lack(tmp_path):
    source = copied("llada-moe-tiny-dense0", tmp_path / "hf")
    converted = dj.load(convert(source, tmp_path / "jax", weights="int8"))
    loaded = dj.load(source, weights="int8")
    chex.assert_trees_all_equal(converted.params, loaded.params, strict=True)
    assert loaded.params["layers"][1]["expert_gate"].values.dtype == np.int8
    tensors = load_file(source / "model.safetensors")
    tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight")
    tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.1.mlp.gate.weight"]
    save_sharded(source, tensors)
    refuses(r"(?s)missing: .*experts\.2\.up.*unmapped: .*0\.mlp\.gate\.", dj.load, source)


ROPE = json.loads((MODELS / "nemotron-tiny-wide" / "config.json").read_text())["rope_parameters"]
GEMMA = json.loads((MODELS / "diffusion-gemma-tiny" / "config.json").read_text())["text_config"]


def _text(**changes) -> dict:
    """DiffusionGemma's config.json with other keys of its decoder."""
    return {"text_config": GEMMA | changes}


REFUSED = {
    "diffusion-gemma-tiny": [
        ({"text_config": None}, "text_config=None must be an object"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
        ({"canvas_length": 0}, "canvas_length=0 must be"),
        (_text(tie_word_embeddings=False), "tie_word_embeddings=False is not supported"),
        (_text(hidden_activation="silu"), "hidden_activation='silu' is not supported"),
        (_text(attention_bias=True), "attention_bias=True is not supported"),
        (_text(use_bidirectional_attention="all"), "use_bidirectional_attention='all' is not supported"),
        (_text(num_experts=None), "num_experts=null is not supported: layers without experts"),
        (_text(num_kv_shared_layers=2), "num_kv_shared_layers=2 is not supported"),
        (_text(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0 is not supported"),
        (_text(layer_types=["sliding_attention"] * 4), "layer_types=.* must end with 'full_attention'"),
        (_text(layer_types=["chunked_attention"] * 4), "layer_types=.* must be a list of 4"),
        (
            _text(per_layer_config={"0": {"head_dim": 4}}),
            "per_layer_config names layer 0, which is no layer",
        ),
        (_text(per_layer_config={"3": {"sliding_window": 4}}), "per_layer_config has sliding_window"),
        (_text(global_head_dim=8), "'per_layer_config.3.head_dim': 16, 'global_head_dim': 8} must be equal"),
        (
            _text(rope_parameters=GEMMA["rope_parameters"] | {"full_attention": {"rope_type": "yarn"}}),
            "rope_type='yarn' is not supported; supported: \"proportional\"",
        ),
    ],
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
    "llada2-tiny-dense2": [
        ({"n_group": 5}, "count=12 experts must be a multiple of groups=5"),
        ({"num_experts_per_tok": 9}, "per_token=9 must be at most 8, the experts of its groups"),
        ({"score_function": "softmax"}, "score_function='softmax' is not supported"),
        ({"use_qkv_bias": True}, "use_qkv_bias=True is not supported"),
        ({"rotary_dim": 4}, "rotary_dim=4 is not supported; supported: 8"),
        ({"first_k_dense_replace": 4}, "must be some of the layers 0 to 3"),
        ({"use_sliding_window": True}, "sliding_window=4096 is not supported"),
        ({"num_experts": None}, "required key 'num_experts' is null"),
    ],
    "sdar-tiny-tied": [
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters=.* is not supported"),
        ({"num_experts": 8}, "num_experts=8 is not supported"),
        ({"block_size": -1}, "block_size=-1 must be"),
        ({"mask_token_id": None}, "required key 'mask_token_id' is null"),
    ],
    "fast-dllm-v2-tiny-tied": [
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types=.* must all be 'full_attention'"),
        ({"block_length": 16}, "block_length=16 and bd_size=32 must be equal"),
    ],
    "a2d-qwen3-tiny": [
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"head_dim": None}, "required key 'head_dim' is null"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types=.* must all be"),
        ({"num_experts": 8}, "num_experts=8 is not supported"),
        ({"right_shift_logits": 1}, "right_shift_logits=1 must be True or False"),
        ({"mask_token_id": 501}, "eos_id=501 must differ from mask_id"),
        ({"model_type": "a2d-llama", "mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"model_type": "a2d-llama", "rope_scaling": {"rope_type": "llama3"}}, "rope_type='llama3' is not"),
        ({"model_type": "a2d-llama"}, r"unmapped: model\.layers\.0\.self_attn\.k_norm"),
        ({"model_type": "a2d-qwen2"}, r"missing: model\.layers\.0\.self_attn\.q_proj\.bias"),
        (
            {"model_type": "a2d-qwen2", "head_dim": None, "num_attention_heads": 6},
            "hidden_size=64 must be a multiple of num_attention_heads=6 where no head_dim is given",
        ),
        ({"model_type": "a2d-gemma"}, "model_type='a2d-gemma' is not supported; supported: .*a2d-llama"),
    ],
    "nemotron-tiny-wide": [
        ({"rope_parameters": None}, "rope_parameters=None must be an object: rope_theta and rope_scaling"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' must be 'yarn' or 'default'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters=.* must have rope_theta"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not"),
        ({"rope_parameters": {**ROPE, "extra": 1}}, "unknown key extra=1"),
        ({"mask_token_id": -1}, "mask_token_id=-1 must be"),
        ({"mask_token_id": None}, "required key 'mask_token_id' is null"),
        ({"dlm_paradigm": "autoregressive"}, "dlm_paradigm='autoregressive' is not supported"),
        ({"mlp_bias": True, "sliding_window": 9}, r"(?s)mlp_bias=True is not.*sliding_window=9 is not"),
        ({"tie_word_embeddings": True, "hidden_act": "relu"}, r"(?s)hidden_act='relu'.*embeddings=True is"),
        ({"model_type": "nemotron_labs_diffusion_vlm"}, "diffusion_vlm' is not supported"),
    ],
    "illada-tiny": [
        (
            {"layer_norm_eps": 1e-5, "mlp_bias": True},
            r"(?s)mlp_bias=True is not.*layer_norm_eps=1e-05 is not",
        ),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"are scaled \(linear, factor 2\)"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, r"are scaled \(yarn, factor 4\)"),
        ({"head_dim": 24}, "head_dim=24 is not supported; supported: 12"),
        ({"tie_word_embeddings": False}, r"missing: lm_head\.weight"),
        ({"architectures": ["DreamModel"]}, r"model.*ILLaDAForCausalLM of illada|DreamModel of dream"),
        ({"model_type": "llada"}, "model_type='llada' of llada; ILLaDAForCausalLM of illada"),
    ],
    "stable-diffcoder-tiny": [
        (
            {"architectures": ["LlamaForCausalLM"], "auto_map": None},
            "model_type='llama' is not supported: it is",
        ),
        (
            {"architectures": None, "auto_map": 3},
            "is an autoregressive model, unless architectures or auto_map",
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "different models, Stable.* of stable-diff.*; LlamaForCausalLM",
        ),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps=1e-05 is not supported; supported: null"),
        ({"block_length": 8, "block_size": 4}, "block_size=4 and block_length=8 must be equal"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not supported; supported: 0"),
    ],
    "dream-reasoner-tiny": [
        (
            {"architectures": ["DreamModel"]},
            "DreamModel of dream; DreamForCausalLM, block_size, attention_bias",
        ),
        (
            {"architectures": ["DreamModel"], "auto_map": None},
            "DreamModel of dream; block_size, attention_bias",
        ),
        ({"attention_bias": True}, "attention_bias=True is not supported; supported: false"),
        ({"bd_size": 16}, "block_size=32 and bd_size=16 must be equal"),
        ({"mask_token_id": None}, "required key 'mask_token_id' is null"),
        (
            {"head_dim": None, "num_attention_heads": 5},
            "=48 must be a multiple of num_attention_heads=5 where",
        ),
    ],
    "rnd1-tiny": [
        (
            {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 32},
            "size=32 is not supported; supp.* 0",
        ),
        ({"num_experts_per_tok": 9}, "per_token=9 must be at most 8"),
        ({"mask_token_id": None}, "required key 'mask_token_id' is null"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ({"decoder_sparse_step": 4}, "must be some of the layers"),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "message"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_configs_that_do_not_fit_are_refused_by_name(tmp_path, name, changes, message):
    source = copied(name, tmp_path / "hf")
    rewrite(source / "config.json", **changes)
    refuses(message, dj.load, source)


def test_sdar_moe_has_experts_where_its_config_says(tmp_path):
    """Unless listed, every so many layers; what a dense SDAR's file lacks it names."""
    source = copied("sdar-tiny-tied", tmp_path / "hf")
    experts = dict(model_type="sdar_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    experts |= dict(norm_topk_prob=True, decoder_sparse_step=1)
    rewrite(source / "config.json", **experts, mlp_only_layers=[1])
    config = lambda: config_to_spec(read_config(source / "config.json"))
    found = config()
    assert (found.family, found.experts.dense, found.experts.renormalized) == ("sdar-moe", (1,), True)
    rewrite(source / "config.json", decoder_sparse_step=2, mlp_only_layers=None)
    assert config().experts.dense == (0, 2)
    refuses(r"missing: model\.layers\.1\.mlp\.experts\.3\.gate.* \[8, 48\]", dj.load, source)
    rewrite(source / "config.json", mlp_only_layers="1")
    refuses("mlp_only_layers='1' must be a list of layers", dj.load, source)


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("illada-tiny", {}, dict(mask_id=5, eos_id=2, tied=True, block_size=0)),
        ("stable-diffcoder-tiny", {}, dict(mask_id=5, eos_id=2, block_size=4, completes_blocks=False)),
        ("dream-reasoner-tiny", dict(vocab_size=151936), dict(mask_id=151669, eot_id=151645, block_size=32)),
        ("sdar-tiny-tied", dict(vocab_size=151936), dict(mask_id=151669, eot_id=151645, block_size=4)),
        (
            "fast-dllm-v2-tiny-tied",
            dict(vocab_size=152064),
            dict(mask_id=151665, eot_id=151645, block_size=32),
        ),
        ("llada2-tiny-dense2", {}, dict(mask_id=300, block_size=32, rope_width=8)),
    ],
)
def test_keys_that_published_configs_lack_have_their_values(tmp_path, name, sizes, expected):
    config = json.loads((MODELS / name / "config.json").read_text()) | sizes
    absent = ("mask_token_id", "block_size") if sizes else ("block_size",)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in absent}))
    spec = config_to_spec(read_config(tmp_path / "config.json"))
    assert {field: getattr(spec, field) for field in expected} == expected


FOREIGN = {  # keys of relatives, by family, which would describe another network
    "dream": {
        "block_size": 32, "attention_bias": False, "num_experts_per_tok": 2, "qk_norm": True,
        "mlp_bias": True, "layer_norm_eps": 1e-5, "moe_intermediate_size": 8, "final_logit_softcapping": 30.0,
    },
    "llada": {"attention_bias": True, "head_dim": 4, "hidden_act": "gelu", "bd_size": 8, "hidden_size": 16},
    "sdar": {"mlp_bias": True, "use_qk_norm": False, "shared_expert_intermediate_size": 8, "rotary_pct": 0.5},
    "rnd1": {"n_group": 2, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "num_shared_experts": 1},
    "nemotron": {"qkv_bias": True, "num_local_experts": 4, "attention_chunk_size": 64, "use_qk_norm": True},
}  # fmt: skip


@pytest.mark.parametrize("family", FOREIGN)
def test_keys_that_a_family_does_not_read_are_refused_unless_they_say_what_it_is(family):
    plain = spec_to_config(tiny_spec(family), "float32")
    spec = read_spec(plain)
    told = {"head_dim": spec.head_dim, "attention_bias": spec.qkv_bias, "qk_norm": spec.qk_norm}
    assert read_spec(plain | told | {"block_size": spec.block_size, "logits_scaling": 1}) == spec
    for key, value in FOREIGN[family].items():
        refuses(f"{key}|contradicts itself", read_spec, plain | {key: value})
        assert read_spec(plain | {key: None}) == spec


def test_a_relative_of_dream_is_read_as_what_it_is():
    """Without its class a block size tells DreamReasoner; with Dream's class it contradicts itself."""
    values = json.loads((MODELS / "dream-reasoner-tiny" / "config.json").read_text())
    bare = {key: value for key, value in values.items() if key not in ("architectures", "auto_map")}
    assert read_spec(bare) == read_spec(values)
    assert read_spec(values | {"block_size": None, "auto_map": None}).family == "dream-reasoner"
    older = values | {"rope_parameters": None, "rope_theta": 1e6, "head_dim": None}
    assert read_spec(older) == read_spec(values)
    seed = json.loads((MODELS / "stable-diffcoder-tiny" / "config.json").read_text())
    first = {"auto_map": {"AutoModel": "x--modeling_seed_diffcoder.SeedDiffcoderForCausalLM"}, "head_dim": 12}
    first |= {"architectures": None, "pretraining_tp": 1, "rope_scaling": None}
    assert read_spec(seed | first) == read_spec(seed)
    passed = config_to_spec(Config("here", {**seed, "architectures": ["Mine"], "auto_map": {}}), STABLE)
    assert passed == read_spec(seed)


def test_a_tied_head_may_be_stored_too_if_it_is_equal(tmp_path, caplog):
    """Both forms load, and the log says which was met."""
    caplog.set_level("INFO", "dllm_jax.checkpoint.hf")
    source = copied("illada-tiny", tmp_path / "hf")
    assert "the tied head is not stored" in caplog.text
    assert "rotary embedding stands in rope_theta" in caplog.text
    tensors = load_file(source / "model.safetensors")
    save_sharded(source, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    chex.assert_trees_all_equal(dj.load(source).params, dj.load(MODELS / "illada-tiny").params)
    assert "the tied head is stored too" in caplog.text
    save_sharded(source, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2})
    refuses(r"lm_head\.weight differs from the embedding", dj.load, source)


def test_a_mask_that_nobody_names_is_warned_of():
    with pytest.warns(MaskTokenWarning, match="the last id, 319, stands in for it"):
        assert dj.load(MODELS / "fast-dllm-v2-tiny-tied").spec.mask_id == 319


NAMING = {  # a tokenizer's files, each of which may name what it adds
    "added_tokens.json": {"<|mask|>": 300},
    "tokenizer_config.json": {
        "added_tokens_decoder": {"299": {"content": "x"}, "300": {"content": "<|mask|>"}}
    },
    "tokenizer.json": {"added_tokens": [{"id": 299, "content": "x"}, {"id": 300, "content": "<|mask|>"}]},
}


def a2d(folder: Path, **changes) -> dict:
    """The fields of the spec of an A2D model whose config.json is changed."""
    values = json.loads((MODELS / "a2d-qwen3-tiny" / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))
    return vars(config_to_spec(read_model_config(folder)))


@pytest.mark.filterwarnings("error::dllm_jax.checkpoint.config.MaskTokenWarning")
@pytest.mark.parametrize("file", NAMING)
def test_the_tokenizer_names_the_mask_of_a2d(tmp_path, file):
    for other in NAMING:
        (tmp_path / other).write_text(json.dumps(NAMING[other] if other == file else {}))
    assert a2d(tmp_path)["mask_id"] == 300
    assert a2d(tmp_path, mask_token_id=7)["mask_id"] == 7
    (tmp_path / "generation_config.json").write_text('{"mask_token_id": 8}')
    assert a2d(tmp_path)["mask_id"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"no mask_token_id, and no tokenizer beside it <\|mask\|>: the last id, 511, stands in"),
        ({"eos_token_id": [511, 510]}, "id, 509, stands in for it"),
        ({"vocab_size": 151936}, "id, 151669, stands in for it"),
        ({"vocab_size": 151936, "model_type": "a2d-qwen2"}, "id, 151665, stands in for it"),
    ],
)
def test_a_mask_of_a2d_that_no_file_names_is_warned_of(tmp_path, changes, message):
    with pytest.warns(MaskTokenWarning, match=message):
        a2d(tmp_path, **changes)


def test_keys_of_causal_attention_mean_nothing_to_a2d(tmp_path):
    plain = a2d(tmp_path)
    windows = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}
    mixed = ["full_attention", "sliding_attention"] * 2
    assert a2d(tmp_path, **windows, layer_types=mixed) == plain
    assert a2d(tmp_path, model_type="a2d-qwen2", head_dim="absent")["head_dim"] == 16
    assert a2d(tmp_path, model_type="a2d-llama", head_dim=24)["head_dim"] == 24
    assert a2d(tmp_path, right_shift_logits=True)["shifted"]
    assert a2d(tmp_path, block_size=32)["block_size"] == 32


def test_adapters_of_fused_matrices_stay_in_memory(tmp_path):
    model = lora.attach(dj.load(MODELS / "llada2-tiny-dense2"), lora.LoRA(rank=2), jax.random.key(0))
    with pytest.raises(ValueError, match=r"query_key_value.weight of llada2-moe holds several of q, v"):
        lora.save(model, tmp_path / "adapter")
    assert (
        weights(save_hf(lora.merge(model), tmp_path / "merged")).keys()
        == weights(MODELS / "llada2-tiny-dense2").keys()
    )


def test_both_spellings_of_full_layers_are_read():
    """Of published files by two keys, of today's transformers layer by layer, by numbers of one width."""
    values = json.loads((MODELS / "diffusion-gemma-tiny" / "config.json").read_text())
    older = {key: value for key, value in GEMMA.items() if key != "per_layer_config"}
    both = GEMMA | {"global_head_dim": 16, "num_global_key_value_heads": 1}
    spec = read_spec(values)
    assert (spec.gemma.full, spec.gemma.head_dim, spec.gemma.kv_heads, spec.gemma.rope_width) == (
        (3,),
        16,
        1,
        4,
    )
    assert (spec.ends, spec.mask_id, spec.has_mask_token) == ((1, 5), 101, False)
    padded = {"per_layer_config": {"03": GEMMA["per_layer_config"]["3"]}}
    for text in (both, older | padded, older | {"global_head_dim": 16, "num_global_key_value_heads": 1}):
        assert read_spec(values | {"text_config": text}) == spec
    other = dataclasses.replace(spec, gemma=dataclasses.replace(spec.gemma, window=5), eos_id=3)
    assert read_spec(spec_to_config(other, "float32", Config("here", values))) == other


def test_tensors_without_a_parameter_are_kept_and_asked_for_by_their_family_alone(tmp_path):
    source = copied("diffusion-gemma-tiny", tmp_path / "hf")
    tower = {name for name in weights(source) if "vision" in name}
    assert len(tower) == 16
    converted = convert(source, tmp_path / "int8", weights="int8")
    assert load_file(converted / "carried.safetensors").keys() == tower
    bare = save_hf(dj.load(source), tmp_path / "bare", like=MODELS / "llada-tiny")
    assert not tower & weights(bare).keys()
