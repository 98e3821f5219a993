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
from tests.checkpoints import tiny, write_hf
from tests.test_convert import run_script

UUID = "0123456789ab4def8123456789abcdef"


def write(destination: Path, text: str, overwrite: bool = False):
    with atomic_directory(destination, overwrite) as partial:
        (partial / "config.json").write_text(text)
        (partial / "model.safetensors").write_text(text)
        (partial / "deep").mkdir()
        (partial / "deep" / "file").write_text(text)


def test_a_users_own_files_of_similar_names_stay(tmp_path):
    mine = [tmp_path / ".t.partial-x", tmp_path / ".t.replaced-x", tmp_path / f".t.partial-{UUID}x"]
    for directory in mine:
        directory.mkdir()
        (directory / "thesis.txt").write_text("")
    (tmp_path / ".t.partial-y").write_text("a file")
    (tmp_path / f".t.partial-{UUID}").symlink_to(mine[0])
    (tmp_path / f".t.replaced-{UUID}").write_text("a file")
    write(tmp_path / "t", "1")
    write(tmp_path / "t", "2", overwrite=True)
    assert all((directory / "thesis.txt").is_file() for directory in mine)
    assert len(list(tmp_path.iterdir())) == 7
    assert (tmp_path / "t" / "config.json").read_text() == "2"


@pytest.mark.parametrize("files", [["config.json", "thesis.txt"], ["spec.json"], ["x.safetensors"], []])
def test_what_is_no_checkpoint_is_not_overwritten(tmp_path, files):
    (tmp_path / "t").mkdir()
    for file in files:
        (tmp_path / "t" / file).write_text("mine")
    with pytest.raises(
        FileExistsError, match="t exists and is no checkpoint directory; it is not overwritten"
    ):
        write(tmp_path / "t", "new", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == sorted(files)


def test_leftovers_of_killed_runs_go(tmp_path):
    (tmp_path / f".t.partial-{UUID}").mkdir()
    write(tmp_path / "t", "1")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_failed_second_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    write(tmp_path / "t", "old")
    rename = Path.rename

    def failing(self: Path, target: Path):
        if ".partial-" in self.name:
            raise OSError(5, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "t", "new", overwrite=True)
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
    assert before[-1].startswith(".t.partial-")
    assert after == [tmp_path.name]


def test_destinations_in_a_circle(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match="a is a link in a circle"):
        write(tmp_path / "a", "1")
    with pytest.raises(ValueError, match="a is a link in a circle"):
        dj.checkpoint.convert(write_hf(tmp_path / "hf", tiny()), tmp_path / "a")


def test_an_old_directory_that_was_left_behind_is_mentioned(tmp_path):
    write(tmp_path / "t", "old")
    (tmp_path / "t").rename(tmp_path / f".t.replaced-{UUID}")
    with pytest.raises(FileNotFoundError, match=rf"killed while it replaced it left .*\.t\.replaced-{UUID}"):
        dj.load(tmp_path / "t")


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("originals")
    convert(write_hf(place / "hf", tiny(layers=2)), place / "jax")
    return place


@pytest.fixture
def converted(originals, tmp_path) -> Path:
    return shutil.copytree(originals / "jax", tmp_path / "jax")


def flip(file: Path, seed: int = 0):
    content, drawn = bytearray(file.read_bytes()), random.Random(seed)
    content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
    file.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_what_was_just_written_is_whole(converted, capsys):
    check_integrity(converted)
    assert dj.load(converted, verify=True).spec == tiny(layers=2)
    assert run_script("verify", converted) == 0
    assert "as written" in capsys.readouterr().out


def test_a_flipped_bit_in_any_file_is_found(converted, originals, capsys):
    for number, name in enumerate(names(originals / "jax" / "params")):
        flip(converted / "params" / name, number)
        with pytest.raises(ValueError, match=f"1 files are not as written\n  damaged: params/{name}$"):
            check_integrity(converted)
        if number == 0:
            assert run_script("verify", converted) == 2
            assert f"damaged: params/{name}" in capsys.readouterr().err
        shutil.copyfile(originals / "jax" / "params" / name, converted / "params" / name)
    flip(converted / "spec.json")
    with pytest.raises(ValueError, match=r"damaged: spec\.json"):
        check_integrity(converted)


def test_lost_and_added_files(converted):
    lost = next(file for file in (converted / "params" / "norm").rglob("d/*"))
    lost.unlink()
    (converted / "params" / "head" / "more").write_text("")
    (converted / "params" / ".DS_Store").write_text("")
    (converted / "README.md").write_text("a file of the user's")
    name = lost.relative_to(converted).as_posix()
    with pytest.raises(ValueError, match=f"missing: {name}\n  not of this conversion: params/head/more$"):
        check_integrity(converted)


def test_a_unit_of_another_conversion(converted, tmp_path, unannotated):
    other = convert(write_hf(tmp_path / "other", tiny(layers=2), seed=1), tmp_path / "other-jax")
    shutil.rmtree(converted / "params" / "layer_000")
    shutil.copytree(other / "params" / "layer_000", converted / "params" / "layer_000")
    dj.load(converted)  # a whole unit of the same shape and name: only hashes tell
    with pytest.raises(ValueError, match="layer_000"):
        dj.load(converted, verify=True)
    with pytest.raises(ValueError, match="verify='yes' must be True or False"):
        dj.load(converted, verify="yes")


@pytest.mark.parametrize("kept", [None, 3, [], {"spec.json": 3}, {"../hf/config.json": {}}])
def test_directories_whose_hashes_are_not_known(converted, kept):
    """Of an earlier release, damaged, or naming files elsewhere, which are not looked at."""
    history = json.loads((converted / "provenance.json").read_text())
    (converted / "provenance.json").write_text(json.dumps(history | {"written": kept}))
    message = "are not as written" if isinstance(kept, dict) else "holds no hashes of what was written"
    with pytest.raises(ValueError, match=message):
        dj.load(converted, verify=True)
    assert dj.load(converted).spec == tiny(layers=2)


def test_links_out_of_the_directory_are_not_followed(converted, originals):
    file = next((converted / "params" / "norm").rglob("d/*"))
    shutil.move(file, converted.parent / "elsewhere")
    file.symlink_to(converted.parent / "elsewhere")
    with pytest.raises(ValueError, match="outside of the checkpoint's directory"):
        check_integrity(converted)
