"""Conversion and export killed at any moment: the destination is not there, or it is whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dllm_jax as dj
from dllm_jax.checkpoint import convert, export
from tests.checkpoints import tiny, write_hf
from tests.models import EXHAUSTIVE

RUNS = {"convert": convert, "export": export}

# Every attempt runs in a fork, so that one interpreter start serves them all. `moment` counts the steps of a
# run (a unit or an exported tensor about to be written, a directory about to be renamed or removed) and kills
# it there.
PROGRAM = """
import json, os, shutil, signal, sys
from pathlib import Path
import numpy as np
from dllm_jax.checkpoint import convert, export
from dllm_jax.checkpoint import converted
from dllm_jax.checkpoint.families import units_of
from dllm_jax.checkpoint.source import open_checkpoint, read_checkpoint

job, source, destination, overwrite = json.loads(sys.argv[1])
run = {"convert": convert, "export": export}[job]


def forked(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def die_at(moment):
    left = [moment]

    def counted(step):
        def wrapper(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*args, **kwargs)
        return wrapper

    if job == "convert":
        sys.modules["dllm_jax.checkpoint.conversion"].write_unit = counted(converted.write_unit)
    else:
        np.ascontiguousarray = counted(np.ascontiguousarray)
    Path.rename = counted(Path.rename)
    shutil.rmtree = counted(shutil.rmtree)
    run(source, destination, overwrite=overwrite)


def whole():
    checkpoint = open_checkpoint(destination)
    for unit in units_of(checkpoint.spec):
        read_checkpoint(checkpoint, unit)


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kept_its_word():
    return "absent" if not Path(destination).exists() else "whole" if ended(forked(whole)) == 0 else "broken"


def make_room():
    if not overwrite:
        shutil.rmtree(destination, ignore_errors=True)


states, moment, code = [], 0, -9
while code == -9:
    make_room()
    code = ended(forked(lambda: die_at(moment)))
    states.append(kept_its_word())
    moment += 1
assert code == 0, code
print(json.dumps(states))
"""


def states(job: str, source: Path, destination: Path, overwrite: bool) -> list[str]:
    arguments = json.dumps([job, str(source), str(destination), overwrite])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, arguments], cwd=Path(__file__).parent.parent,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("job", RUNS if EXHAUSTIVE else ["convert"])
def test_killed_runs_leave_nothing_or_everything(tmp_path, job):
    source, place = write_hf(tmp_path / "hf", tiny(layers=1)), tmp_path / "place" / "target"
    if job == "export":
        source = convert(source, tmp_path / "jax")
    found = states(job, source, place, overwrite=False)
    assert set(found) <= {"absent", "whole"}
    assert found[:4] == ["absent"] * 4
    RUNS[job](source, place, overwrite=place.exists())
    assert dj.load(place).spec == tiny(layers=1)
    assert [path.name for path in place.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("job", RUNS if EXHAUSTIVE else ["export"])
def test_killed_overwrites_keep_the_old_until_the_new_is_whole(tmp_path, job):
    source, place = write_hf(tmp_path / "hf", tiny(layers=1)), tmp_path / "place" / "target"
    old, run = write_hf(tmp_path / "old", tiny("dream", layers=1)), RUNS[job]
    if job == "export":
        source, old = convert(source, tmp_path / "jax"), convert(old, tmp_path / "jax_old")
    run(old, place)
    found = states(job, source, place, overwrite=True)
    assert "broken" not in found
    assert "absent" in found  # between the two renames, until the next run puts the old one back
    assert found.count("absent") <= 3
    run(source, place, overwrite=True)
    assert dj.load(place).spec == tiny(layers=1)
    assert [path.name for path in place.parent.iterdir()] == ["target"]
