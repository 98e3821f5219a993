"""Kills (SIGKILL) at random moments of a training, which then goes on.

What goes on gives what was never killed gives, bit for bit. Conversions and exports are killed at every
moment in tests/test_convert_crash.py, evaluations go on from any journal in tests/test_eval_journal.py.
"""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import tests.conftest  # noqa: F401  jax is set as in tests
from dllm_jax.training import Batch, TrainConfig, train
from tests.campaigns.verdicts import Case, Outcome, Verdict
from tests.models import tiny

NAME = "kills"
SAMPLE = 1

# Forks of a process that has imported everything and started nothing.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def cases(seed: int) -> Iterator[Case]:
    """Endless: each is killed at another moment."""
    for number in itertools.count():
        moment = random.Random(f"{seed}:{number}").uniform(0.0, 1.05)
        description = f"{seed}.{number}: killed after {moment:.3f} of its time"
        yield Case(description, functools.partial(resumed, moment), limit=600.0)


class Counting:
    """A source of training data with a memory of its own, which every review changes."""

    def begin(self) -> Any:
        return {"reviews": 0}

    def batch(self, memory: Any, step: int) -> Batch:
        ids = np.random.default_rng([step, memory["reviews"]]).integers(0, 30, (4, 8)).astype(np.int32)
        return Batch(ids[:, :3], ids[:, 3:])

    def review(self, memory: Any, model: Any, step: int) -> Any:
        return {"reviews": memory["reviews"] + 1}


def training(place: Path) -> Any:
    """Trains a little; a digest of the parameters, and the log without times."""
    config = TrainConfig(steps=10, learning_rate=3e-3, warmup=2, decay=3, review_every=2, save_every=3)
    run = train(tiny("llada"), Counting(), config, directory=place / "run", progress=False)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(run.model.params):
        digest.update(np.asarray(leaf).tobytes())
    log = [{key: value for key, value in entry.items() if key != "seconds"} for entry in run.log]
    return [digest.hexdigest(), log]


def resumed(moment: float) -> Verdict:
    """Kills a training, runs it again, and compares the result with that of one that nobody kills."""
    wanted = whole()
    with tempfile.TemporaryDirectory() as place:
        first = asked(Path(place), moment * wanted.seconds)
        again = asked(Path(place))
    if first.code not in (0, -signal.SIGKILL) or again.code:
        codes = f"ends with {first.code}, then {again.code}"
        return Verdict(Outcome.WRONG, f"{codes}: {first.errors} {again.errors}")
    same = again.result == wanted.result
    return Verdict(Outcome.RIGHT) if same else Verdict(Outcome.WRONG, "the resumed run gives something else")


class Reply(NamedTuple):
    """How a job ended: exit code, seconds, its result (None if it has none) and what it wrote on stderr."""

    code: int | None
    seconds: float
    result: Any
    errors: str


@functools.cache
def whole() -> Reply:
    """One that nobody kills, with the compiled programs that the first one has stored."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        return [asked(Path(place)) for place in (first, second)][1]


def asked(place: Path, seconds: float | None = None) -> Reply:
    """Has it run in a fork, and killed after some seconds if it has not ended by then."""
    begun, result, errors = time.monotonic(), place / "result.json", place / "stderr"
    process = FORKS.Process(target=run, args=(place,))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    text = " ".join(errors.read_text(errors="replace").split())[-600:] if errors.exists() else ""
    found = None if process.exitcode else json.loads(result.read_text())
    return Reply(process.exitcode, time.monotonic() - begun, found, text)


def run(place: Path):
    """The fork: writes what the training gives, and on stderr why it gives nothing."""
    os.dup2(os.open(place / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    (place / "result.json").write_text(json.dumps(training(place)))
