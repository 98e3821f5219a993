"""Hugging Face -> Orbax -> Hugging Face: bit-exact tensors, kept files, provenance, refusals."""

import dataclasses
import hashlib
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
import tyro
from safetensors.numpy import load_file, save_file

import dllm_jax as dj
from dllm_jax.checkpoint import convert, export, save_hf
from dllm_jax.checkpoint.dtypes import SUPPORTED
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from tests import refuses
from tests.checkpoints import save_sharded, tensors, tiny, weights, write_hf


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "shards"), [("float32", 1), ("bfloat16", 3)])
def test_round_trip_is_bit_exact(tmp_path, family, tied, dtype, shards):
    source = write_hf(tmp_path / "hf", tiny(family, tied=tied), dtype=dtype, shards=shards, tokenizer=True)
    bits, kind = np.random.default_rng(0), {"float32": np.uint32, "bfloat16": np.uint16}[dtype]
    drawn = lambda x: bits.integers(0, np.iinfo(kind).max, x.shape, dtype=kind).view(x.dtype)
    for file in source.glob("*.safetensors"):  # NaN, -0.0, subnormal
        save_file({name: drawn(x) for name, x in load_file(file).items()}, file, metadata={"format": "pt"})
    export(convert(source, tmp_path / "jax"), tmp_path / "back")
    assert weights(tmp_path / "back") == weights(source)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert sorted(file.name for file in (tmp_path / "back").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_changed_dtype_and_rope_are_written_back(tmp_path):
    source = write_hf(tmp_path / "hf", tiny("dream"))
    convert(source, tmp_path / "jax", dtype="bfloat16", rope_factor=5.0)
    export(tmp_path / "jax", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["rope_theta"], config["torch_dtype"]) == (5e6, "bfloat16")
    before, after = tensors(tiny("dream")), load_file(tmp_path / "back" / "model.safetensors")
    assert all(np.array_equal(before[name].astype(SUPPORTED[1]), after[name]) for name in before)
    changed = tiny("dream", rope_base=5e6, positions=655360)
    assert dj.load(tmp_path / "back").spec == dj.load(tmp_path / "jax").spec == changed


def test_provenance(tmp_path):
    source = write_hf(tmp_path / "hf", tiny(), shards=2, tokenizer=True)
    convert(source, tmp_path / "jax", dtype="bfloat16", rope_factor=2.0)
    history = json.loads((tmp_path / "jax" / "provenance.json").read_text())
    digest = lambda file: hashlib.sha256(file.read_bytes()).hexdigest()
    assert {name: f["sha256"] for name, f in history["files"].items()} == {
        file.name: digest(file) for file in source.iterdir()
    }
    assert history["dtype"] == {"stored": ["float32"], "written": "bfloat16"}
    assert history["rope_factor"] == 2.0
    assert history["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize("limit", [1, 5000, 20_000])
def test_export_shards_with_an_index(tmp_path, limit):
    source = write_hf(tmp_path / "hf", tiny())
    export(convert(source, tmp_path / "jax"), tmp_path / "back", shard_bytes=limit)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors(tiny()).values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "back" / file)
    for file in (tmp_path / "back").glob("*.safetensors"):
        sizes = [x.nbytes for x in load_file(file).values()]
        assert sum(sizes) <= limit or len(sizes) == 1
    assert weights(tmp_path / "back") == weights(source)
    assert dj.load(tmp_path / "back").spec == tiny()


def test_save_hf_of_a_model_in_memory(tmp_path):
    source = write_hf(tmp_path / "hf", tiny("dream", eot_id=9), tokenizer=True)
    model = dj.load(source, rope_factor=2.0)
    save_hf(dataclasses.replace(model, origin=None), tmp_path / "bare")
    save_hf(model, tmp_path / "kept", keep_from=source)
    assert weights(tmp_path / "bare") == weights(tmp_path / "kept") == weights(source)
    assert dj.load(tmp_path / "bare").spec == dj.load(tmp_path / "kept").spec == model.spec
    assert (tmp_path / "kept" / "tokenizer.json").is_file()


@pytest.mark.parametrize("converted", [False, True])
def test_save_hf_writes_the_tokenizer_of_the_directory_a_model_came_from(tmp_path, converted):
    source = write_hf(tmp_path / "hf", tiny(), tokenizer=True)
    model = dj.load(convert(source, tmp_path / "jax") if converted else source)
    trained = dataclasses.replace(model, params=jax.tree.map(jnp.zeros_like, model.params))
    save_hf(trained, tmp_path / "saved")
    before, after = (read_tokenizer(path) for path in (source, tmp_path / "saved"))
    text = before.decode([1, 2, 3])
    assert after.encode(text) == before.encode(text)
    assert after.mask_token_id == before.mask_token_id
    assert dj.load(tmp_path / "saved").spec == model.spec
    assert not dj.load(tmp_path / "saved").params["embed"].any()
    embedded = dj.embedded.path("tiny-llada")
    save_hf(dj.load(embedded), tmp_path / "embedded again")
    before, after = map(transformers.AutoTokenizer.from_pretrained, (embedded, tmp_path / "embedded again"))
    assert after.encode("a question") == before.encode("a question") != []
    # A program gives a model that came from nowhere, and one whose directory is gone has none to copy.
    save_hf(jax.jit(lambda model: model)(model), tmp_path / "bare")
    save_hf(dataclasses.replace(model, origin=tmp_path / "gone"), tmp_path / "gone too")
    for name in ("bare", "gone too"):
        assert not (tmp_path / name / "tokenizer.json").exists()


def test_heavy_and_foreign_files_stay_behind(tmp_path):
    source = write_hf(tmp_path / "hf", tiny())
    for name in ("pytorch_model.bin", ".hidden", "README.md", "modeling.py"):
        (source / name).write_text(name)
    (source / "folder").mkdir()
    convert(source, tmp_path / "jax")
    found = {file.name for file in (tmp_path / "jax").iterdir()}
    assert found == {"config.json", "README.md", "modeling.py", "spec.json", "provenance.json", "params"}


def test_an_existing_destination_needs_overwrite_and_stays_if_that_fails(tmp_path):
    first, second = write_hf(tmp_path / "a", tiny()), write_hf(tmp_path / "b", tiny("dream"))
    convert(first, tmp_path / "jax")
    refuses("--overwrite", convert, second, tmp_path / "jax", error=FileExistsError)
    bad = write_hf(tmp_path / "bad", tiny("dream"))
    save_sharded(bad, {name: x * np.nan for name, x in tensors(tiny("dream")).items()})
    for place in ("jax", "new"):
        with pytest.raises(ValueError, match=r"NaN or infinite values in .*model\.embed_tokens\.weight"):
            convert(bad, tmp_path / place, overwrite=True, check_finite=True)
    assert dj.load(tmp_path / "jax").spec == tiny()
    convert(second, tmp_path / "jax", overwrite=True)
    assert dj.load(tmp_path / "jax").spec == tiny("dream")
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b", "bad", "jax"}


def test_sources_and_destinations_that_are_none(tmp_path):
    source = write_hf(tmp_path / "x" / "hf", tiny())
    for destination in (".", "..", "inside"):
        with pytest.raises(ValueError, match="must not be the same or contain one another"):
            convert(source, source / destination, overwrite=True)
    assert dj.load(source).spec == tiny()
    refuses("no converted directory", export, source, tmp_path / "back")
    convert(source, tmp_path / "jax")
    refuses("converted already", convert, tmp_path / "jax", tmp_path / "again")


def run_script(name: str, *arguments) -> int:
    """Runs a script of convert/ with these command line arguments; returns its exit code."""
    main = importlib.import_module(f"convert.{name}").main
    try:
        tyro.cli(main, args=[str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code
    return 0


def test_scripts(tmp_path, capsys):
    source, converted, back = write_hf(tmp_path / "hf", tiny(), shards=2), tmp_path / "jax", tmp_path / "back"
    assert run_script("hf_to_jax", source, converted, "--dtype", "bf16", "--rope-factor", "2") == 0
    assert run_script("jax_to_hf", converted, back) == 0
    assert run_script("verify", converted, back, "--tokens", "4") == 0
    assert "identical" in capsys.readouterr().out
    assert run_script("verify", source, back, "--tokens", "0") == 1
    assert run_script("jax_to_hf", converted, back) == 2
    assert "error: " in capsys.readouterr().err
    assert dj.load(back).spec == tiny(rope_base=1e6, positions=8192)
