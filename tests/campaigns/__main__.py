"""`python -m tests.campaigns`: runs the campaigns for a while and prints what came of them."""

import faulthandler
import itertools
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

import tests.conftest  # noqa: F401  jax is set as in tests
from tests.campaigns import (
    adapters,
    arguments,
    authors,
    batches,
    configs,
    generations,
    journals,
    kills,
    malformed,
    messages,
    stops,
    ways,
)
from tests.campaigns.verdicts import Outcome, Verdict
from tests.programs import forget_in_time

CAMPAIGNS: tuple[ModuleType, ...] = (
    malformed, configs, adapters, generations, arguments, authors, batches, journals, messages, stops, ways,
    kills,
)  # fmt: skip
MEMORY = 16 * 2**30  # bytes; a case that allocates more fails


def main(
    seconds: Annotated[float, tyro.conf.arg(help="how long to run, all campaigns together")],
    seed: Annotated[int, tyro.conf.arg(help="of all cases; the same seed tries the same")] = 0,
    only: Annotated[str | None, tyro.conf.arg(help="one campaign by its name")] = None,
):
    """Runs campaigns in turn; exit code 1 if anything was unclear, crashed or came out wrong."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    chosen = [campaign for campaign in CAMPAIGNS if only in (None, campaign.NAME)]
    console, rows = Console(), Table("campaign", "tried", *Outcome, title="campaigns")
    total = Counter[Outcome]()
    for campaign in chosen:
        counts = Counter[Outcome]()
        for description, (outcome, note) in run_for(campaign, seed, seconds / len(chosen)):
            counts[outcome] += 1
            if outcome.bad:
                console.print(f"{campaign.NAME}: {outcome}: {description}", markup=False)
                console.print(f"    {note}", markup=False, highlight=False)
        rows.add_row(campaign.NAME, str(counts.total()), *(str(counts[outcome]) for outcome in Outcome))
        total += counts
    console.print(rows)
    raise SystemExit(not total or any(outcome.bad for outcome in total))


def run_for(campaign: ModuleType, seed: int, seconds: float) -> Iterator[tuple[str, Verdict]]:
    """Descriptions and verdicts of a campaign's cases, until the time is over.

    What a case dies of, or hangs in, ends the run: its description is the last line on stderr before that.
    """
    end = time.monotonic() + seconds
    for case in itertools.takewhile(lambda _: time.monotonic() < end, campaign.cases(seed)):
        print(case.description, file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(case.limit, exit=True)
        try:
            yield case.description, case.run()
        except Exception as error:
            yield case.description, Verdict(Outcome.CRASH, f"{type(error).__name__}: {error}")
        finally:
            faulthandler.cancel_dump_traceback_later()
        forget_in_time()


if __name__ == "__main__":
    tyro.cli(main)
