"""config.json -> ModelSpec: the published models, defaults, and everything refused by name."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.checkpoint import convert
from dllm_jax.checkpoint.config import BlockSizeWarning, Config, read_config, read_model_config
from dllm_jax.checkpoint.families import FAMILIES, config_to_spec, spec_to_config, spec_to_generation
from dllm_jax.checkpoint.loading import scale_rope
from dllm_jax.checkpoint.refused import REFUSED as REFUSED_MODELS
from dllm_jax.nn.rope import rope_of
from dllm_jax.nn.spec import RopeScaling
from tests import DOCS, llada_v, refuses, table
from tests.checkpoints import config, tiny


def spec_of(values: dict):
    return config_to_spec(Config("config.json", values))


REFUSED = table("configs")
LLADA_8B = config(
    tiny(
        layers=32, width=4096, heads=32, kv_heads=32, head_dim=128, mlp_width=12288, vocab=126464,
        mask_id=126336, eos_id=126081,
    )
)  # fmt: skip
DREAM_7B = config(
    tiny(
        "dream", layers=28, width=3584, heads=28, kv_heads=4, head_dim=128, mlp_width=18944, vocab=152064,
        mask_id=151666, eos_id=151643,
    )
)  # fmt: skip


def test_published_models():
    spec = spec_of(LLADA_8B)
    assert (spec.family, spec.mlp_width, spec.kv_heads, spec.vocab) == ("llada", 12288, 32, 126464)
    assert (spec.rope_base, spec.norm_eps, spec.eot_id) == (5e5, 1e-5, 126348)
    assert (spec.shifted, spec.rope_in_f32, spec.pad_rows_attend, spec.qkv_bias) == (False, True, True, False)
    illada = {key: v for key, v in LLADA_8B.items() if key != "mask_token_id"} | {"eos_token_id": 2}
    assert spec_of(illada | dict.fromkeys(("vocab_size", "embedding_size"), 155136)).mask_id == 5
    spec = spec_of(DREAM_7B)
    assert (spec.family, spec.mlp_width, spec.kv_heads, spec.head_dim) == ("dream", 18944, 4, 128)
    assert (spec.rope_base, spec.norm_eps, spec.eot_id) == (1e6, 1e-6, 151645)
    assert (spec.shifted, spec.rope_in_f32, spec.pad_rows_attend, spec.qkv_bias) == (True, False, False, True)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("tied", [False, True])
def test_spec_and_back(family, tied):
    spec = tiny(family, tied=tied, eot_id=7, kv_heads=2, rope_base=1.5e6)
    assert spec_of(spec_to_config(spec, "float32")) == spec
    other = dataclasses.replace(spec, rope_base=3e6)
    original = Config(
        "config.json", config(spec) | {"torch_dtype": "float32", "auto_map": {"AutoModel": "x"}}
    )
    written = spec_to_config(other, "bfloat16", original)
    assert spec_of(written) == other
    assert (written["auto_map"], written["torch_dtype"]) == ({"AutoModel": "x"}, "bfloat16")
    assert spec_to_config(spec, "float32", original) == original.values


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_limit_on_positions(family):
    key = {"llada": "max_sequence_length", "dream": "max_position_embeddings"}[family]
    values = config(tiny(family)) | {key: 512}
    spec = spec_of(values)
    assert (spec.positions, spec_to_config(spec, "float32")[key]) == (512, 512)
    assert spec_of({name: values[name] for name in values if name != key}).positions is None
    # A directory of an earlier release knows no limit, and gives back the one that its config.json names.
    unknown, original = dataclasses.replace(spec, positions=None), Config("config.json", values)
    assert spec_to_config(unknown, "float32", original)[key] == 512
    refuses(f"config.json: {key}='512' must be a whole number", spec_of, values | {key: "512"})


def test_a_spec_its_family_cannot_express():
    refuses("shifted: True / False", spec_to_config, tiny(shifted=True), "float32")


def test_nulls_that_stand_for_something():
    values = config(tiny()) | {"n_kv_heads": None, "embedding_size": None}
    assert (spec_of(values).kv_heads, spec_of(values).vocab) == (4, 64)
    assert spec_of(values | {"embedding_size": 128}).vocab == 128
    assert spec_of(config(tiny()) | {"eot_token_id": None}).eot_id is None
    assert spec_of(config(tiny()) | {"rope_full_precision": False}).rope_in_f32 is False


@pytest.mark.parametrize(("family", "key", "value", "supported"), REFUSED["unsupported"])
def test_values_outside_what_is_supported(family, key, value, supported):
    changes = {key: value, "use_sliding_window": key == "sliding_window"}
    refuses(f"{key}=.* is not supported; supported: {supported}", spec_of, config(tiny(family)) | changes)


def test_a_window_that_is_switched_off_does_not_matter():
    for changes in (
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None, "use_sliding_window": True, "head_dim": 8},
    ):
        spec_of(config(tiny("dream")) | changes)


@pytest.mark.parametrize("model_type", ["gemma", "LLaDA", None, 3, []])
def test_other_architectures(model_type):
    with pytest.raises(ValueError, match=r"model_type=.* is not supported; supported: .llada. or .Dream."):
        spec_of(config(tiny()) | {"model_type": model_type})


@pytest.mark.parametrize("model", REFUSED_MODELS, ids=lambda model: model.name)
def test_published_models_that_are_not_read_say_why_in_one_line(model, tmp_path, monkeypatch):
    """By the name of a repository or directory before anything is fetched, and by class or model type."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: pytest.fail("fetched"))
    sentence = re.escape(f"{model.name} is not supported: {model.reason}. {model.instead}.")
    for pattern in model.repositories:
        name = pattern.replace("*", "-8B").upper()
        refuses(f"org/{re.escape(name)}: {sentence}$", dj.load, f"org/{name}")
        refuses(sentence, convert, tmp_path / name, tmp_path / "to")
    for key, values in (("architectures", model.classes), ("model_type", model.model_types)):
        for value in values:
            one = value.replace("*", "ForCausalLM")
            changes = {key: [one] if key == "architectures" else one}
            refuses(f"config.json: {sentence}$", spec_of, config(tiny()) | changes)


RELATIVES = [
    [{"num_experts": 64}, "qk_layernorm is missing"],  # read as LLaDA-MoE
]


@pytest.mark.parametrize(("changes", "message"), REFUSED["impossible"] + RELATIVES)
def test_values_that_make_no_model(changes, message):
    refuses(message, spec_of, config(tiny()) | changes)


def test_missing_and_unsupported_keys_are_all_named():
    for key in ("d_model", "n_layers", "embedding_size", "rope_theta", "mask_token_id", "eos_token_id"):
        values = config(tiny()) | {"vocab_size": None}
        del values[key]
        refuses(f"config.json: required key '{key}' is missing", spec_of, values)
    values = config(tiny()) | {"alibi": True, "scale_logits": True}
    del values["rope"]
    refuses(r"(?s)rope is missing.*alibi=True.*scale_logits=True", spec_of, values)


def test_files_that_are_no_config(tmp_path):
    file = tmp_path / "config.json"
    refuses(r"config\.json", read_config, file, error=FileNotFoundError)
    for text, message in (("{", "not valid JSON"), ("[]", "expected an object")):
        file.write_text(text)
        refuses(message, read_config, file)


# -- what today's tools write, in every family ------------------------------------------------------------

GOLDEN = Path(__file__).parent / "goldens" / "models"
NAMES = ("llada-moe-tiny-dense0", "llada2-tiny-dense2", "sdar-tiny-tied", "fast-dllm-v2-tiny-tied")
NAMES += "a2d-qwen3-tiny", "rnd1-tiny", "nemotron-tiny-wide", "illada-tiny", "stable-diffcoder-tiny"
NAMES += "dream-reasoner-tiny", "diffusion-gemma-tiny"
EVERY = {"llada": config(tiny()), "dream": config(tiny("dream")), "llada-v": llada_v.config()}
for found in (json.loads((GOLDEN / name / "config.json").read_text()) for name in NAMES):
    found = {"torch_dtype" if key == "dtype" else key: value for key, value in found.items()}
    mask = found.get("mask_token_id", 5 if found.get("vocab_size") == 192 else 319)
    found |= {} if "text_config" in found else {"mask_token_id": mask}
    EVERY[spec_of(found).family] = found
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
EVERY |= {name: EVERY["a2d-qwen3"] | {"model_type": name} for name in ("a2d-qwen2", "a2d-llama")}
EVERY["sdar-moe"] = EVERY["sdar"] | {"model_type": "sdar_moe"} | MOE
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def test_every_family_is_among_them():
    assert EVERY.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", sorted(EVERY.keys() - {"nemotron", "illada", "diffusion-gemma"}))
def test_rope_in_both_spellings(name):
    plain = spec_of(EVERY[name])
    base = plain.rope_base
    partial = {"partial_rotary_factor": 0.5} if name == "llada2-moe" else {}
    newer = {"rope_type": "default", "rope_theta": base} | partial
    absent = {k: v for k, v in EVERY[name].items() if not k.startswith(("rope_", "partial_"))}
    older = absent | {k: EVERY[name][k] for k in ("rope_scaling", *partial) if k in EVERY[name]}
    older |= {"rope_theta": base}
    for values in (
        absent | {"rope_parameters": newer},
        absent | {"rope_parameters": {"full_attention": newer}},
        older | {"rope_parameters": newer, "rope_theta": 3.0, "rope_scaling": YARN, **partial},  # it wins
        older | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": False},
        older | {"rope_scaling": {"type": "default"}, "sliding_window": False, "layer_types": False},
    ):
        assert spec_of(values) == plain
        written = spec_to_config(plain, "float32", Config("here", values))
        if name == "dream-reasoner":  # its files have either spelling, and keep it
            assert {k: written.get(k) for k in values if k != "torch_dtype"} == {
                k: v for k, v in values.items() if k != "torch_dtype"
            }
            continue
        # What is written is the spelling of the published files.
        assert (written.get("rope_scaling") or {"type": "default"}, written["rope_theta"]) == (
            {"type": "default"}, base
        )  # fmt: skip
        assert "rope_parameters" not in written
        assert spec_of(written) == plain

    scaled = spec_of(older | {"rope_scaling": YARN})
    assert scaled.rope_scaling == RopeScaling("yarn", 4.0, 1024)
    yarn = {"type": "yarn"} | {key: value for key, value in YARN.items() if key != "rope_type"}
    assert scaled == spec_of(older | {"rope_scaling": yarn})
    assert scaled == spec_of(absent | {"rope_parameters": YARN | newer | {"rope_type": "yarn"}})
    assert scaled == spec_of(older | {"rope_parameters": {"rope_theta": base}, "rope_scaling": yarn})
    assert spec_of(spec_to_config(scaled, "float32")) == scaled
    assert spec_of(spec_to_config(scaled, "float32", Config("here", EVERY[name]))) == scaled


def test_the_page_names_the_families_that_read_rope_otherwise():
    def scales(name: str) -> bool:
        values = {key: value for key, value in EVERY[name].items() if not key.startswith("rope_")}
        values |= {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
        try:
            return getattr(spec_of(values).rope_scaling, "kind", None) == "linear"
        except ValueError:
            return False

    row = re.search(r"^\| `rope_parameters`.*", (DOCS / "how-to/loading.md").read_text(), re.MULTILINE)
    others = {name for name in EVERY.keys() - {"diffusion-gemma"} if not scales(name)}
    assert others == EVERY.keys() & set(re.findall(r"\w+", row[0].lower()))


def test_rope_where_queries_grow():
    """Nemotron's files: rope_parameters alone, and the growth of queries in it whatever the type."""
    original = Config("here", EVERY["nemotron"])
    spec = spec_of(original.values)
    yarn = RopeScaling("yarn", 0.25, 64, mscale=1.0, mscale_all_dim=1.0, query_beta=0.1)
    assert (spec.rope_scaling, spec.rope_base) == (yarn, 1e9)
    growth = RopeScaling("linear", 1.0, 64, query_beta=0.1)
    for scaling in (yarn, growth, None, dataclasses.replace(yarn, query_beta=0.0, truncate=False)):
        other = dataclasses.replace(spec, rope_scaling=scaling, rope_base=1e5)
        written = spec_to_config(other, "float32", original)
        assert spec_of(written) == other
        kind = "yarn" if scaling and scaling.factor < 1 else "default"
        assert written["rope_parameters"]["rope_type"] == kind
        assert written["rope_parameters"]["llama_4_scaling_beta"] == (scaling.query_beta if scaling else 0)
    values = original.values | {"rope_theta": 3.0, "rope_scaling": YARN, "partial_rotary_factor": 0.5}
    assert spec_of(values) == spec  # at the top they mean nothing
    beta = {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}
    refuses("unknown key llama_4_scaling_beta", spec_of, EVERY["sdar"] | {"rope_parameters": beta})


def test_values_of_nemotrons_class_stand_in_for_absent_keys():
    shape = {"num_hidden_layers": 2, "rope_parameters": EVERY["nemotron"]["rope_parameters"]}
    spec = spec_of({"model_type": "nemotron_labs_diffusion", "mask_token_id": 100, **shape})
    assert (spec.width, spec.heads, spec.kv_heads, spec.head_dim, spec.vocab) == (4096, 32, 8, 128, 131072)
    assert (spec.eos_id, spec.block_size, spec.mlp_width, spec.norm_eps) == (2, 32, 14336, 1e-5)
    assert spec_of(EVERY["nemotron"] | {"num_key_value_heads": None}).kv_heads == 6


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic' is not one of default, linear, yarn"),
        ({"type": "longrope", "short_factor": [1.0]}, "rope_type='longrope' is not one of"),
        ({"rope_type": "llama3"}, "rope_type='llama3' is not one of"),
        ({"rope_type": ["yarn"]}, r"rope_type=\['yarn'\] is not one of"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "type and rope_type differ"),
        ({"rope_type": "default", "factor": 2.0}, "factor=2.0 has no meaning with rope_type 'default'"),
        ({"factor": 2.0}, "factor=2.0 has no meaning with rope_type 'default'"),
        ({"rope_type": "linear"}, "rope_type 'linear' needs a factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_slow": 1}, "beta_slow=1 has no meaning"),
        ({"rope_type": "linear", "factor": -1}, "factor=-1 must be a number"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}, "beta_fast=0.5 must be at least beta_slow"),
        ({"rope_type": "yarn", "factor": 2.0, "short_factor": [1.0]}, r"unknown key short_factor=\[1.0\]"),
        ("yarn", "it must be null or an object"),
        ({"full_attention": 3}, "it must be null or an object"),
    ],
)
def test_other_scalings_are_refused_by_name(scaling, message):
    for name, key in (("llada", "rope_scaling"), ("sdar", "rope_parameters")):
        refuses(f"{key}=.* is not supported: .*{message}", spec_of, EVERY[name] | {key: scaling})


def test_half_heads_are_said_in_either_place():
    whole = {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 600000}}
    assert spec_of(EVERY["llada2-moe"] | whole | {"rotary_dim": None}).rope_width is None
    refuses(
        "partial_rotary_factor=0.5 is not supported", spec_of, EVERY["sdar"] | {"partial_rotary_factor": 0.5}
    )


def yarn_by_formula(d: int, theta: float, s: float, original: int, fast=32, slow=1, whole=True) -> np.ndarray:
    """YaRN's frequencies as the paper has them, dimension by dimension in float64."""
    c = lambda r: d * math.log(original / (2 * math.pi * r)) / (2 * math.log(theta))
    low, high = (math.floor(c(fast)), math.ceil(c(slow))) if whole else (c(fast), c(slow))
    low, high = max(low, 0), min(high, d - 1)
    high += 0.001 * (low == high)
    result = []
    for j in range(d // 2):
        f, ramp = theta ** (-2 * j / d), min(max((j - low) / (high - low), 0), 1)
        result.append(f / s * ramp + f * (1 - ramp))
    return np.array(result)


LN = math.log(40)


@pytest.mark.parametrize(
    ("base", "options", "formula", "attention"),
    [
        (1e6, dict(factor=16.0, mscale=1.0, mscale_all_dim=1.0), dict(), 1.0),
        (1e9, dict(factor=16.0), dict(), 0.1 * math.log(16) + 1),
        (1e6, dict(factor=0.25), dict(), 1.0),
        (1e4, dict(factor=40.0, mscale=0.7, mscale_all_dim=1.0), dict(), (0.07 * LN + 1) / (0.1 * LN + 1)),
        (1e4, dict(factor=8.0, attention_factor=1.5, beta_fast=64, beta_slow=2), dict(fast=64, slow=2), 1.5),
        (1e4, dict(factor=8.0, truncate=False, mscale=0.5), dict(whole=False), 0.1 * math.log(8) + 1),
    ],
)  # fmt: skip
def test_yarn_in_numbers(base, options, formula, attention):
    scaling = RopeScaling("yarn", original=16384, **options)
    rope = rope_of(tiny(head_dim=128, rope_base=base, rope_scaling=scaling), 7)
    angle = np.arange(8)[:, None] * yarn_by_formula(128, base, options["factor"], 16384, **formula)
    np.testing.assert_allclose(rope.cos, attention * np.cos(angle), atol=2e-6)
    np.testing.assert_allclose(rope.sin, attention * np.sin(angle), atol=2e-6)


def test_linear_scaling_in_numbers_and_the_published_ramp():
    rope = rope_of(tiny(rope_base=1e4, rope_scaling=RopeScaling("linear", 4.0)), 40)
    angle = np.arange(41)[:, None] / 4 * 1e4 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(rope.sin, np.sin(angle), atol=2e-6)
    for base, low, high in ((1e6, 20, 37), (1e9, 13, 25)):
        plain, scaled = (yarn_by_formula(128, base, s, 16384) for s in (1.0, 16.0))
        changed = np.flatnonzero(~np.isclose(plain, scaled))
        divided = np.flatnonzero(np.isclose(plain / 16, scaled))
        assert (changed[0], divided[0]) == (low + 1, high)


def test_contexts_that_were_stretched():
    values = EVERY["dream"] | {"rope_scaling": YARN}
    assert spec_of(values | {"max_position_embeddings": 1024}).positions == 4096
    assert spec_of(values | {"max_position_embeddings": 8192}).positions == 8192
    without = values | {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 512}
    assert (spec_of(without).positions, spec_of(without).rope_scaling) == (
        2048,
        RopeScaling("yarn", 4.0, 512),
    )
    del without["max_position_embeddings"]
    refuses("needs original_max_position_embeddings, or max_position_embeddings", spec_of, without)
    assert scale_rope(spec_of(values), 1.0) == spec_of(values)
    refuses(r"rope_factor=2.0 .* scaled already \(yarn, factor 4\)", scale_rope, spec_of(values), 2.0)
    refuses("rope_base=1.0 must be above 1", spec_of, values | {"rope_theta": 1})


FLAT = sorted(EVERY.keys() - {"diffusion-gemma"})  # whose decoder's keys stand at the top


@pytest.mark.parametrize("name", FLAT)
def test_ids_in_lists_and_in_generation_config(name):
    original = EVERY[name] | {"eos_token_id": [7, 8, 9]}
    original.pop("eot_token_id", None)
    spec = spec_of(original)
    assert (spec.eos_id, spec.eot_id, spec.ends) == (7, 8, (7, 8, 9))
    assert spec_to_config(spec, str(original.get("torch_dtype")), Config("here", original)) == original
    assert spec_of(spec_to_config(spec, "float32")) == spec
    absent = {key: value for key, value in original.items() if key not in ("eos_token_id", "mask_token_id")}
    listed = {"eos_token_id": [7, 8, 9], "mask_token_id": spec.mask_id}
    assert config_to_spec(Config("here", absent, listed)) == spec
    assert config_to_spec(Config("here", absent, listed | {"mask_token_id": 0})).mask_id == 0
    # Both files: config.json says which is end-of-text, and all of them end a response.
    both = Config("here", original | {"eos_token_id": 9, "eot_token_id": 10}, listed)
    assert (config_to_spec(both).ends, config_to_spec(both).eot_id) == ((9, 7, 8), 10)
    assert spec_of(original | {"eos_token_id": [7]}).ends == (7,)
    assert spec_of(original | {"eot_token_id": None}).eot_id is None

    # A changed spec comes back from both files.
    other = dataclasses.replace(spec, eos_id=4, stop_ids=None)
    source = Config("here", absent, listed)
    written = Config("here", spec_to_config(other, "float32", source), spec_to_generation(other, source))
    assert config_to_spec(written) == other


@pytest.mark.parametrize("name", FLAT)
def test_defaults_of_the_classes_and_false_for_null(name):
    plain = spec_of(EVERY[name])
    tie = "weight_tying" if name == "llada" else "tie_word_embeddings"
    absent = {k: v for k, v in EVERY[name].items() if k not in ("hidden_act", tie, "torch_dtype")}
    absent |= {"rope_scaling": False, "sliding_window": False, "quantization_config": False}
    absent |= {"num_experts": False} if plain.experts is None else {}
    tied = name in ("llada", "illada")
    assert spec_of(absent | {"dtype": "float32"}) == dataclasses.replace(plain, tied=tied)
    assert (
        spec_to_config(plain, "bfloat16", Config("here", EVERY[name] | {"dtype": "float32"}))["dtype"]
        == "bfloat16"
    )


PUBLISHED = {"llada-8b": 126081, "dream-7b": 151643, "llada2-mini": 156892, "fast-dllm-v2-7b": 151645}


@pytest.mark.parametrize("name", PUBLISHED)
def test_end_of_text_of_published_vocabularies(name):
    values = json.loads((Path("configs/models") / f"{name}.json").read_text())
    del values["eos_token_id"]
    assert spec_of(values).eos_id == PUBLISHED[name]


@pytest.mark.parametrize(("name", "default"), [("sdar", 4), ("sdar-moe", 4), ("fast-dllm-v2", 32)])
def test_block_sizes(name, default):
    absent = {key: value for key, value in EVERY[name].items() if key not in ("block_size", "bd_size")}
    with pytest.warns(BlockSizeWarning, match=f"block_size={default}, the default of .*replace_spec"):
        assert spec_of(absent).block_size == default
    for key in ("block_size", "block_length", "bd_size"):
        assert spec_of(absent | {key: 64}).block_size == 64
        refuses(f"{key}=-1 must be|_size=-1 must be", spec_of, absent | {key: -1})
    refuses(
        "block_size=4 and block_length=8 must be equal",
        spec_of,
        absent | {"block_size": 4, "block_length": 8},
    )


def test_generation_config_is_read_beside_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(EVERY["dream"]))
    assert read_model_config(tmp_path).generation == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [61, 5]}')
    assert config_to_spec(read_model_config(tmp_path)).ends == (61, 5)
    (tmp_path / "generation_config.json").write_text("[")
    refuses("generation_config.json is not valid JSON", read_model_config, tmp_path)


@pytest.mark.parametrize("older", [{"type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 2}])
def test_a_scaling_that_did_not_change_stays_as_it_came(older):
    values = EVERY["dream"] | {"rope_scaling": older, "torch_dtype": "float32"}
    assert spec_to_config(spec_of(values), "float32", Config("here", values)) == values
