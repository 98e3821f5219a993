"""Kills (SIGKILL) at random moments of evaluations and trainings, which then go on.

What goes on gives what was never killed gives, bit for bit. Conversions and exports are killed at every
moment in tests/test_convert_crash.py.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import tests.conftest  # noqa: F401  jax is set as in tests
from dllm_jax.decoding.chat import chat_ids
from dllm_jax.eval.run.checkpoint import Checkpoint
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import Request, Runner
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.training import Batch, TrainConfig, train
from tests.campaigns.verdicts import Case, Outcome, Verdict
from tests.models import tiny

NAME = "kills"
SAMPLE = 1

# Jobs are forks of a process that has imported everything and started nothing.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "transformers"])


def cases(seed: int) -> Iterator[Case]:
    """Endless: every job in turn, each killed at another moment."""
    for number in itertools.count():
        job, moment = JOBS[number % len(JOBS)], random.Random(f"{seed}:{number}").uniform(0.0, 1.05)
        description = f"{seed}.{number}: {job.__name__} killed after {moment:.3f} of its time"
        yield Case(description, functools.partial(resumed, job, moment), limit=600.0)


def evaluating(place: Path) -> Any:
    """Answers a few prompts with a journal; the answers."""
    lm = Checkpoint("tiny-llada").open()
    texts = [f"b={n}07;T=2{n}1;z={n}30;T=" for n in range(8)]
    ids = [chat_ids(lm.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    requests = [Request(str(n), tuple(prompt), 4) for n, prompt in enumerate(ids)]
    runner = Runner(lm, Decoding(length=4, block=2, batch=2))
    return [entry["answer"] for entry in runner.run(requests, Journal(place / "journal.jsonl"))]


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
    config = TrainConfig(steps=10, learning_rate=3e-3, warmup=2, decay=3, review_every=2, save_every=4)
    run = train(tiny("llada"), Counting(), config, directory=place / "run", progress=False)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(run.model.params):
        digest.update(np.asarray(leaf).tobytes())
    log = [{key: value for key, value in entry.items() if key != "seconds"} for entry in run.log]
    return [digest.hexdigest(), log]


Job = Callable[[Path], Any]
JOBS: tuple[Job, ...] = (training, evaluating)


def resumed(job: Job, moment: float) -> Verdict:
    """Kills a job, runs it again, and compares the result with that of a job that nobody kills."""
    wanted, _ = whole(job)
    with tempfile.TemporaryDirectory() as place:
        first = asked(job, Path(place), moment * wanted.seconds)
        again = asked(job, Path(place))
    if first.code not in (0, -signal.SIGKILL) or again.code:
        return Verdict(
            Outcome.WRONG, f"ends with {first.code}, then {again.code}: {first.errors} {again.errors}"
        )
    same = again.result == wanted.result
    return Verdict(Outcome.RIGHT) if same else Verdict(Outcome.WRONG, "the resumed run gives something else")


class Reply(NamedTuple):
    """How a job ended: exit code, seconds, its result (None if it has none) and what it wrote on stderr."""

    code: int | None
    seconds: float
    result: Any
    errors: str


@functools.cache
def whole(job: Job) -> tuple[Reply, Reply]:
    """A job that nobody kills, the second time with the compiled programs that the first time has stored."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        return tuple(reversed([asked(job, Path(place)) for place in (first, second)]))


def asked(job: Job, place: Path, seconds: float | None = None) -> Reply:
    """Has a job run in a fork, and killed after some seconds if it has not ended by then."""
    begun, result, errors = time.monotonic(), place / "result.json", place / "stderr"
    process = FORKS.Process(target=run, args=(job, place))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    text = " ".join(errors.read_text(errors="replace").split())[-600:] if errors.exists() else ""
    found = None if process.exitcode else json.loads(result.read_text())
    return Reply(process.exitcode, time.monotonic() - begun, found, text)


def run(job: Job, place: Path):
    """The fork: writes what the job gives, and on stderr why it gives nothing."""
    os.dup2(os.open(place / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    (place / "result.json").write_text(json.dumps(job(place)))
