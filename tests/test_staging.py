"""Directories that appear whole, and hashes of what was written: flipped bits, lost and added files."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

import dllm_jax as dj
from dllm_jax.checkpoint import convert
from dllm_jax.checkpoint.files import check_integrity
from dllm_jax.checkpoint.staging import atomic_directory
from tests import refuses
from tests.checkpoints import tiny, write_hf
from tests.test_convert import run_script


def write(destination: Path, text: str, overwrite: bool = False):
    """What killed runs leave behind: tests/test_convert_crash.py."""
    with atomic_directory(destination, overwrite) as partial:
        (partial / "deep").mkdir()
        for name in ("config.json", "model.safetensors", "deep/file"):
            (partial / name).write_text(text)


@pytest.mark.parametrize("files", [["config.json", "thesis.txt"], ["spec.json"], ["x.safetensors"], []])
def test_directories_that_are_no_checkpoint_are_not_overwritten(tmp_path, files):
    (tmp_path / "t").mkdir()
    for file in files:
        (tmp_path / "t" / file).write_text("mine")
    with pytest.raises(FileExistsError, match="t exists and is no checkpoint directory; it is not overwr"):
        write(tmp_path / "t", "new", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == sorted(files)


def test_two_runs_do_not_write_one_directory(tmp_path):
    with atomic_directory(tmp_path / "t"):
        refuses("t is being written by another process", write, tmp_path / "t", "2", error=FileExistsError)
        write(tmp_path / "other", "3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "t"]
    assert not list((tmp_path / "t").iterdir())


def test_a_failed_second_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    write(tmp_path / "t", "old")
    rename = Path.rename

    def failing(self: Path, target: Path):
        if "partial" in self.name:
            raise OSError(5, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    refuses("Input/output error", write, tmp_path / "t", "new", overwrite=True, error=OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert (tmp_path / "t" / "config.json").read_text() == "old"


def test_everything_is_on_the_disk_before_it_is_renamed(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, Path.rename
    name = lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append(name(descriptor)), fsync(descriptor)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (events.append(f"rename {b.name}"), rename(a, b))[1])
    write(tmp_path / "t", "1")
    before, after = events[: events.index("rename t")], events[events.index("rename t") + 1 :]
    assert {"config.json", "deep", "file"} <= set(before)
    assert before[-1].startswith(".t.")
    assert after == [tmp_path.name]


def test_destinations_in_a_circle(tmp_path):
    for name, other in ("ab", "ba"):
        (tmp_path / name).symlink_to(tmp_path / other)
    refuses("a is a link in a circle", write, tmp_path / "a", "1")


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("originals")
    for seed in range(2):
        hf = write_hf(place / f"hf{seed}", tiny(layers=2), seed=seed)
        convert(hf, place / f"jax{seed}")
    return place


@pytest.fixture
def converted(originals, tmp_path) -> Path:
    return shutil.copytree(originals / "jax0", tmp_path / "jax")


def flip(file: Path, seed: int = 0):
    content, drawn = bytearray(file.read_bytes()), random.Random(seed)
    content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
    file.write_bytes(content)


def test_a_flipped_bit_in_any_file_is_found(converted, originals, capsys, unannotated):
    assert dj.load(converted, verify=True).spec == tiny(layers=2)
    assert run_script("verify", converted) == 0
    assert "as written" in capsys.readouterr().out
    files = [file for file in (converted / "params").rglob("*") if file.is_file()]
    for number, file in enumerate((*files, converted / "spec.json")):
        name = file.relative_to(converted)
        flip(file, number)
        refuses(f"1 files are not as written\n  damaged: {name}$", check_integrity, converted)
        if number == 0:
            assert run_script("verify", converted) == 2
            assert f"damaged: {name}" in capsys.readouterr().err
        shutil.copyfile(originals / "jax0" / name, file)
    refuses("verify='yes' must be True or False", dj.load, converted, verify="yes")


def test_lost_and_added_files(converted, originals):
    (converted / "params" / ".DS_Store").write_text("")
    (converted / "README.md").write_text("a file of the user's")
    check_integrity(converted)
    lost = next(file for file in (converted / "params" / "norm").rglob("d/*"))
    shutil.move(lost, converted.parent / "elsewhere")
    (converted / "params" / "head" / "more").write_text("")
    name = lost.relative_to(converted).as_posix()
    refuses(f"missing: {name}\n  not of this conversion: params/head/more$", check_integrity, converted)
    lost.symlink_to(converted.parent / "elsewhere")
    refuses("outside of the checkpoint's directory", check_integrity, converted)

    # A whole unit of the same shape and name, but of another conversion: only hashes tell.
    lost.unlink()
    shutil.move(converted.parent / "elsewhere", lost)
    shutil.copytree(originals / "jax1/params/norm", converted / "params/norm", dirs_exist_ok=True)
    dj.load(converted)
    refuses("params/norm", dj.load, converted, verify=True)


@pytest.mark.parametrize("kept", [None, 3, [], {"spec.json": 3}, {"../hf0/config.json": {}}])
def test_directories_whose_hashes_are_not_known(converted, kept):
    """Damaged, or naming files elsewhere, which are not looked at."""
    history = json.loads((converted / "provenance.json").read_text())
    (converted / "provenance.json").write_text(json.dumps(history | {"written": kept}))
    message = "are not as written" if isinstance(kept, dict) else "holds no hashes of what was written"
    refuses(message, dj.load, converted, verify=True)
    assert dj.load(converted).spec == tiny(layers=2)
