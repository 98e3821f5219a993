"""Hashes of what was written: flipped bits, exchanged units, lost and added files; directories without."""

import json
import random
import shutil
from pathlib import Path

import pytest

import dllm_jax as dj
from dllm_jax.checkpoint import convert
from dllm_jax.checkpoint.files import check_integrity
from tests.checkpoints import tiny, write_hf
from tests.test_convert import run_script


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


def test_a_unit_of_another_conversion(converted, tmp_path):
    other = convert(write_hf(tmp_path / "other", tiny(layers=2), seed=1), tmp_path / "other-jax")
    shutil.rmtree(converted / "params" / "layer_000")
    shutil.copytree(other / "params" / "layer_000", converted / "params" / "layer_000")
    dj.load(converted)  # a whole unit of the same shape and name: only hashes tell
    with pytest.raises(ValueError, match="layer_000"):
        dj.load(converted, verify=True)


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


def test_verify_is_a_truth_value(converted, unannotated):
    with pytest.raises(ValueError, match="verify='yes' must be True or False"):
        dj.load(converted, verify="yes")
