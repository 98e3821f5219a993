"""A fixed sample of every campaign, and the campaigns' own machinery."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import tyro

import dllm_jax as dj
from tests.campaigns.__main__ import CAMPAIGNS, main, table
from tests.campaigns.runner import run_for, sample
from tests.campaigns.verdicts import Case, Outcome, Verdict, judge

SEED = 2  # whose generation compiles sooner than others
PARTS = 4  # of a sample, so that workers share it
SAMPLES = [
    # What is killed in the midst is tested one by one elsewhere (test_convert_crash, test_training_run).
    pytest.param(c, part, marks=[pytest.mark.exhaustive] * (c.NAME == "kills"))
    for c in CAMPAIGNS
    for part in range(min(PARTS, c.SAMPLE))
]


# Arrays of a unit that are still being read when the first of them fails answer to a closed event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("campaign", "part"), SAMPLES, ids=lambda each: getattr(each, "NAME", each))
def test_a_sample_of_the_campaign(campaign, part, unannotated):
    faults = []
    for number, case in enumerate(sample(campaign.__name__, SEED, campaign.SAMPLE)):
        if number % PARTS == part:
            verdict = case.run()
            faults += [f"{case.description}: {verdict}"] if verdict.outcome.bad else []
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("campaign", CAMPAIGNS, ids=lambda campaign: campaign.NAME)
def test_the_same_seed_gives_the_same_cases(campaign):
    first, again, other = (
        [case.description for case in sample(campaign.__name__, seed, 20)] for seed in (1, 1, 2)
    )
    assert first == again != other


# What follows is a campaign of its own, of which the runner has to tell every kind of end.
NAME = "ends"


def ends(number: int) -> Verdict:
    if number == 0:
        return Verdict(Outcome.RIGHT)
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2:
        raise RuntimeError("a fault of the case")
    if number == 3:
        time.sleep(600)
    return Verdict(Outcome.WRONG, "told so")


def cases(seed: int) -> Iterator[Case]:
    for number in range(5):
        limit = 0.5 if number == 3 else 60.0
        yield Case(f"{seed}.{number}", lambda number=number: ends(number), limit)


@pytest.mark.exhaustive
def test_what_dies_or_hangs_is_a_crash_and_the_rest_goes_on():
    found = [(description, verdict.outcome) for description, verdict in run_for(__name__, 7, 600)]
    crash = Outcome.CRASH
    assert found == [
        ("7.0", Outcome.RIGHT), ("7.1", crash), ("7.2", crash), ("7.3", crash), ("7.4", Outcome.WRONG),
    ]  # fmt: skip


def test_the_table_counts_what_was_tried():
    counts = Counter([Outcome.RIGHT, Outcome.RIGHT, Outcome.CLEAR, Outcome.WRONG])
    columns = {column.header: list(column.cells) for column in table({"x": counts}).columns}
    assert (columns["tried"], columns["right"], columns["wrong"]) == (["4"], ["2"], ["1"])


def raised(error: Exception):
    raise error


def test_errors_are_judged():
    ours = lambda: dj.policies.DKVDecode(refresh_every=0)
    assert judge(ours, ["refresh_every"]) == Verdict(Outcome.CLEAR)
    assert judge(ours, ["delay"]).outcome == Outcome.UNCLEAR
    assert judge(ours, ["refresh_every"], valid=True).outcome == Outcome.WRONG
    assert judge(lambda: raised(ValueError("refresh_every")), ["refresh_every"]).outcome == Outcome.UNCLEAR
    assert judge(lambda: {}["refresh_every"], ["refresh_every"]).outcome == Outcome.UNCLEAR
    assert judge(lambda: Path("/no/such").read_text(), ["/no/such"]).outcome == Outcome.CLEAR
    assert judge(lambda: 3, [], valid=False).outcome == Outcome.WRONG
    assert judge(lambda: 3, [], check=lambda x: "odd" * (x % 2)) == Verdict(Outcome.WRONG, "odd")
    assert judge(lambda: 3, []) == Verdict(Outcome.RIGHT)


@pytest.mark.parametrize("arguments", [["--seconds", "-1"], ["--seconds", "1", "--only", "nothing"]])
def test_the_command_refuses(arguments):
    with pytest.raises(SystemExit, match="error: --"):
        tyro.cli(main, args=arguments)
