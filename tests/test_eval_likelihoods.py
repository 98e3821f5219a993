"""Log-likelihoods of many pairs: interrupted, resumed, counted, with failures; the bar."""

import pytest
import rich.progress

from dllm_jax.eval.results.record import cost_totals
from dllm_jax.eval.run import likelihoods
from dllm_jax.eval.run.checkpoint import LanguageModel
from dllm_jax.eval.run.journal import Journal
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


def test_an_interrupted_run_resumes_and_no_pair_is_computed_twice(tmp_path, monkeypatch):
    computed = []

    def interrupted(model, prompt, answer, **options):
        if len(computed) == 1:
            raise KeyboardInterrupt
        computed.append(len(set(map(tuple, answer.tolist()))))
        return log_likelihood(model, prompt, answer, **options)

    log_likelihood = likelihoods.log_likelihood
    whole = scorer().run(PAIRS, True)
    monkeypatch.setattr(likelihoods, "log_likelihood", interrupted)
    path = tmp_path / "journal.jsonl"
    with pytest.raises(KeyboardInterrupt):
        scorer().run(PAIRS, True, Journal(path))
    assert len(Journal(path).entries) == 2
    computed.append(0)
    assert answers(scorer().run(PAIRS, True, Journal(path))) == answers(whole)
    assert computed == [2, 0, 1, 1]
    assert len(path.read_text().splitlines()) == 1 + len(PAIRS)  # the first says where the answers are from


def test_a_pair_that_fails_does_not_take_its_mates_along(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    long, empty, mask = ((1,) * 9, (2,)), ((), (2,)), ((tiny("llada").spec.mask_id,), (4,))
    entries = scorer().run([PAIRS[0], long, empty, mask, PAIRS[1]], False, journal)
    assert [entry["error"] is None for entry in entries] == [True, False, False, False, True]
    for entry, reason in zip(
        entries[1:4], ("10 positions; max_positions=9", "both need one", "mask"), strict=True
    ):
        assert reason in entry["error"]
    assert answers(entries)[0] == pytest.approx(scorer().run(PAIRS[:1], False)[0]["answer"], abs=1e-5)
    assert cost_totals(entries)["failed"] == 3


def test_costs_are_counted_without_padding():
    plain = scorer().run(PAIRS, False)
    assert [entry["forwards"] for entry in plain] == [1, 1, 1, 4]  # one draw where it is exact
    assert [entry["computed"] for entry in plain] == [4, 3, 3, 4 * 3]
    guided = scorer(cfg_scale=1.0).run(PAIRS, False)
    assert [entry["forwards"] for entry in guided] == [2, 2, 2, 8]
    greedy = scorer().run(PAIRS, True)
    assert [entry["computed"] for entry in greedy] == [8, 6, 6, 4 * 3 + 2 * 3]
    assert cost_totals(greedy)["forwards"] == 7 + 5


def test_what_determines_a_result_is_in_its_key():
    one = scorer()
    others = [scorer(draws=8), scorer(strata=4), scorer(cfg_scale=1.0)]
    keys = {one.key(PAIRS[0], True), one.key(PAIRS[1], True), one.key(PAIRS[0], False)}
    assert len(keys | {other.key(PAIRS[0], True) for other in others}) == 6


@pytest.mark.parametrize("shown", [True, False])
def test_the_bar_moves_with_every_batch(monkeypatch, shown):
    moved = []
    monkeypatch.setattr(
        rich.progress.Progress, "advance", lambda bar, task, by: moved.append((bar.disable, by))
    )
    scorer().run(PAIRS, False, progress=shown)
    assert moved == [(not shown, 2), (not shown, 1), (not shown, 1)]
