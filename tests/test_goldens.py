"""Recorded decode traces of the reference implementations, replayed through the public API."""

import pathlib

import pytest

from tests.policy_cases import WIDE
from tests.replay.case import Case, UnknownSetting, find
from tests.replay.compare import Differs, Skipped
from tests.replay.methods import METHODS, replay

HERE = pathlib.Path(__file__).parent / "goldens"
FULL = pathlib.Path(__file__).parents[2] / "shared" / "goldens"  # beside a checkout, where it exists

# Shipped cases that run with --exhaustive only: others of the method go through the same rules in the other
# family, without a batch, or with other numbers.
RARELY = {
    "certainty-prior": (
        "dream-nar-sigma10", "dream-nar-sigma5-topp09", "llada-nar-batch2-leftpad", "llada-nar-sigma10",
    ),
    "dpad": ("llada-tiny-none-p13-g48-b8-fixed-w32",),
    "dsb": ("llada-tiny-plain-p13-g32-b8-t0.3",), "dsb-cache": ("llada-tiny-cache-p13-g32-b8-t0.3-pw4",),
    "fast-dllm-dual": (
        "llada-fixed-1tok-p13-g32-b8", "llada-fixed-uneven-p30-g32-b16-s12",
        "llada-threshold0.3-p21-g48-b16", "llada-threshold0.9-p17-g16-b8",
    ),
    "fast-dllm-prefix": (
        "llada-fixed-1tok-p13-g32-b8", "llada-fixed-uneven-p30-g32-b16-s12",
        "llada-threshold0.05-p9-g32-b4", "llada-threshold0.9-p17-g16-b8",
    ),
    "fast-dllm-v2-generate": ("fast-dllm-v2-tiny-tied-p45-n32-b32-s8-t0.2-stop",),
    "llada-v-generate": ("one-image-cfg0p7", "one-image-dllm-cache-Kp4-Kr3-one-row"),
    "llada2-generate": ("llada2-tiny-dense2-v2.0-p11-g24-b8-t0.3-s8",),
    "loglik-llada": ("mc16-b16-one-batch", "single-token-answer"),
    "parallel-threshold": ("llada-threshold0.3-p21-g48-b16", "llada-threshold0.9-p18-g16-b16"),
    "prefix-cache": (
        "dream-dual-threshold", "dream-prefix", "llada-dual", "llada-prefix-batch2-threshold",
    ),
    "sampler-confidence": ("dream-semiar",), "sampler-entropy": ("llada-semiar",),
    "sampler-margin": ("dream-semiar",), "sampler-threshold": ("llada-semiar",),
    "sampler-prophet": ("llada-tiny-p9-g24-b8-s12-a19-99.0-99.0-2.0",),
    "vanilla-dream": ("maskgit-topp0p9",), "vanilla-llada": ("semiar-b8-s16",),
    "window-diffusion": ("llada-tiny-p8-g32-s32-w8-a4-r32",),
}  # fmt: skip


def pytest_generate_tests(metafunc):
    """The shipped cases but for `RARELY`; with --exhaustive all that are recorded, or at hand."""
    if "case" in metafunc.fixturenames:
        everything = metafunc.config.getoption("exhaustive") and FULL.exists()
        cases = [c for c in find(FULL if everything else HERE) if c.method in METHODS]
        rare = {f"{method}/{name}" for method, names in RARELY.items() for name in names}
        marks = lambda case: [pytest.mark.exhaustive] * (case.name in rare)
        conform = [pytest.param(c, marks=marks(c), id=c.name) for c in cases if c.status == "conform"]
        metafunc.parametrize("case", conform)


@pytest.fixture(autouse=True)
def fewest_kinds_of_steps(monkeypatch):
    """Widths change nothing (tests/test_policies.py); `python -m tests.replay` takes the policies' own."""
    monkeypatch.setattr(Case, "widths", WIDE)


def test_conforms(case):
    replay(case)


def test_a_clone_alone_covers_every_supported_method():
    shipped = {case.method for case in find(HERE)}
    # The megabyte of SDAR-MoE's weights has the attention of SDAR and the experts of LLaDA-MoE.
    assert set(METHODS) <= shipped | {"sdar-moe-forward", "sdar-moe-generate"}
    conform = {case.method for case in find(HERE) if case.status == "conform"}
    assert set(METHODS) & shipped - conform <= {"sampler-factor"}, "it has no case with status conform"
    names = {case.name for case in find(HERE)}
    assert {f"{method}/{name}" for method, of_method in RARELY.items() for name in of_method} <= names


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
