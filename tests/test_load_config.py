"""config.json -> ModelSpec: the published models, defaults, and everything refused by name."""

import dataclasses

import pytest

from dllm_jax.checkpoint.config import Config, read_config
from dllm_jax.checkpoint.families import config_to_spec, spec_to_config
from tests import refuses, table
from tests.checkpoints import config, tiny


def spec_of(values: dict):
    return config_to_spec(Config("config.json", values))


REFUSED = table("configs")
LLADA_8B = config(
    tiny(
        layers=32, width=4096, heads=32, kv_heads=32, head=128, hidden=12288, vocab=126464, mask_id=126336,
        eos_id=126081,
    )
)  # fmt: skip
DREAM_7B = config(
    tiny(
        "dream", layers=28, width=3584, heads=28, kv_heads=4, head=128, hidden=18944, vocab=152064,
        mask_id=151666, eos_id=151643,
    )
)  # fmt: skip


def test_published_models():
    spec = spec_of(LLADA_8B)
    assert (spec.family, spec.hidden, spec.kv_heads, spec.vocab) == ("llada", 12288, 32, 126464)
    assert (spec.rope_base, spec.norm_eps, spec.eot_id) == (5e5, 1e-5, 126348)
    assert (spec.shifted, spec.rope_in_f32, spec.pad_rows_attend, spec.qkv_bias) == (False, True, True, False)
    spec = spec_of(DREAM_7B)
    assert (spec.family, spec.hidden, spec.kv_heads, spec.head) == ("dream", 18944, 4, 128)
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


@pytest.mark.parametrize("model_type", ["llama", "gemma", "illada", "LLaDA", None, 3, []])
def test_other_architectures(model_type):
    with pytest.raises(ValueError, match=r"model_type=.* is not supported; supported: .llada. or .Dream."):
        spec_of(config(tiny()) | {"model_type": model_type})


RELATIVES = [
    [{"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.*'gptq'. is not"],
    [{"num_experts": 64}, "qk_layernorm is missing"],  # read as LLaDA-MoE
]


@pytest.mark.parametrize(("changes", "message"), REFUSED["impossible"] + RELATIVES)
def test_values_that_make_no_model(changes, message):
    refuses(message, spec_of, config(tiny()) | changes)


def test_missing_and_unsupported_keys_are_all_named():
    for key in ("d_model", "n_layers", "embedding_size", "rope_theta", "mask_token_id", "weight_tying"):
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
