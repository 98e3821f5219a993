"""Hashes of what was written: flipped bits, exchanged units, lost and added files; directories without."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest

import dllm_jax as dj
from dllm_jax.checkpoint import check_integrity, convert
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
    found = check_integrity(converted)
    assert (found.ok, found.faults) == (True, ())
    assert found.files == len(names(converted / "params")) + 1  # and spec.json
    assert found.nbytes == sum(f.stat().st_size for f in (converted / "params").rglob("*") if f.is_file()) + (
        (converted / "spec.json").stat().st_size
    )
    assert dj.load(converted, verify=True).spec == tiny(layers=2)
    assert run_script("verify", converted) == 0
    assert "as written" in capsys.readouterr().out


def test_a_flipped_bit_in_any_file_is_found(converted, originals):
    for number, name in enumerate(names(originals / "jax" / "params")):
        flip(converted / "params" / name, number)
        found = check_integrity(converted)
        assert found.faults == (f"damaged: params/{name} has another sha256",)
        shutil.copyfile(originals / "jax" / "params" / name, converted / "params" / name)
    flip(converted / "spec.json")
    assert not check_integrity(converted).ok


def test_flipped_weights_do_not_load(converted, capsys):
    """The largest file of a unit is its compressed arrays, where a flipped bit may give other weights."""
    file = max((converted / "params" / "layer_001").rglob("*"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged: params/layer_001/.*|layer_001 cannot be read"):
        dj.load(converted, verify=True)
    assert run_script("verify", converted) == 1
    assert "damaged: params/layer_001/" in capsys.readouterr().out


def test_lost_and_added_files(converted):
    lost = next(file for file in (converted / "params" / "norm").rglob("d/*"))
    lost.unlink()
    (converted / "params" / "head" / "more").write_text("")
    (converted / "params" / ".DS_Store").write_text("")
    (converted / "README.md").write_text("a file of the user's")
    name = lost.relative_to(converted).as_posix()
    assert check_integrity(converted).faults == (
        f"missing: {name}",
        "not of this conversion: params/head/more",
    )


def test_a_unit_of_another_conversion(converted, tmp_path):
    other = convert(write_hf(tmp_path / "other", tiny(layers=2), seed=1), tmp_path / "other-jax")
    shutil.rmtree(converted / "params" / "layer_000")
    shutil.copytree(other / "params" / "layer_000", converted / "params" / "layer_000")
    dj.load(converted)  # a whole unit of the same shape and name: only hashes tell
    with pytest.raises(ValueError, match="layer_000"):
        dj.load(converted, verify=True)


def test_conversions_of_earlier_releases_load_and_are_refused_by_name(converted, capsys):
    history = json.loads((converted / "provenance.json").read_text())
    del history["written"]
    (converted / "provenance.json").write_text(json.dumps(history))
    assert dj.load(converted).spec == tiny(layers=2)
    with pytest.raises(ValueError, match=f"{converted} was converted by an earlier release"):
        dj.load(converted, verify=True)
    assert run_script("verify", converted) == 2
    assert "earlier release" in capsys.readouterr().err
    (converted / "provenance.json").unlink()
    with pytest.raises(ValueError, match="holds no hashes of what was written"):
        check_integrity(converted)


@pytest.mark.parametrize("kept", [3, [], {"spec.json": 3}, {"spec.json": {"bytes": "1", "sha256": "x"}}])
def test_damaged_provenance(converted, kept):
    history = json.loads((converted / "provenance.json").read_text())
    (converted / "provenance.json").write_text(json.dumps(history | {"written": kept}))
    with pytest.raises(ValueError, match=r"provenance\.json: written must hold bytes and sha256"):
        check_integrity(converted)


def test_names_in_provenance_lead_nowhere_else(converted):
    history = json.loads((converted / "provenance.json").read_text())
    history["written"]["../hf/config.json"] = {"bytes": 3, "sha256": "0"}
    (converted / "provenance.json").write_text(json.dumps(history))
    assert check_integrity(converted).faults == ("missing: ../hf/config.json",)


def test_hugging_face_directories_have_no_hashes_but_the_cache_has(originals, tmp_path):
    with pytest.raises(ValueError, match=r"holds no hashes of config\.json, model\.safetensors"):
        dj.load(originals / "hf", verify=True)
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (originals / "hf").iterdir():
        content = file.read_bytes()
        git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        name = hashlib.sha256(content).hexdigest() if file.suffix == ".safetensors" else git
        (blobs / name).write_bytes(content)
        (snapshot / file.name).symlink_to(f"../../blobs/{name}")
    assert dj.load(snapshot, verify=True).spec == tiny(layers=2)
    for name, algorithm in (("model.safetensors", "sha256"), ("config.json", "sha1")):
        before = (snapshot / name).read_bytes()
        flip((snapshot / name).resolve())
        assert check_integrity(snapshot).faults == (f"damaged: {name} has another {algorithm}",)
        (snapshot / name).resolve().write_bytes(before)


def test_verify_is_a_truth_value(converted, unannotated):
    with pytest.raises(ValueError, match="verify='yes' must be True or False"):
        dj.load(converted, verify="yes")
