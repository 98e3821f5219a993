"""Runs campaigns, each in a process of its own: whatever dies or hangs is a verdict, and the rest goes on."""

import contextlib
import importlib
import itertools
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection

from tests.campaigns.verdicts import Case, Outcome, Verdict

STARTING = 120.0  # seconds for a process to import everything and to announce its first case
MEMORY = 16 * 2**30  # bytes; a case that allocates more fails


def sample(campaign: str, seed: int, count: int | None, skip: int = 0) -> Iterator[Case]:
    """Cases of a campaign, by the dotted name of its module: from `skip` up to `count`, None without end."""
    return itertools.islice(importlib.import_module(campaign).cases(seed), skip, count)


def run_for(campaign: str, seed: int, seconds: float) -> Iterator[tuple[str, Verdict]]:
    """Descriptions and verdicts of a campaign's cases, until the time is over; a running one is finished."""
    end, following = time.monotonic() + seconds, 0
    while following is not None and time.monotonic() < end:
        following = yield from _life(campaign, seed, following, end)


def _life(
    campaign: str, seed: int, skip: int, end: float
) -> Generator[tuple[str, Verdict], None, int | None]:
    """One life of the process; returns the case to go on with where one has killed it, else None."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, campaign, seed, skip, end - time.monotonic()))
    process.start()
    theirs.close()
    description, limit, following = "beginning the campaign", STARTING, None
    try:
        while ours.poll(limit):
            match ours.recv():
                case None:
                    return None
                case Verdict() as verdict:
                    yield description, verdict
                    description, limit = "making the next case", STARTING
                case number, description, limit:
                    following = number + 1
        fault = f"hangs: no end after {limit:.0f} s"
    except EOFError:
        process.join()
        fault = f"the process died with exit code {process.exitcode}"
    finally:
        # The process and all that it started are a group of their own.
        process.join(5)
        with contextlib.suppress(ProcessLookupError):  # none of them is left, or the group was not yet made
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    yield description, Verdict(Outcome.CRASH, fault)
    return following


def _work(connection: Connection, campaign: str, seed: int, skip: int, seconds: float):
    """The process: announces each case, runs it, reports."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    import tests.conftest  # noqa: F401  jax is set as in tests
    from tests.programs import forget_in_time

    end = time.monotonic() + seconds
    for number, case in enumerate(sample(campaign, seed, None, skip), skip):
        if time.monotonic() > end:
            break
        connection.send((number, case.description, case.limit))
        try:
            verdict = case.run()
        except Exception as error:
            verdict = Verdict(Outcome.CRASH, f"{type(error).__name__}: {error}")
        connection.send(verdict)
        forget_in_time()
    connection.send(None)
