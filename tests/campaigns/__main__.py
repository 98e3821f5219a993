"""`python -m tests.campaigns`: runs the campaigns for a while and prints what came of them."""

import time
from typing import Annotated

import tyro
from rich.console import Console

from tests.campaigns.catalogue import CAMPAIGNS
from tests.campaigns.runner import Tally, run_for, table


def main(
    seconds: Annotated[float, tyro.conf.arg(help="how long to run, all campaigns together")],
    seed: Annotated[int, tyro.conf.arg(help="of all cases; the same seed tries the same")] = 0,
    only: Annotated[str | None, tyro.conf.arg(help="one campaign by its name")] = None,
):
    """Runs campaigns in turn; exit code 1 if anything was unclear, crashed or came out wrong."""
    names = [campaign.NAME for campaign in CAMPAIGNS]
    if not seconds > 0:
        raise SystemExit(f"error: --seconds {seconds} must be positive")
    if only is not None and only not in names:
        raise SystemExit(f"error: --only {only} must be one of {', '.join(names)}")
    chosen = [campaign for campaign in CAMPAIGNS if only in (None, campaign.NAME)]
    console, tallies = Console(), {}
    for campaign in chosen:
        tally, begun = tallies.setdefault(campaign.NAME, Tally()), time.monotonic()
        for description, verdict in run_for(campaign.__name__, seed, seconds / len(chosen)):
            tally.add(description, verdict)
            if verdict.outcome.bad:
                console.print(f"{campaign.NAME}: {verdict.outcome}: {description}", markup=False)
                console.print(f"    {verdict.note}", markup=False, highlight=False)
        tally.seconds = time.monotonic() - begun
    console.print(table(tallies))
    raise SystemExit(1 if any(tally.faults for tally in tallies.values()) else 0)


if __name__ == "__main__":
    tyro.cli(main)
