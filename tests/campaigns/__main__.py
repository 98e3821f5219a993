"""`python -m tests.campaigns`: runs the campaigns for a while and prints what came of them."""

from collections import Counter
from types import ModuleType
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from tests.campaigns import arguments, generations, kills, malformed
from tests.campaigns.runner import run_for
from tests.campaigns.verdicts import Outcome

CAMPAIGNS: tuple[ModuleType, ...] = (malformed, generations, arguments, kills)


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
    console, ended = Console(), {}
    for campaign in chosen:
        counts = ended.setdefault(campaign.NAME, Counter())
        for description, (outcome, note) in run_for(campaign.__name__, seed, seconds / len(chosen)):
            counts[outcome] += 1
            if outcome.bad:
                console.print(f"{campaign.NAME}: {outcome}: {description}", markup=False)
                console.print(f"    {note}", markup=False, highlight=False)
    console.print(table(ended))
    raise SystemExit(any(outcome.bad for counts in ended.values() for outcome in counts))


def table(ended: dict[str, Counter[Outcome]]) -> Table:
    """One line per campaign: how many cases were tried, and how they ended."""
    rows = Table("campaign", "tried", *Outcome, title="campaigns")
    for name, counts in ended.items():
        rows.add_row(name, str(counts.total()), *(str(counts[outcome]) for outcome in Outcome))
    return rows


if __name__ == "__main__":
    tyro.cli(main)
