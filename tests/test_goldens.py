"""Recorded decode traces of the reference implementations, replayed through the public API."""

import pathlib

import pytest

from tests.policy_cases import WIDE
from tests.replay.case import Case, UnknownSetting, find
from tests.replay.compare import Differs, Skipped
from tests.replay.methods import METHODS, replay

HERE = pathlib.Path(__file__).parent / "goldens"
FULL = pathlib.Path(__file__).parents[2] / "shared" / "goldens"  # next to a checkout, where it exists

# Of all other methods one case of each family runs every day: those that are left go through the same rules
# with other numbers.
EVERY_CASE = "dsb", "forward", "llada-v-preprocess", "sdar-generate", "stable-diffcoder-generate"
EVERY_CASE += "vanilla-dream", "vanilla-llada", "diffusion-gemma-forward", "diffusion-gemma-generate"


def pytest_generate_tests(metafunc):
    """The conforming cases that are shipped; with --exhaustive all that are recorded, if they are at hand."""
    if "case" in metafunc.fixturenames:
        everything = metafunc.config.getoption("exhaustive") and FULL.exists()
        cases = [c for c in find(FULL if everything else HERE) if c.method in METHODS]
        params, seen = [], set()
        for case in (c for c in cases if c.status == "conform"):
            of = case.method, case.folder.name.split("-")[0]
            rare = of in seen and case.method not in EVERY_CASE
            params.append(pytest.param(case, marks=[pytest.mark.exhaustive] * rare, id=case.name))
            seen.add(of)
        metafunc.parametrize("case", params)


@pytest.fixture(autouse=True)
def fewest_kinds_of_steps(monkeypatch):
    """Widths change nothing (tests/test_policies.py); `python -m tests.replay` takes the policies' own."""
    monkeypatch.setattr(Case, "widths", WIDE)


def test_conforms(case):
    replay(case)


def test_a_clone_alone_covers_every_supported_method():
    shipped = {case.method for case in find(HERE)}
    # The megabyte of SDAR-MoE's weights has the attention of SDAR and the experts of LLaDA-MoE. That of an
    # untied SDAR shows S2D2's shadow block, of which tests/test_samplers_s2d2.py has exact limits.
    assert set(METHODS) <= shipped | {"sdar-moe-forward", "sdar-moe-generate", "s2d2-sdar"}
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
