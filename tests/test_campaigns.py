"""A fixed sample of every campaign, and how errors are judged."""

import itertools
from pathlib import Path

import pytest

import dllm_jax as dj
from tests.campaigns.__main__ import CAMPAIGNS
from tests.campaigns.verdicts import Outcome, Verdict, judge

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
    """Of the same cases for the same seed."""
    faults, described = [], lambda case: case.description
    cases, again, other = (
        list(itertools.islice(campaign.cases(s), campaign.SAMPLE)) for s in (SEED, SEED, 1)
    )
    assert [*map(described, cases)] == [*map(described, again)] != [*map(described, other)]
    for case in cases[part::PARTS]:
        verdict = case.run()
        faults += [f"{case.description}: {verdict}"] if verdict.outcome.bad else []
    assert not faults, "\n".join(faults)


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
