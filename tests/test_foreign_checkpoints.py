"""Checkpoints that came from somewhere: nothing of them is executed, nothing outside of them is read."""

import json
import os
import shutil
from pathlib import Path

import pytest

import dllm_jax as dj
from dllm_jax import bundled
from dllm_jax.checkpoint import convert
from dllm_jax.checkpoint.exporting import card
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.decoding.chat import chat_ids
from tests import refuses
from tests.checkpoints import rewrite, tiny, write_hf

EVIL = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import PreTrainedTokenizerFast
class EvilTok(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def source(tmp_path) -> Path:
    return write_hf(tmp_path / "hf", tiny(), shards=2, tokenizer=True)


def moved_out(file: Path) -> Path:
    """Moves a file out of its directory and leaves a link to it."""
    place = file.parent.parent / f"outside-{file.name}"
    file.rename(place)
    file.symlink_to(place)
    return place


@pytest.mark.parametrize("model_type", ["llada", "llama"])
@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["tok_evil.EvilTok"] * 2}, ["tok_evil.EvilTok"] * 2])
def test_no_code_of_a_tokenizer_runs(source, tmp_path, monkeypatch, model_type, auto_map):
    """transformers would ask on standard input whether to run it."""
    (source / "tok_evil.py").write_text(EVIL.format(mark=str(tmp_path / "ran")))
    rewrite(source / "tokenizer_config.json", tokenizer_class="EvilTok", auto_map=auto_map)
    rewrite(source / "config.json", model_type=model_type)
    monkeypatch.setattr("builtins.input", lambda *arguments: "y")
    refuses(r"tokenizer_config\.json: tokenizer_class='EvilTok' is code of", read_tokenizer, source)
    assert not (tmp_path / "ran").exists()


def test_a_copy_of_a_known_class_is_read_by_that_class(tmp_path):
    """Dream names a class of its own, a copy of Qwen2's, and has no tokenizer.json."""
    words = {word: i for i, word in enumerate(["h", "i", "Ġ", "hi"])}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    settings = {"tokenizer_class": "DreamTokenizer", "unk_token": None, "eos_token": "<eos>"}
    settings |= {"auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer("hi hi")["input_ids"] == [3, 2, 3]
    assert tokenizer.eos_token == "<eos>"


def test_a_chat_template_runs_in_a_sandbox(source):
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    rewrite(source / "tokenizer_config.json", chat_template=escape)
    refuses("unsafe", chat_ids, read_tokenizer(source), [{"role": "user", "content": "t1"}], error=Exception)


@pytest.mark.parametrize("key", ["vocab_file", "tokenizer_file", "init_inputs"])
def test_settings_of_a_tokenizer_name_no_files(source, key):
    rewrite(source / "tokenizer_config.json", **{key: "/etc/passwd"})
    refuses(rf"tokenizer_config\.json: {key}='/etc/passwd'.*of the usual names", read_tokenizer, source)


MARKED = ("config.json", "tokenizer.json", "tokenizer_config.json", "README.md")


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llada-v"])
def test_byte_order_marks_are_no_text(name, tmp_path):
    """As editors on Windows write them; the chat template is a file of its own."""
    plain, marked = (shutil.copytree(bundled.path(name), tmp_path / kind) for kind in ("plain", "marked"))
    template = json.loads((plain / "tokenizer_config.json").read_text()).get(
        "chat_template", "{{ messages }}"
    )
    for folder in (plain, marked):
        (folder / "chat_template.jinja").write_text(template)
        rewrite(folder / "tokenizer_config.json", chat_template=None)
        text = (folder / "README.md").read_text()
        (folder / "README.md").write_text(text if text[:3] == "---" else f"---\nlicense: mit\n---\n{text}")
    files = [*MARKED, "chat_template.jinja", *(p.name for p in plain.glob("*processor_config.json"))]
    for file in {*files}:
        (marked / file).write_bytes(b"\xef\xbb\xbf" + (plain / file).read_bytes())
    one, other = dj.load(plain), dj.load(marked)
    assert one.spec == other.spec
    mine, theirs = read_tokenizer(plain), read_tokenizer(marked)
    assert (mine.chat_template, theirs.name_or_path) == (theirs.chat_template, str(marked))
    messages = [{"role": "user", "content": "T=211;T="}]
    assert chat_ids(mine, messages) == chat_ids(theirs, messages)
    assert len(theirs) == len(mine)
    assert "license" in card(other, "x", marked)
    assert card(other, "x", marked) == card(one, "x", plain).replace("plain", "marked")
    if one.vision is not None:
        assert repr(dj.vision.Processor.load(marked)).replace("marked", "plain") == repr(
            dj.vision.Processor.load(plain)
        )
    converted = convert(marked, tmp_path / "converted")
    assert dj.load(converted).spec == one.spec
    assert chat_ids(read_tokenizer(converted), messages) == chat_ids(mine, messages)


NAMES = {"up": "../x.safetensors", "root": "/x.safetensors", "inner": "a/../../x.safetensors"}
NAMES |= {"null": "x\0y", "surrogate": "\udcff"}


@pytest.mark.parametrize("kind", NAMES)
def test_an_index_names_files_of_the_directory_only(source, tmp_path, kind):
    name = NAMES[kind]
    shutil.copyfile(source / "model-00001-of-00002.safetensors", tmp_path / "x.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    files = {"model-00001-of-00002.safetensors": str(tmp_path / "x.safetensors") if name[0] == "/" else name}
    index["weight_map"] = {k: files.get(v, v) for k, v in index["weight_map"].items()}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(r"must be a relative path|is no name of a file", dj.load, source)


SHARD = "model-00002-of-00002.safetensors"
READ = [(name, dj.load) for name in ("config.json", "model.safetensors.index.json", SHARD)]
READ += [("tokenizer.json", read_tokenizer)]


@pytest.mark.parametrize(("name", "read"), [*READ, ("secret.txt", None)])
def test_links_out_of_the_directory_are_neither_followed_nor_copied(source, tmp_path, name, read):
    (source / "secret.txt").write_text("secret")
    place = moved_out(source / name)
    copied = lambda source: convert(source, tmp_path / "jax")
    for use in (read or copied, copied):
        refuses(f"{name} is a link to {place}, outside of the", use, source)
    assert not (tmp_path / "jax").exists()


@pytest.mark.parametrize(("name", "read"), READ)
def test_pipes_are_not_waited_for(source, name, read):
    (source / name).unlink()
    os.mkfifo(source / name)
    refuses(f"{name} is no regular file", read, source)


def test_units_of_a_converted_directory_are_its_own(source, tmp_path):
    converted = convert(source, tmp_path / "jax")
    (converted / "params" / "layer_001").rename(tmp_path / "layer")
    (converted / "params" / "layer_001").symlink_to(tmp_path / "layer")
    refuses("layer_001 is a link to", dj.load, converted)


def test_the_cache_of_the_hub_is_links(source, tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        file.rename(repository / "blobs" / f"{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert dj.load(snapshot).spec == tiny()
    read_tokenizer(snapshot)
    assert (convert(snapshot, tmp_path / "jax") / "tokenizer.json").is_file()
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to("../../refs")
    (repository / "refs").write_text("{}")
    refuses(r"tokenizer\.json is a link to", read_tokenizer, snapshot)


def test_a_directory_may_be_a_link_itself(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    (source / "copy.txt").symlink_to("config.json")  # a link that stays inside
    assert dj.load(tmp_path / "link").spec == tiny()
    assert (convert(tmp_path / "link", tmp_path / "jax") / "copy.txt").is_file()


def test_bundled_tokenizers():
    assert all(read_tokenizer(bundled.path(name)).chat_template for name in bundled.NAMES)
