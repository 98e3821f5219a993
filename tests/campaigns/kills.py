"""Kills (SIGKILL) at random moments of conversions, exports, evaluations, training, and between two renames.

A conversion or export leaves its destination as it was or whole, and the next run whole and alone. An
evaluation or training that goes on gives what one that was never killed gives, bit for bit.
"""

import atexit
import dataclasses
import functools
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import dllm_jax as dj
from dllm_jax.checkpoint import convert
from tests.campaigns.verdicts import Case, Outcome, Verdict
from tests.checkpoints import save_sharded, tensors, tiny, write_hf

NAME = "kills"
SAMPLE = 4
ROOT = Path(__file__).parents[2]
TARGET = "out/target"  # in the directory of a case
KILLED, ENDED = -9, 0


def cases(seed: int) -> Iterator[Case]:
    """Endless: every kind in turn, each killed at another moment."""
    number = 0
    while True:
        kind = tuple(KINDS)[number % len(KINDS)]
        moment = random.Random(f"{seed}.{number}").uniform(0.0, 1.05)
        run = functools.partial(_run, kind, moment)
        yield Case(f"{seed}.{number}: {kind} killed after {moment:.3f} of its time", run, limit=600.0)
        number += 1


def _run(kind: str, moment: float) -> Verdict:
    with tempfile.TemporaryDirectory() as place:
        fault = KINDS[kind](Path(place), moment)
    return Verdict(Outcome.WRONG, fault) if fault else Verdict(Outcome.RIGHT)


# Each kind gives in words what is wrong, "" if nothing is.


def first_conversion(place: Path, moment: float) -> str:
    return _directories(place, moment, "converting", "llada", old=None)


def conversion_over_another(place: Path, moment: float) -> str:
    return _directories(place, moment, "converting", "llada", old="dream-converted")


def export_over_another(place: Path, moment: float) -> str:
    return _directories(place, moment, "exporting", "llada-converted", old="dream")


def between_two_renames(place: Path, moment: float) -> str:
    """The old directory is back after the next run, even if that fails."""
    _prepare(place, "llada", "dream-converted")
    before = _ask("target", place).result
    if _ask("swapping", place).code != KILLED or _ask("target", place).result != "absent":
        return "was not killed between the renames"
    try:
        dj.load(place / TARGET)
    except FileNotFoundError as error:
        if "rename it back" not in str(error):
            return f"load does not say where the old directory is: {error}"
    if moment < 0.5:
        shutil.copytree(originals() / "broken", place / "broken")
        if "NaN" not in str(_ask("failing", place).result):
            return "the broken source was converted"
        if _ask("target", place).result != before:
            return "the old directory is not back"
    return _finish(place, "converting", _reference("converting", "llada").result)


def evaluation(place: Path, moment: float) -> str:
    return _resumed(place, moment, "evaluating")


def training(place: Path, moment: float) -> str:
    return _resumed(place, moment, "training")


ALL = (
    first_conversion,
    conversion_over_another,
    export_over_another,
    between_two_renames,
    evaluation,
    training,
)
KINDS: dict[str, Callable[[Path, float], str]] = {kind.__name__: kind for kind in ALL}


def _directories(place: Path, moment: float, job: str, source: str, old: str | None) -> str:
    reference = _reference(job, source)
    _prepare(place, source, old)
    before = _ask("target", place).result
    reply = _ask(job, place, moment * reference.seconds)
    if reply.code not in (KILLED, ENDED):
        return f"exit code {reply.code}: {reply.errors}"
    found = _ask("target", place)
    hidden = any(".replaced-" in path.name for path in (place / "out").iterdir())
    allowed = {before, reference.result, *(["absent"] if hidden else [])}
    if found.code != ENDED or found.result not in allowed:
        return f"the destination is neither old nor new: {found.result} {found.errors}"
    return _finish(place, job, reference.result)


def _finish(place: Path, job: str, expected: Any) -> str:
    """Runs a job to its end, after which its whole destination is there and nothing else."""
    reply = _ask(job, place)
    if reply.code != ENDED:
        return f"the next run ends with {reply.code}: {reply.errors}"
    if _ask("target", place).result != expected:
        return "the next run writes something else"
    left = sorted(path.name for path in (place / "out").iterdir())
    return "" if left == ["target"] else f"the next run leaves {left}"


def _resumed(place: Path, moment: float, job: str) -> str:
    reference = _reference(job, None)
    reply = _ask(job, place, moment * reference.seconds)
    if reply.code not in (KILLED, ENDED):
        return f"exit code {reply.code}: {reply.errors}"
    again = _ask(job, place)
    if again.code != ENDED:
        return f"the resumed run ends with {again.code}: {again.errors}"
    return "" if again.result == reference.result else "the resumed run gives something else"


def _prepare(place: Path, source: str | None, old: str | None):
    (place / "out").mkdir()
    if source is not None:
        shutil.copytree(originals() / source, place / "source")
    if old is not None:
        shutil.copytree(originals() / old, place / TARGET)


@functools.cache
def originals() -> Path:
    """A directory of tiny checkpoints, made once per process."""
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    for family in ("llada", "dream"):
        convert(write_hf(place / family, tiny(family, layers=2), shards=2), place / f"{family}-converted")
    write_hf(place / "broken", tiny(layers=1))
    save_sharded(place / "broken", {name: x * np.nan for name, x in tensors(tiny(layers=1)).items()})
    return place


@dataclasses.dataclass(frozen=True)
class Reply:
    """How a job ended: exit code, seconds, its result (None if it has none) and what it wrote on stderr."""

    code: int
    seconds: float
    result: Any
    errors: str


@functools.cache
def _reference(job: str, source: str | None) -> Reply:
    """What a job that nobody kills gives, and how long it takes; its compiled programs are stored by then."""
    with tempfile.TemporaryDirectory() as name:
        for attempt in ("first", "second"):
            place = Path(name) / attempt
            place.mkdir()
            _prepare(place, source, None)
            reply = _ask(job, place)
            assert reply.code == ENDED, reply.errors
            if source is not None:
                reply = dataclasses.replace(reply, result=_ask("target", place).result)
        return reply


@functools.cache
def _server() -> subprocess.Popen:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.campaigns.kill_jobs"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen):
    server.communicate()


def _ask(job: str, place: Path, seconds: float | None = None) -> Reply:
    """Has a job run in a fork, and killed after some seconds if it has not ended by then."""
    result, errors = place / "result.json", place / "stderr"
    for file in (result, errors):
        file.unlink(missing_ok=True)
    stdin, stdout = _server().stdin, _server().stdout
    assert stdin is not None
    assert stdout is not None
    stdin.write(json.dumps([job, str(place), seconds]) + "\n")
    stdin.flush()
    code, took = json.loads(stdout.readline())
    text = " ".join(errors.read_text(errors="replace").split())[-600:] if errors.exists() else ""
    return Reply(code, took, json.loads(result.read_text()) if code == ENDED else None, text)
