"""spec.json and config.json: one schema with ranges, and exactly the tensors that it implies."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import dllm_jax as dj
from dllm_jax.checkpoint import convert
from tests.checkpoints import save_sharded, tiny, write_hf

# Field of ModelSpec, key of LLaDA's config.json, a value outside, and what is said of it.
OUTSIDE = [
    ("rope_base", "rope_theta", -1, "must be"),
    ("rope_base", "rope_theta", 0, "must be"),
    ("rope_base", "rope_theta", float("nan"), "must be"),
    ("rope_base", "rope_theta", 1e308, r"must be a number in \[1, 1000000000000\]"),
    ("rope_base", "rope_theta", 10**400, "must be"),
    ("norm_eps", "rms_norm_eps", -1, "must be"),
    ("norm_eps", "rms_norm_eps", 1e300, r"must be a number in \[1e-12, 1\]"),
    ("norm_eps", "rms_norm_eps", 1e-300, r"must be a number in \[1e-12, 1\]"),
    ("positions", "max_sequence_length", 0, "=0 must be"),
    ("positions", "max_sequence_length", 2.5, "must be"),
    ("mask_id", "mask_token_id", None, "null|must be a whole number"),
    ("mask_id", "mask_token_id", 2.5, "must be"),
    ("mask_id", "mask_token_id", 61, "differ from mask_id"),
    ("vocab", "embedding_size", 2**40, "int32 holds"),
    ("layers", "n_layers", 10**9, "1000000000"),
    ("layers", "n_layers", 10**400, "1000000000"),
    ("layers", "n_layers", 1, "layer_001, layer_002|unmapped"),
    ("layers", "n_layers", 4, "lacks layer_003|missing"),
    ("hidden", "mlp_hidden_size", 10**9, "describes|misshaped"),
    ("tied", "weight_tying", True, "holds head|differs from the embedding"),
    ("tied", "weight_tying", "false", "must be"),
    ("qkv_bias", "include_qkv_bias", True, "describes|missing"),
    ("qkv_bias", "include_qkv_bias", "false", "must be"),
]


pytestmark = pytest.mark.usefixtures("unannotated")


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("originals")
    convert(write_hf(place / "hf", tiny()), place / "jax")
    return place


@pytest.mark.parametrize(("field", "key", "value", "rule"), OUTSIDE)
def test_values_outside_are_refused_by_both_files(originals, tmp_path, field, key, value, rule):
    for kind, file in (("hf", "config.json"), ("jax", "spec.json")):
        path = shutil.copytree(originals / kind, tmp_path / kind) / file
        content = json.loads(path.read_text())
        (content if kind == "hf" else content["spec"])[key if kind == "hf" else field] = value
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=rule) as error:
            dj.load(tmp_path / kind)
        assert str(tmp_path / kind) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"format": True}, "format=True is not supported"),
        ({"format": [1]}, r"format=\[1\] is not supported"),
        ({"dtype": None}, "dtype=None is not supported; supported: float32, bfloat16"),
        ({"dtype": "f4"}, "dtype='f4' is not supported"),
        ({"dtype": "bfloat16"}, "layer_000.* describes|embed.* describes"),
        ({"spec": 3}, "spec=3 must be an object"),
        ({"spec": None}, "spec=None must be an object"),
        ({"more": 1}, "unknown keys more"),
    ],
)
def test_the_rest_of_a_spec_file(originals, tmp_path, changes, rule):
    path = shutil.copytree(originals / "jax", tmp_path / "jax") / "spec.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=rule) as error:
        dj.load(tmp_path / "jax")
    assert str(tmp_path / "jax") in str(error.value)


@pytest.mark.parametrize("changes", [{"shifted": "false"}, {"family": "gpt"}, {"heads": 3}, {"head": 7}])
def test_fields_that_config_files_do_not_spell(originals, tmp_path, changes):
    path = shutil.copytree(originals / "jax", tmp_path / "jax") / "spec.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"spec": content["spec"] | changes}))
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=re.escape(f"{path}: {name}={value!r}")):
        dj.load(tmp_path / "jax")


def test_whole_numbers_are_numbers(originals, tmp_path):
    path = shutil.copytree(originals / "jax", tmp_path / "jax") / "spec.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"spec": content["spec"] | {"rope_base": 10**12}}))
    model = dj.load(tmp_path / "jax")
    assert type(model.spec.rope_base) is float
    assert np.isfinite(dj.forward(model, np.array([[1, 2, 3]]))).all()


def test_directories_of_earlier_releases_know_no_limit_on_positions(originals, tmp_path):
    path = shutil.copytree(originals / "jax", tmp_path / "jax") / "spec.json"
    content = json.loads(path.read_text())
    assert content["spec"].pop("positions") == 4096
    path.write_text(json.dumps(content))
    assert dj.load(tmp_path / "jax").spec == tiny(positions=None)


def test_units_that_changed_places(originals, tmp_path):
    params = shutil.copytree(originals / "jax", tmp_path / "jax") / "params"
    (params / "layer_000").rename(params / "x")
    (params / "layer_001").rename(params / "layer_000")
    (params / "x").rename(params / "layer_001")
    with pytest.raises(ValueError, match="layer_000 holds the unit layer_001"):
        dj.load(tmp_path / "jax")


def test_hidden_files_beside_units_do_not_matter(originals, tmp_path):
    shutil.copytree(originals / "jax", tmp_path / "jax")
    (tmp_path / "jax" / "params" / ".DS_Store").write_text("")
    dj.load(tmp_path / "jax")
    (tmp_path / "jax" / "params" / "layer_003").mkdir()
    with pytest.raises(ValueError, match=r"holds layer_003, which spec\.json does not describe"):
        dj.load(tmp_path / "jax")


@pytest.mark.parametrize("content", ["null", "3", "[]", "{}", '{"tree_metadata": null}', "{", "[" * 100_000])
def test_metadata_of_a_unit_that_is_broken(originals, tmp_path, content):
    unit = shutil.copytree(originals / "jax", tmp_path / "jax") / "params" / "norm"
    (unit / "manifest.ocdbt").write_text(content)
    with pytest.raises(ValueError, match=f"{unit} (cannot be read|holds)"):
        dj.load(tmp_path / "jax")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "spec.json"])
def test_json_that_is_nested_too_deeply(originals, tmp_path, file):
    kind = "jax" if file == "spec.json" else "hf"
    shutil.copytree(originals / kind, tmp_path / kind)
    (tmp_path / kind / file).write_text('{"a":' + "[" * 100_000)
    with pytest.raises(ValueError, match=f"{file} is not valid JSON: nested too deeply"):
        dj.load(tmp_path / kind)


def test_json_that_is_too_large_is_not_read(originals, tmp_path):
    shutil.copytree(originals / "hf", tmp_path / "hf")
    os.truncate(tmp_path / "hf" / "config.json", 2**40)  # takes no room
    with pytest.raises(ValueError, match=r"config\.json has 1099511627776 bytes; .* at most"):
        dj.load(tmp_path / "hf")


def test_a_factor_that_leaves_the_range(originals):
    for factor in (1e20, 1e-20):
        message = f"rope_factor={factor} is too large or too small: rope_base="
        with pytest.raises(ValueError, match=re.escape(message)):
            dj.load(originals / "hf", rope_factor=factor)


def test_a_tied_checkpoint_without_a_head_of_its_own_still_loads(tmp_path):
    path = write_hf(tmp_path / "hf", tiny(tied=True))
    weights = load_file(path / "model.safetensors")
    save_sharded(path, weights | {"model.transformer.ff_out.weight": weights["model.transformer.wte.weight"]})
    assert dj.load(convert(path, tmp_path / "jax")).spec == tiny(tied=True)
