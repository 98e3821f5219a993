"""What is killed: jobs that run in forks of this process, which has imported everything and started nothing.

Reads a request per line from standard input (job, its directory, seconds after which it is killed, or null)
and writes a reply per line: exit code, -9 for a killed job, and seconds. A job leaves its result in
result.json.
"""

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import transformers  # noqa: F401  evaluation imports it late; here it is imported once for all forks

import tests.conftest  # noqa: F401  jax is set as in tests
from dllm_jax.checkpoint import convert, export
from dllm_jax.checkpoint.families import units_of
from dllm_jax.checkpoint.source import open_checkpoint, read
from dllm_jax.decoding.chat import chat_ids
from dllm_jax.eval.run.checkpoint import Checkpoint
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import Request, Runner
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.training import Batch, TrainConfig, train
from tests.campaigns.kills import TARGET
from tests.models import tiny


class Counting:
    """A source of training data with a memory of its own, which every review changes."""

    def begin(self) -> Any:
        return {"reviews": 0}

    def batch(self, memory: Any, step: int) -> Batch:
        ids = np.random.default_rng([step, memory["reviews"]]).integers(0, 30, (4, 8)).astype(np.int32)
        return Batch(ids[:, :3], ids[:, 3:])

    def review(self, memory: Any, model: Any, step: int) -> Any:
        return {"reviews": memory["reviews"] + 1}


def converting(place: Path) -> Any:
    """Replaces the target by a conversion of `source`; it may be there or not."""
    convert(place / "source", place / TARGET, overwrite=True)


def exporting(place: Path) -> Any:
    """Replaces the target by an export of `source`."""
    export(place / "source", place / TARGET, overwrite=True)


def failing(place: Path) -> Any:
    """A conversion over the target that fails once it has begun; says why."""
    try:
        convert(place / "broken", place / TARGET, overwrite=True, check_finite=True)
    except ValueError as error:
        return str(error)


def swapping(place: Path) -> Any:
    """A conversion that dies between its two renames: the old target is away, the new one not there."""
    rename = Path.rename

    def dying(self: Path, target: Path):
        if ".partial-" in self.name and target == place / TARGET:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.rename = dying
    convert(place / "source", place / TARGET, overwrite=True)


def target(place: Path) -> Any:
    """What the target holds: "absent", or a digest of its spec and all of its weights."""
    if not (place / TARGET).exists():
        return "absent"
    checkpoint, digest = open_checkpoint(place / TARGET), hashlib.sha256()
    digest.update(repr(checkpoint.spec).encode())
    for unit in units_of(checkpoint.spec):
        for name, array in sorted(read(checkpoint, unit).items()):
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def evaluating(place: Path) -> Any:
    """Answers a few prompts with a journal; the answers."""
    lm = Checkpoint("tiny-llada").open()
    texts = [f"b={n}07;T=2{n}1;z={n}30;T=" for n in range(8)]
    ids = [chat_ids(lm.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    requests = [Request(str(n), tuple(prompt), 4) for n, prompt in enumerate(ids)]
    runner = Runner(lm, Decoding(length=4, block=2, batch=2))
    return [entry["answer"] for entry in runner.run(requests, Journal(place / "journal.jsonl"))]


def training(place: Path) -> Any:
    """Trains a little; a digest of the parameters, and the log without times."""
    config = TrainConfig(steps=10, learning_rate=3e-3, warmup=2, decay=3, review_every=2, save_every=4)
    run = train(tiny("llada"), Counting(), config, directory=place / "run", progress=False)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(run.model.params):
        digest.update(np.asarray(leaf).tobytes())
    log = [{key: value for key, value in entry.items() if key != "seconds"} for entry in run.log]
    return [digest.hexdigest(), log]


JOBS: dict[str, Callable[[Path], Any]] = {
    job.__name__: job for job in (converting, exporting, failing, swapping, target, evaluating, training)
}


def forked(job: Callable[[Path], Any], place: Path) -> int:
    """Runs a job in a fork; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(place / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        (place / "result.json").write_text(json.dumps(job(place)))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main():
    for line in sys.stdin:
        name, place, seconds = json.loads(line)
        begun = time.monotonic()
        pid = forked(JOBS[name], Path(place))
        ended, status = 0, 0
        while seconds is not None and not ended and time.monotonic() < begun + seconds:
            ended, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.001)
        if not ended:
            if seconds is not None:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - begun]), flush=True)


if __name__ == "__main__":
    main()
