"""Recorded decode traces of the reference implementations, replayed through the public API."""

import pathlib
import re

import pytest

from tests.policy_cases import WIDE
from tests.replay.case import Case, UnknownSetting, find
from tests.replay.compare import Differs, Skipped
from tests.replay.methods import METHODS, replay

HERE = pathlib.Path(__file__).parent / "goldens"
FULL = pathlib.Path(__file__).parents[2] / "shared" / "goldens"  # beside a checkout, where it exists

# Cases of these that begin alike ("llada-threshold0.3-p21", "llada-threshold0.9-p18") differ in numbers only,
# or are batches, whose sequences a recording makes wait for each other.
SERIES = "fast-dllm-dual", "fast-dllm-prefix", "parallel-threshold", "prefix-cache", "certainty-prior"
BEGINNING = re.compile("[a-z]+-[a-z]+")  # family, and what is decoded


def pytest_generate_tests(metafunc):
    """The shipped cases, of each series those that begin differently.

    With --exhaustive all of them; where all recorded ones are at hand, those.
    """
    if "case" in metafunc.fixturenames:
        everything = metafunc.config.getoption("exhaustive") and FULL.exists()
        cases = [c for c in find(FULL if everything else HERE) if c.method in METHODS]
        conform = [c for c in cases if c.status == "conform"]
        first = {}
        for case in conform:
            first.setdefault(beginning(case), case)
        others = [case for case in conform if case not in first.values()]
        metafunc.parametrize(
            "case",
            [pytest.param(c, marks=[pytest.mark.exhaustive] * (c in others), id=c.name) for c in conform],
        )


@pytest.fixture(autouse=True)
def fewest_kinds_of_steps(monkeypatch):
    """Widths change nothing (tests/test_policies.py); `python -m tests.replay` takes the policies' own."""
    monkeypatch.setattr(Case, "widths", WIDE)


def beginning(case: Case) -> tuple[str, str]:
    """The method, and what of the name tells a case from others of its series; all of it outside of these."""
    method, name = case.name.split("/")
    return method, BEGINNING.match(name)[0] + "-batch" * ("batch" in name) if method in SERIES else name


def test_conforms(case):
    replay(case)


def test_a_clone_alone_covers_every_supported_method():
    shipped = {case.method for case in find(HERE)}
    # The megabyte of SDAR-MoE's weights has the attention of SDAR and the experts of LLaDA-MoE.
    assert set(METHODS) <= shipped | {"sdar-moe-forward", "sdar-moe-generate"}
    conform = {case.method for case in find(HERE) if case.status == "conform"}
    assert set(METHODS) & shipped - conform <= {"sampler-factor"}, "it has no case with status conform"


def test_a_changed_token_is_noticed():
    """The harness itself: a recording with one token changed must not pass."""
    case = next(c for c in find(HERE, "vanilla-llada") if c.status == "conform")
    case.arrays["tokens"][-1, 0, -1] += 1
    with pytest.raises(Differs, match="tokens differs at step"):
        replay(case)


def test_a_changed_confidence_is_noticed():
    case = next(c for c in find(HERE, "fast-dllm-dual") if c.status == "conform")
    case.arrays["confidence"] += 1e-3
    with pytest.raises(Differs, match="confidence differs by"):
        replay(case)


def test_optional_dream_cases_are_skipped_with_their_reason():
    case = next(c for c in find(HERE, "fast-dllm-dual") if c.status == "optional")
    with pytest.raises(Skipped, match="first token of each block"):
        replay(case)


def test_a_setting_that_the_replay_does_not_read_is_refused():
    case = next(c for c in find(HERE, "parallel-threshold") if c.status == "conform")
    case.settings["patience"] = 3
    with pytest.raises(UnknownSetting, match="does not read patience"):
        replay(case)
    case.settings["temperature"] = 0.5
    with pytest.raises(UnknownSetting, match=r"temperature=0.5 is not replayed; supported: \(0.0,\)"):
        replay(case)


def test_factors_are_read():
    fast = next(c for c in find(HERE, "parallel-threshold") if c.status == "conform")
    fast.settings["decoding"], fast.settings["factor"] = "factor", 0.01  # one token at a time
    with pytest.raises(Differs):
        replay(fast)
