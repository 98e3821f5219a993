"""`dj.load`: every leaf from its tensor, dtypes, rope, finite checks, damaged and foreign input."""

import json
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dllm_jax as dj
from convert.verify import verify
from dllm_jax import checkpoint
from dllm_jax.checkpoint import convert
from dllm_jax.checkpoint.dtypes import DtypeWarning
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.decoding.stops import decode_answers
from dllm_jax.nn import parameters
from dllm_jax.nn.parameters import abstract, layer_of
from tests import refuses
from tests.checkpoints import config, rewrite, save_sharded, spread, tensors, tiny, write_hf

FAMILIES = ("llada", "dream")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_and_dtypes_are_those_of_the_definition(tmp_path, family, tied, dtype):
    spec = tiny(family, tied=tied)
    path = write_hf(tmp_path / "hf", spec, dtype=dtype, shards=3)
    stacked, separate = (dj.load(path, separate_layers=apart) for apart in (False, True))
    assert stacked.spec == separate.spec == spec
    assert (stacked.layers_are_separate, separate.layers_are_separate) == (False, True)
    chex.assert_trees_all_equal_shapes_and_dtypes(stacked.params, abstract(spec, dtype))
    assert len(separate.params["layers"]) == spec.layers

    # One form is the other: the same numbers, back and forth.
    chex.assert_trees_all_equal(parameters.stacked(separate.params), stacked.params, strict=True)
    chex.assert_trees_all_equal(parameters.separate(stacked.params), separate.params, strict=True)


@pytest.mark.usefixtures("layers_of_the_platform")
def test_the_form_of_layers_is_that_of_the_platform(tmp_path):
    """Stacked layers are for TPUs; on this one, whichever it is, `load` and `abstract` agree."""
    path = write_hf(tmp_path / "hf", tiny())
    separate = jax.devices()[0].platform != "tpu"
    assert dj.load(path).layers_are_separate == dj.abstract(path).layers_are_separate == separate
    for apart in (False, True):
        model, shapes = dj.load(path, separate_layers=apart), dj.abstract(path, separate_layers=apart)
        chex.assert_trees_all_equal_shapes_and_dtypes(model.params, shapes.params)


def test_abstract_models_by_name_by_spec_and_by_checkpoint(tmp_path):
    named = dj.abstract("dream-7b", dtype="float32")
    assert named.spec == dj.presets.model_spec("dream-7b")
    assert named.dtype == jnp.float32
    assert dj.abstract(tiny()).dtype == jnp.bfloat16
    assert dj.abstract(write_hf(tmp_path / "hf", tiny(), dtype="float32")).dtype == jnp.float32
    refuses("llada-9b", dj.abstract, "llada-9b", error=FileNotFoundError)
    refuses("int8", dj.abstract, tiny(), dtype="int8")


def test_llada_tensors_land_where_the_model_reads_them(tmp_path):
    """With biases and grouped heads, which no recorded model of this family has (tests/test_goldens.py)."""
    spec, start = tiny(qkv_bias=True, kv_heads=2), "model.transformer.blocks.1."
    weights = {name.removeprefix(start): tensor for name, tensor in tensors(spec).items()}
    layer = layer_of(dj.load(write_hf(tmp_path / "hf", spec)).params, 1)
    for name in "qkv":
        np.testing.assert_array_equal(layer[name].reshape(32, -1), weights[f"{name}_proj.weight"].T)
        np.testing.assert_array_equal(layer[f"{name}_bias"].ravel(), weights[f"{name}_proj.bias"])
    for name, tensor in {"o": "attn_out", "gate": "ff_proj", "down": "ff_out"}.items():
        np.testing.assert_array_equal(
            layer[name].reshape(-1, weights[f"{tensor}.weight"].shape[0]), weights[f"{tensor}.weight"].T
        )


@pytest.mark.parametrize("converted", [False, True])
def test_rope_factor_multiplies_the_base_and_the_positions(tmp_path, converted):
    path = write_hf(tmp_path / "hf", tiny())
    path = convert(path, tmp_path / "jax", rope_factor=3.0) if converted else path
    spec, factor = dj.load(path, rope_factor=4.0).spec, 12 if converted else 4
    assert (spec.rope_base, spec.positions) == (5e5 * factor, 4096 * factor)
    assert dj.load(path, rope_factor=1e-5).spec.positions == 1
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        refuses("rope_factor", dj.load, path, rope_factor=factor)


def test_dtypes_on_request(tmp_path):
    path = write_hf(tmp_path / "hf", tiny())
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), dj.load(path).params)
    for source in (path, convert(path, tmp_path / "jax", dtype="f32")):
        chex.assert_trees_all_equal(dj.load(source, dtype=jnp.bfloat16).params, cast, strict=True)
    for name, dtype in {"bf16": jnp.bfloat16, "f32": jnp.float32}.items():
        assert dj.load(path, dtype=name).dtype == dj.abstract(path, dtype=name).dtype == dtype
    refused = {"fp16": "float16", "f16": "float16"} | {n: n for n in ("int8", "float64", "no such", "05,x")}
    for name, said in refused.items():
        refuses(f"{said}.*supported: float32, bfloat16", dj.load, path, dtype=name)
    refuses("dtype=float16 is not supported; .* Use bfloat16", dj.load, path, dtype="f16")


LN, UP = "model.transformer.ln_f.weight", "model.transformer.blocks.2.up_proj.weight"
REFUSED = {  # what is written, what is changed, the error, options that load it
    "integer_weights": ({}, {LN: np.ones(32, np.int32)}, r"ln_f\.weight: I32", None),
    "check_finite_nan": ({}, {LN: np.float32([*[1] * 31, np.nan])}, rf"values in .*{LN}", {}),
    "check_finite_inf": ({}, {UP: np.float32([[0] * 31 + [np.inf]] * 48)}, rf"values in .*{UP}", {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_are_refused_by_name(tmp_path, case):
    options, changes, message, loading = REFUSED[case]
    path = write_hf(tmp_path / "hf", tiny(), **options)
    save_sharded(path, load_file(path / "model.safetensors") | changes)
    refuses(message, dj.load, path, check_finite=case.startswith("check_finite"))
    if loading is not None:
        assert dj.load(path, **loading).dtype == loading.get("dtype", "float32")


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_mixed_and_half_checkpoints_load_in_the_dtype_of_their_matrices(tmp_path, half):
    path = write_hf(tmp_path / "hf", tiny(), dtype=half)
    weights = load_file(path / "model.safetensors") | {LN: np.full(32, 1 + 2**-20, np.float32)}
    save_sharded(path, weights)
    for call in (dj.load, dj.abstract, lambda path: dj.load(convert(path, tmp_path / "jax"))):
        with pytest.warns(DtypeWarning, match=f"stores {half}, float32; it is loaded in bfloat16") as raised:
            assert call(path).dtype == jnp.bfloat16
        assert len(raised) == 1
    exact = dj.load(path, dtype="float32").params
    np.testing.assert_array_equal(exact["norm"], weights[LN])
    np.testing.assert_array_equal(exact["embed"], weights[LN.replace("ln_f", "wte")].astype(np.float32))

    # Float16 alone, and matrices of a few in another dtype.
    save_sharded(path, weights | {LN: np.ones(32, weights[UP].dtype), UP: weights[UP].astype(np.float32)})
    with pytest.warns(DtypeWarning, match="loaded in bfloat16"):
        assert dj.load(path).dtype == jnp.bfloat16


def test_all_tensors_that_do_not_fit_are_listed(tmp_path):
    path = write_hf(tmp_path / "hf", tiny())
    weights = load_file(path / "model.safetensors")
    del weights["model.transformer.blocks.0.q_proj.weight"], weights["model.transformer.ln_f.weight"]
    weights["model.transformer.blocks.1.ff_out.weight"] = np.zeros((32, 40), np.float32)
    weights["model.transformer.extra.weight"] = np.zeros((2, 2), np.float32)
    save_sharded(path, weights)
    with pytest.raises(ValueError, match="4 tensors do not fit") as error:
        dj.load(path)
    for line in (
        "missing: model.transformer.blocks.0.q_proj.weight [32, 32]",
        "missing: model.transformer.ln_f.weight [32]",
        "misshaped: model.transformer.blocks.1.ff_out.weight is [32, 40], expected [32, 48]",
        "unmapped: model.transformer.extra.weight [2, 2]",
    ):
        assert line in str(error.value)


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path):
    path = write_hf(tmp_path / "hf", tiny("dream", tied=True))
    weights = load_file(path / "model.safetensors")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}  # ignored
    save_sharded(path, weights | buffer | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    dj.load(path)
    save_sharded(path, weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1})
    refuses(r"lm_head\.weight differs from the embedding", dj.load, path)


def test_truncated_and_missing_files_are_named(tmp_path):
    path = write_hf(tmp_path / "hf", tiny(), shards=2)
    file = path / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    for keep in (4, 200, -8):
        file.write_bytes(whole[:keep])
        refuses(r"model-00002-of-00002\.safetensors is not a complete safetens", dj.load, path)
    file.unlink()
    refuses(r"model-00002-of-00002\.safetensors", dj.load, path, error=FileNotFoundError)
    (path / "model.safetensors.index.json").unlink()
    shutil.copyfile(path / "model-00001-of-00002.safetensors", path / "more.safetensors")
    refuses(r"is in both model-00001-.* and more\.safetensors", dj.load, path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "no model."])
def test_prefixes_of_wrappers_are_removed(tmp_path, family, prefix):
    path = write_hf(tmp_path / "hf", tiny(family, layers=1))
    expected, weights = dj.load(path).params, load_file(path / "model.safetensors")
    other = lambda name: name.removeprefix("model.") if prefix == "no model." else prefix + name
    save_sharded(path, {other(name): tensor for name, tensor in weights.items()}, shards=2)
    (path / "model.safetensors").unlink()
    chex.assert_trees_all_equal(dj.load(path).params, expected, strict=True)

    # Two tensors of one name, of which none is chosen.
    name = next(name for name in weights if other(name) != name)
    (path / "model.safetensors.index.json").unlink()
    save_file({name: weights[name]}, path / "more.safetensors")
    refuses("are both .* but for prefixes", dj.load, path)


def test_the_index_decides_which_file_a_tensor_comes_from(tmp_path):
    path = write_hf(tmp_path / "hf", tiny(), shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    save_file({LN: np.full(32, 3, np.float32)}, path / "overlay.safetensors")
    index["weight_map"][LN] = "overlay.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (np.asarray(dj.load(path).params["norm"]) == 3).all()

    shutil.copyfile(path / "overlay.safetensors", path / "model.safetensors")
    with pytest.warns(UserWarning, match="which names .*: these are read, where transformers reads model"):
        dj.load(path)

    # A stale index next to a whole file says which of the two is asked for.
    (path / "overlay.safetensors").rename(path / "model.safetensors")
    asked = r"overlay\.safetensors does not exist, which .*index\.json asks for; model\.safetensors is there"
    refuses(asked, dj.load, path, error=FileNotFoundError)


LAYOUTS = {
    "one folder": lambda name: "weights/a.safetensors",
    "a folder per layer": lambda name: f"{'/'.join(name.split('.')[:-2][:4])}/layer.safetensors",
    "spelled otherwise": lambda name: "./extra//deep/b.safetensors" if name == LN else "rest.safetensors",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_names_shards_in_folders(tmp_path, layout):
    """As quantizers write them and transformers reads them: by load, convert, int8, meshes, verify."""
    path = write_hf(tmp_path / "hf", tiny(), tokenizer=True)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "other.jinja").write_text("{{ messages }}")
    whole = dj.load(path)
    places = spread(path, LAYOUTS[layout])
    # Files of other folders that are named alike are different files, and what no tensor names is not read.
    (path / "other").mkdir()
    save_file({LN: np.zeros(32, np.float32)}, path / "other" / Path(places[LN]).name)
    chex.assert_trees_all_equal(dj.load(path).params, whole.params, strict=True)
    mesh = jax.make_mesh((1,), ("tp",))
    chex.assert_trees_all_equal(dj.load(path, mesh=mesh).params, whole.params, strict=True)
    eight = checkpoint.convert(path, tmp_path / "int8", weights="int8")
    chex.assert_trees_all_equal(dj.load(eight).params, dj.load(path, weights="int8").params, strict=True)

    converted = checkpoint.convert(path, tmp_path / "converted")
    chex.assert_trees_all_equal(dj.load(converted, verify=True).params, whole.params, strict=True)
    read = json.loads((converted / "provenance.json").read_text())["files"]
    assert {Path(name).as_posix() for name in places.values()} < set(read)
    back = checkpoint.export(converted, tmp_path / "back")
    saved = dj.save_hf(whole, tmp_path / "saved", like=path)
    for folder in (back, saved):
        assert verify(path, folder).identical
        assert (folder / "additional_chat_templates" / "other.jinja").read_text() == "{{ messages }}"
        assert not (folder / "model.safetensors.index.json").exists()
    # It is a checkpoint: a new one may replace it. Folders that lead elsewhere are refused.
    dj.save_hf(whole, shutil.copytree(path, tmp_path / "old"), overwrite=True)
    folder = path / Path(places[LN]).parts[0]
    if folder.is_dir():
        folder.rename(tmp_path / "away")
        folder.symlink_to(tmp_path / "away")
        refuses("is a link to .*away.*outside of the checkpoint's directory", dj.load, path)


def test_messages_end(tmp_path):
    path = write_hf(tmp_path / "hf", tiny())
    save_sharded(path, {f"x.{i}": np.ones(1, np.float32) for i in range(130)})
    with pytest.raises(ValueError, match="and 123 more") as error:
        dj.load(path)
    assert len(str(error.value).splitlines()) <= 20


def test_directories_without_a_checkpoint(tmp_path):
    refuses(r"config\.json", dj.load, tmp_path, error=FileNotFoundError)
    (tmp_path / "config.json").write_text(json.dumps(config(tiny())))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuses(r"pytorch_model\.bin would need torch", dj.load, tmp_path, error=FileNotFoundError)
    refuses("no hub id", dj.load, tmp_path / "absent", error=FileNotFoundError)
    refuses("is a file", dj.load, tmp_path / "config.json", error=NotADirectoryError)


def test_hub_ids_are_fetched(tmp_path, monkeypatch):
    path, asked = write_hf(tmp_path / "hf", tiny()), []

    def snapshot_download(name, allow_patterns):
        asked.append((name, "*.safetensors" in allow_patterns, "*.bin" in allow_patterns))
        return str(path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert dj.load("someone/a-model").spec == tiny()
    assert asked == [("someone/a-model", True, False)]


def test_a_revision_is_of_hub_ids(tmp_path, monkeypatch):
    path, asked = write_hf(tmp_path / "hf", tiny()), []
    snapshot_download = lambda name, revision, allow_patterns: asked.append((name, revision)) or str(path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert dj.load("someone/a-model", revision="v1.5").spec == tiny()
    convert("someone/a-model", tmp_path / "jax", revision="main")
    assert asked == [("someone/a-model", "v1.5"), ("someone/a-model", "main")]
    refuses(r"revision='v1' is of hub ids alone: .* is on this machine", dj.load, path, revision="v1")
    refuses("revision=3 must be", dj.load, "someone/a-model", revision=3)
    refuses(r"dj.load\('a/b', revision='v1'\)", dj.load, "a/b@v1", error=FileNotFoundError)


def test_a_hub_that_cannot_be_reached_says_what_was_tried(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"someone/no-such-model.*no such directory.*hub failed"):
        dj.load("someone/no-such-model-for-tests")


def test_every_end_of_a_list_ends_a_response(tmp_path):
    """The first id is end-of-text, the second end-of-turn; the third stops `stop_at_eos` as they do."""
    path = write_hf(tmp_path / "hf", tiny(layers=1), tokenizer=True)
    run = lambda stop: dj.generate(dj.load(path), [3, 4, 5], length=6, block=2, stop_at_eos=stop)
    full = run(False)
    answer = np.asarray(full.tokens)[0, 3:].tolist()
    rewrite(path / "config.json", eos_token_id=[61, 62, answer[1]])
    stopped, end = run(True), answer.index(answer[1])
    assert int(stopped.stats.nfe[0]) < int(full.stats.nfe[0])
    assert np.asarray(stopped.tokens)[0, 3 : 4 + end].tolist() == answer[: end + 1]
    assert int(stopped.stats.answer_tokens[0]) == end
    (text,) = decode_answers(dj.load(path), read_tokenizer(path), stopped.tokens[:, 3:])
    assert text.split() == [f"t{token}" for token in answer[:end]]
