"""Log-likelihoods of many pairs: counted, with failures; the bar."""

import pytest
import rich.progress

from dllm_jax.eval.results.record import cost_totals
from dllm_jax.eval.run.checkpoint import LanguageModel
from dllm_jax.eval.run.likelihoods import Likelihood
from dllm_jax.eval.run.settings import Decoding
from tests.models import tiny

PAIRS = [((1, 2, 3), (4,)), ((3, 2), (5,)), ((2, 2), (6,)), ((5,), (3, 4))]  # three of a shape, one alone


def scorer(**changes) -> Likelihood:
    lm = LanguageModel("tiny", tiny("llada"), None, "weights")
    decoding = Decoding(batch=2, bucket=4, max_positions=9)
    return Likelihood(lm, decoding, **{"draws": 4, "strata": 2, **changes})


def answers(entries) -> list[list]:
    return [entry["answer"] for entry in entries]


def test_a_pair_that_cannot_be_scored_fails_alone():
    long, empty, mask = ((1,) * 9, (2,)), ((), (2,)), ((tiny("llada").spec.mask_id,), (4,))
    entries = scorer(greedy_check=False).run([PAIRS[0], long, empty, mask, PAIRS[1]])
    reasons = (None, "10 positions; max_positions=9", "both need one", "mask", None)
    for entry, reason in zip(entries, reasons, strict=True):
        assert (entry["error"] is None) if reason is None else (reason in entry["error"])
    alone = scorer(greedy_check=False).run(PAIRS[:1])
    assert answers(entries)[0] == pytest.approx(answers(alone)[0], abs=1e-5)
    assert cost_totals(entries)["failed"] == 3


def test_costs_are_counted_without_padding():
    plain = scorer(greedy_check=False).run(PAIRS)
    assert [entry["forwards"] for entry in plain] == [1, 1, 1, 4]  # one draw where it is exact
    assert [entry["computed"] for entry in plain] == [4, 3, 3, 4 * 3]
    guided = scorer(cfg_scale=1.0, greedy_check=False).run(PAIRS)
    assert [entry["forwards"] for entry in guided] == [2, 2, 2, 8]
    greedy = scorer().run(PAIRS)
    assert [entry["computed"] for entry in greedy] == [8, 6, 6, 4 * 3 + 2 * 3]
    assert cost_totals(greedy)["forwards"] == 7 + 5


def test_what_determines_a_result_is_in_its_key():
    one = scorer()
    others = [scorer(draws=8), scorer(strata=4), scorer(cfg_scale=1.0)]
    keys = {one.key(PAIRS[0]), one.key(PAIRS[1]), scorer(greedy_check=False).key(PAIRS[0])}
    assert len(keys | {other.key(PAIRS[0]) for other in others}) == 6


@pytest.mark.parametrize("shown", [True, False])
def test_the_bar_moves_with_every_batch(monkeypatch, shown):
    moved = []
    monkeypatch.setattr(
        rich.progress.Progress, "advance", lambda bar, task, by: moved.append((bar.disable, by))
    )
    scorer(greedy_check=False, progress=shown).run(PAIRS)
    assert moved == [(not shown, 2), (not shown, 1), (not shown, 1)]
