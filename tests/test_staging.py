"""Directories that appear whole: a user's own files beside them, failing renames, what is flushed when."""

import os
from pathlib import Path

import pytest

import dllm_jax as dj
from dllm_jax.checkpoint.staging import atomic_directory
from tests.checkpoints import tiny, write_hf

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
