"""LLaDA-V checkpoints: read, converted and written back, tower included."""

import dataclasses
import json

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dllm_jax as dj
from convert.verify import verify
from dllm_jax.checkpoint import convert, export, save_hf
from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.families import config_to_spec, spec_to_config
from tests import llada_v, refuses, table
from tests.checkpoints import save_sharded
from tests.checkpoints import weights as stored

KINDS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", KINDS)
def test_there_and_back_every_bit_is_the_same(tmp_path, dtype):
    """Through a conversion, and through a model in memory, stacked and not."""
    source = llada_v.write(tmp_path / "source")
    (source / "config.json").write_text(json.dumps(llada_v.config(dtype)))
    weights = {name: array.astype(KINDS[dtype]) for name, array in llada_v.tensors().items()}
    save_sharded(source, weights)
    convert(source, tmp_path / "converted")
    export(tmp_path / "converted", tmp_path / "back")
    assert verify(source, tmp_path / "converted", tokens=0).identical
    save_hf(dj.load(source, separate_layers=False), tmp_path / "saved", keep_from=source)
    save_hf(dataclasses.replace(dj.load(tmp_path / "converted"), origin=None), tmp_path / "again")
    for name in ("back", "saved", "again"):
        assert stored(tmp_path / name) == stored(source)
    original = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == original
    assert dj.load(tmp_path / "again").spec == llada_v.SPEC == dj.load(tmp_path / "converted").spec


def test_fewer_ids_leave_the_others_as_they_are(tmp_path):
    source = llada_v.write(tmp_path / "source")
    whole, ids = dj.load(source), np.arange(9)[None]
    fewer = llada_v.VOCAB - 1  # the mask is the last one, which has to be there
    refuses(f"mask_id={fewer} must be below vocab={fewer}", dj.load, source, vocab=fewer)
    refuses(f"vocab=999 must be at most {llada_v.VOCAB}", dj.load, source, vocab=999)
    config = json.loads((source / "config.json").read_text()) | {"mask_token_id": 258}
    (source / "config.json").write_text(json.dumps(config))
    for path in (source, convert(source, tmp_path / "converted")):
        cut = dj.load(path, vocab=260 + 1)
        assert cut.params["embed"].shape == cut.params["head"].shape == (261, 32)
        np.testing.assert_array_equal(dj.forward(cut, ids), dj.forward(whole, ids)[..., :261])
    held = dj.load(source, weights="int8", vocab=261)
    assert held.params["head"].values.shape == (261, 32)
    assert held.params["head"].scale.shape == (261,)


def test_the_tower_stays_out_of_int8_and_of_abstract_models_nothing_is_missing(tmp_path):
    source = llada_v.write(tmp_path / "source")
    held = dj.load(source, weights="int8")
    assert held.weights == "int8"
    assert held.vision["layers"][0]["fc1"].dtype == jnp.float32
    described, loaded = dj.abstract(source), dj.load(source)
    chex.assert_trees_all_equal_shapes_and_dtypes(described.vision, loaded.vision)
    assert "vision  " in repr(loaded)


def test_the_published_config_is_that_of_the_published_tower():
    vision = dj.nn.spec.VisionSpec()
    assert (vision.patches, vision.head_dim) == (729, 72)
    published = {
        **llada_v.config(),
        **{"vocab_size": 126464, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "eos_token_id": 126081},
        **{"mm_hidden_size": 1152},
    }
    for key in ("vision_config", "mask_token_id", "eot_token_id"):
        del published[key]
    spec = config_to_spec(Config("here", published))
    assert (spec.mask_id, spec.eos_id, spec.eot_id, spec.vision) == (126336, 126081, 126348, vision)
    assert spec_to_config(spec, "float32", Config("here", published)) == published
    made = spec_to_config(spec, "bfloat16")
    assert "vision_config" not in made
    assert made["image_grid_pinpoints"][7] == [768, 768]


@pytest.mark.parametrize(("changes", "message"), table("configs")["of_llada_v"])
def test_other_configurations_are_refused_by_key(changes, message):
    refuses(message, config_to_spec, Config("here", llada_v.config() | changes))


def test_a_tower_that_is_not_all_there_is_refused(tmp_path):
    source = llada_v.write(tmp_path / "source")
    weights = llada_v.tensors()
    del weights["model.image_newline"]
    save_sharded(source, weights)
    refuses(r"missing: model.image_newline \[32\]", dj.load, source)
    with pytest.raises(ValueError, match=r"model\.vision must go together"):
        save_hf(
            dj.load(dj.bundled.path("tiny-llada")).replace_spec(vision=llada_v.VISION), tmp_path / "saved"
        )
