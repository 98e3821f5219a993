"""Hugging Face -> Orbax -> Hugging Face: bit-exact tensors, kept files, provenance, refusals."""

import dataclasses
import hashlib
import importlib
import json
import shutil
from pathlib import Path

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
from dllm_jax.checkpoint.exporting import LostFilesWarning
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.command_line import plain_errors
from tests import refuses
from tests.checkpoints import rewrite, save_sharded, tensors, tiny, weights, write_hf


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
    half = jax.tree.map(lambda array: array.astype(jnp.float16), model)
    refuses("holds float16, must be .* Cast all parameters", save_hf, half, tmp_path / "half", like=source)


@pytest.mark.parametrize("converted", [False, True])
def test_save_hf_writes_the_tokenizer_of_the_directory_a_model_came_from(tmp_path, converted):
    source = write_hf(tmp_path / "hf", tiny(), tokenizer=True)
    (source / "tekken.json").write_text("{}")  # which Mistral's own code reads
    model = dj.load(convert(source, tmp_path / "jax") if converted else source)
    trained = dataclasses.replace(model, params=jax.tree.map(jnp.zeros_like, model.params))
    save_hf(trained, tmp_path / "saved")
    assert (tmp_path / "saved/tekken.json").is_file()
    before, after = (read_tokenizer(path) for path in (source, tmp_path / "saved"))
    text = before.decode([1, 2, 3])
    assert after.encode(text) == before.encode(text)
    assert after.mask_token_id == before.mask_token_id
    assert dj.load(tmp_path / "saved").spec == model.spec
    assert not dj.load(tmp_path / "saved").params["embed"].any()
    embedded = dj.bundled.path("tiny-llada")
    save_hf(dj.load(embedded), tmp_path / "embedded again")
    before, after = map(transformers.AutoTokenizer.from_pretrained, (embedded, tmp_path / "embedded again"))
    assert after.encode("a question") == before.encode("a question") != []


LOST = {
    "jit": jax.jit(lambda model: model),
    "map": lambda model: jax.tree.map(lambda x: x, model),
    "put": jax.device_put,
    "gone": lambda model: dataclasses.replace(model, origin=Path("/nowhere")),
}


@pytest.mark.parametrize("way", LOST)
def test_a_lost_origin_is_warned_of_and_given(tmp_path, way):
    source = write_hf(tmp_path / "hf", tiny(), tokenizer=True)
    rewrite(source / "config.json", auto_map={"AutoModel": "x.Y"})
    model = LOST[way](dj.load(source))
    with pytest.warns(LostFilesWarning, match=r"without a tokenizer.*save_hf\(model, path, like=directory\)"):
        save_hf(model, tmp_path / "bare")
    assert {file.name for file in (tmp_path / "bare").iterdir()} == {*KEPT, "README.md"} - {*TOKENIZER}
    save_hf(model, tmp_path / "kept", like=source)  # warnings are errors
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {*KEPT, "README.md"}
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["auto_map"] == {"AutoModel": "x.Y"}


def test_a_directory_of_another_family_lends_its_tokenizer_alone(tmp_path):
    """Also one whose model type is not read, such as that of an autoregressive model."""
    source = write_hf(tmp_path / "hf", tiny("dream"), tokenizer=True)
    (source / "modeling_x.py").touch()
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    model = dj.load(write_hf(tmp_path / "llada", tiny()))
    for kind in ("Dream", "qwen3"):
        rewrite(source / "config.json", model_type=kind, auto_map={"AutoModel": "x.Y"})
        saved = save_hf(model, tmp_path / kind, like=source)
        assert {file.name for file in saved.iterdir()} == {*KEPT, "README.md"}
        assert json.loads((saved / "config.json").read_text())["architectures"] == ["LLaDAModelLM"]
        assert dj.load(saved).spec == model.spec


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
KEPT = ("config.json", "model.safetensors", *TOKENIZER)
ALONG = ("modeling_x.py", "chat_template.jinja", "generation_config.json", "LICENSE", "merges.txt")
STALE = ("training_log.json", "trainer_state.json", "eval_results.json", "log.jsonl", "quantize_config.json")


def test_the_card_of_a_saved_model_says_what_it_is_now(tmp_path):
    source = tmp_path / "models--org--base" / "snapshots" / "abc"
    write_hf(source, tiny(), tokenizer=True)
    for name in (*ALONG, *STALE):
        (source / name).write_text("{}")
    (source / "README.md").write_text(
        "---\nlicense: mit\nmetrics: [accuracy]\n---\n# Base\n91.3 % on GSM8K\n"
    )
    saved = save_hf(dj.load(source), tmp_path / "mine")
    assert {file.name for file in saved.iterdir()} == {*KEPT, *ALONG, "README.md"}
    text = (saved / "README.md").read_text()
    assert "license: mit\nbase_model: org/base" in text
    assert "A llada model of" in text
    assert "91.3" not in text
    assert "metrics" not in text
    assert str(tmp_path) not in text
    # A conversion and back is the same model: its card comes back as it came.
    back = export(convert(source, tmp_path / "jax"), tmp_path / "back")
    assert (back / "README.md").read_bytes() == (source / "README.md").read_bytes()


CUTS = [
    "llada",
    "dream",
    "sdar-tiny-tied",
    "llada-moe-tiny-dense0",
    "llada2-tiny-dense2",
    "fast-dllm-v2-tiny-tied",
]


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_vocabulary_is_one_that_the_authors_classes_take(tmp_path, name):
    """LLaDA refuses embedding_size < vocab_size; torch's embeddings a padding id beyond their rows."""
    source = tmp_path / "hf"
    if name in ("llada", "dream"):
        write_hf(source, tiny(name, mask_id=50, eos_id=51), tokenizer=True)
    else:
        shutil.copytree(Path(__file__).parent / "goldens" / "models" / name, source)
        rewrite(source / "config.json", mask_token_id=50, eos_token_id=51)
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    ids = {"pad_token_id": vocab - 1, "bos_token_id": vocab - 2}
    rewrite(source / "config.json", **ids, layer_types=["full_attention"] * 9)
    if name == "llada":  # whose own key is weight_tying
        rewrite(source / "config.json", tie_word_embeddings=True)
    (source / "generation_config.json").write_text(json.dumps(ids | {"eos_token_id": [51, 49]}))
    model = dj.load(source, vocab=60)
    saved = save_hf(model, tmp_path / "cut")
    written = json.loads((saved / "config.json").read_text())
    assert written["vocab_size"] == written.get("embedding_size", 60) == 60
    assert len(written["layer_types"]) == model.spec.layers
    assert written.get("tie_word_embeddings", model.spec.tied) == model.spec.tied
    generation = json.loads((saved / "generation_config.json").read_text())
    for key, value in (*written.items(), *generation.items()):
        assert not key.endswith("_token_id") or max([value] if isinstance(value, int) else value or [0]) < 60
    assert dj.load(saved).spec == model.spec


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
        with plain_errors():
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
