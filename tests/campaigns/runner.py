"""Runs campaigns, each in a process of its own: whatever dies or hangs is a verdict, and the rest goes on."""

import contextlib
import dataclasses
import importlib
import itertools
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from rich.table import Table

from tests.campaigns.verdicts import Case, Outcome, Verdict

STARTING = 120.0  # seconds for a process to import everything and to announce its first case
GIBIBYTE = 2**30
MEMORY = 12 * GIBIBYTE  # a case that takes more is killed


@dataclasses.dataclass
class Tally:
    """What came of one campaign.

    Attributes:
      verdicts: how many cases ended in which way.
      faults: description and verdict of all that has to be mended.
      seconds: how long it ran.
    """

    verdicts: Counter[Outcome] = dataclasses.field(default_factory=Counter)
    faults: list[tuple[str, Verdict]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def add(self, description: str, verdict: Verdict):
        """Counts a case."""
        self.verdicts[verdict.outcome] += 1
        if verdict.outcome.bad:
            self.faults.append((description, verdict))


def run_for(campaign: str, seed: int, seconds: float) -> Iterator[tuple[str, Verdict]]:
    """Runs the cases of a campaign until the time is over; yields each case's description and verdict.

    Args:
      campaign: dotted name of its module.
      seed: of its cases.
      seconds: after which no further case is begun; a running one is finished.
    """
    end, following = time.monotonic() + seconds, 0
    while following is not None and time.monotonic() < end:
        following = yield from _life(campaign, seed, following, end)


def sample(campaign: str, seed: int, count: int) -> Iterator[Case]:
    """The first cases of a campaign."""
    return itertools.islice(_cases(campaign, seed), count)


def table(tallies: dict[str, Tally]) -> Table:
    """One line per campaign: how many cases were tried, how they ended, and how long it took."""
    rows = Table("campaign", "tried", *Outcome, "seconds", title="campaigns")
    for name, tally in tallies.items():
        counts = [str(tally.verdicts[outcome]) for outcome in Outcome]
        rows.add_row(name, str(tally.verdicts.total()), *counts, f"{tally.seconds:.0f}")
    return rows


def _life(
    campaign: str, seed: int, skip: int, end: float
) -> Generator[tuple[str, Verdict], None, int | None]:
    """One life of the process: until the time is over, or a case kills it.

    Returns:
      the number of the case to go on with; None if there is none, or nothing could be begun.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, campaign, seed, skip, end - time.monotonic()))
    process.start()
    theirs.close()
    description, limit, following = "beginning the campaign", STARTING, None
    try:
        while not (fault := _await(ours, process.pid, limit)):
            kind, *content = ours.recv()
            if kind == "over":
                return None
            if kind == "case":
                number, description, limit = content
                following = number + 1
            else:
                yield description, content[0]
                description, limit = "making the next case", STARTING
    except EOFError:
        process.join()
        fault = f"the process died with exit code {process.exitcode}"
    finally:
        _end(process)
    yield description, Verdict(Outcome.CRASH, fault)
    return following


def _await(connection: Connection, pid: int, limit: float) -> str:
    """Waits for a message; says in words why it is not waited for any longer, "" if there is one."""
    end = time.monotonic() + limit
    while not connection.poll(0.2):
        if time.monotonic() > end:
            return f"hangs: no end after {limit:.0f} s"
        if _resident(pid) > MEMORY:
            return f"took more than {MEMORY / GIBIBYTE:.0f} GiB of memory"
    return ""


def _resident(pid: int) -> int:
    """Memory of a process in bytes; 0 if it is not known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _end(process: multiprocessing.process.BaseProcess):
    """Ends the process and all that it started, which are a group of their own."""
    process.join(5)
    with contextlib.suppress(ProcessLookupError):  # none of them is left, or the group was not yet made
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _work(connection: Connection, campaign: str, seed: int, skip: int, seconds: float):
    """The process: announces each case, runs it, reports."""
    os.setsid()
    import tests.conftest  # noqa: F401  jax is set as in tests
    from tests.programs import forget_in_time

    end = time.monotonic() + seconds
    for number, case in enumerate(itertools.islice(_cases(campaign, seed), skip, None), skip):
        if time.monotonic() > end:
            break
        connection.send(("case", number, case.description, case.limit))
        try:
            verdict = case.run()
        except Exception as error:
            verdict = Verdict(Outcome.CRASH, f"{type(error).__name__}: {error}")
        connection.send(("verdict", verdict))
        forget_in_time()
    connection.send(("over",))


def _cases(campaign: str, seed: int) -> Iterator[Case]:
    return importlib.import_module(campaign).cases(seed)
