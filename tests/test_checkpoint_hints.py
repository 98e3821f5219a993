"""What is passed by mistake is named for what it is, and errors of other libraries name our files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dllm_jax as dj
from dllm_jax import bundled
from dllm_jax.checkpoint import convert
from dllm_jax.checkpoint.files import check_integrity
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from tests import refuses
from tests.checkpoints import rewrite, tiny, write_hf
from tests.test_convert import run_script

pytestmark = pytest.mark.usefixtures("unannotated")
ROOT = Path(__file__).parent.parent


def test_names_of_bundled_checkpoints():
    for name in bundled.NAMES:
        refuses(rf"of this name is dj\.bundled\.path\('{name}'\)", dj.load, name, error=FileNotFoundError)


def test_no_path_at_all_and_homes_of_nobody():
    for path in ("", None, 3, []):
        refuses(r"path=.* must be a checkpoint's directory or a hub id", dj.load, path)
    refuses("~nobody-of-this-name", dj.load, "~nobody-of-this-name/x/y", error=FileNotFoundError)


def test_bad_input_at_the_command_line(tmp_path, capsys):
    """An empty variable of a shell is not the current directory; sizes of files are positive."""
    converted = convert(write_hf(tmp_path / "hf", tiny()), tmp_path / "jax")
    cases = [(script, "", (), "path='' must be") for script in ("hf_to_jax", "jax_to_hf", "verify")]
    sizes = ("inf", "nan", "-1", "0")
    cases += [("jax_to_hf", converted, ("--shard-gb", gb), "shard_gb=") for gb in sizes]
    for script, source, options, message in cases:
        assert run_script(script, source, tmp_path / "out", *options) == 2
        assert f"error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_broken_tokenizers_are_named(tmp_path, file):
    path = write_hf(tmp_path / "hf", tiny(), tokenizer=True)
    for content in ("", "{", "[]", '{"a":' + "[" * 100_000, "\xff"):
        (path / file).write_bytes(content.encode("latin-1"))
        refuses(f"{file} (is not valid JSON|holds a list)", read_tokenizer, path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4932307584\n"
MISTAKEN = {"Git LFS pointer": POINTER, "HTML page": "\n<!DOCTYPE html><html>", "GGUF file": "GGUF\0\0\0\3"}
MISTAKEN |= {"the hub's answer": "Entry not found"}
READ = {"config.json": dj.load, "model.safetensors": dj.load, "merges.txt": read_tokenizer}
READ |= {"tokenizer.json": read_tokenizer, "tokenizer.model": read_tokenizer}


@pytest.mark.parametrize("kind", MISTAKEN)
def test_files_that_are_something_else_are_named(tmp_path, kind):
    path = write_hf(tmp_path / "hf", tiny(), tokenizer=True)
    for name, read in READ.items():
        kept = (path / name).read_bytes() if (path / name).exists() else None
        (path / name).write_text(MISTAKEN[kind])
        refuses(rf"{name} is (an? )?{kind}", read, path)
        (path / name).unlink() if kept is None else (path / name).write_bytes(kept)


def test_directories_that_are_something_else_are_named(tmp_path):
    adapter, model = tmp_path / "adapter", write_hf(tmp_path / "hf", tiny(layers=1))
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    refuses(r"config\.json does not exist; .* LoRA adapter: .*lora\.load", dj.load, adapter, error=OSError)
    shutil.copyfile(model / "model.safetensors", model / "adapter_model.safetensors")
    with pytest.warns(UserWarning, match=r"is a LoRA adapter, which load does not apply"):
        dj.load(model)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.q4.gguf").touch()
    refuses(r"model\.q4\.gguf: GGUF is not read", dj.load, tmp_path / "gguf", error=OSError)
    refuses(r"provenance.json is missing: .* is a Hugging Face checkpoint", check_integrity, model)


def test_tokenizers_that_transformers_cannot_read_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        read_tokenizer(write_hf(tmp_path / "without", tiny()))
    path = write_hf(tmp_path / "hf", tiny(), tokenizer=True)
    for model in (None, 3, {}, {"type": "BPE"}, {"type": "WordLevel", "vocab": 3}):
        rewrite(path / "tokenizer.json", model=model)
        refuses(f"{path}: its tokenizer cannot be read by transformers", read_tokenizer, path)
    (path / "tokenizer.json").unlink()
    for name in ("Qwen2Tokenizer", "DreamTokenizer", "LlamaTokenizerFast", "GemmaTokenizer"):
        rewrite(path / "tokenizer_config.json", tokenizer_class=name)
        refuses(f"{path} lacks the vocabulary of its .*Tokenizer", read_tokenizer, path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read(tmp_path):
    path = write_hf(tmp_path / "hf", tiny())
    (path / "model.safetensors").chmod(0)
    refuses(r"model\.safetensors", dj.load, path, error=PermissionError)


FULL = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # to write more fails, as it does on a full disk
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "reason"), [("hf_to_jax", "cannot be written"), ("jax_to_hf", "too large")]
)
def test_a_full_disk_is_one_line(tmp_path, script, reason):
    source = write_hf(tmp_path / "hf", tiny(layers=1))
    source = convert(source, tmp_path / "jax") if script == "jax_to_hf" else source
    arguments = [ROOT / "convert" / f"{script}.py", source, tmp_path / "place" / "out"]
    done = subprocess.run(
        [sys.executable, "-B", "-c", FULL, *map(str, arguments)],  # -B: bytecode would be cut off, too
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2
    assert "ERROR:absl" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert str(tmp_path / "place") in last
    assert reason in last
    assert list((tmp_path / "place").iterdir()) == []
