"""Tuning: bounds against scipy, the dropping rule, what is chosen, costs; answers are those of a journal."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.eval.results.schema import Decoded, Entry
from dllm_jax.eval.run.checkpoint import Checkpoint
from dllm_jax.eval.run.runner import Request, Runner
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.eval.tuning import Candidate, Objective, Search, Tuned, evidence, read_jsonl
from dllm_jax.eval.tuning.candidates import Shape, candidates, default_block
from dllm_jax.eval.tuning.objectives import (
    Answered,
    BytesMoved,
    CacheBytes,
    MeasuredTime,
    PredictedTime,
    Requests,
)
from dllm_jax.eval.tuning.questions import prompt_ids
from dllm_jax.eval.tuning.search import Given, Walk, exact_decoding
from dllm_jax.policies import Policy
from dllm_jax.published.preset import read
from dllm_jax.roofline import HARDWARE, work
from dllm_jax.tasks import Example
from tests.models import FAMILIES, tiny

DECODING = Decoding(length=4, block=2, steps=4, batch=2)
EXACT = Candidate().filled(DECODING)
QUESTIONS = [Example(f"{i}", "right") for i in range(64)]


@pytest.fixture(scope="module")
def lm():
    return Checkpoint("tiny-llada").open()


# -- bounds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "asked"), [(0, 1), (3, 8), (64, 64), (201, 256)])
def test_intervals_of_accuracies_are_those_of_scipy(right, asked):
    found = evidence.accuracy([1.0] * right + [0.0] * (asked - right), evidence.two_sided(0.9))
    wanted = scipy.stats.binomtest(right, asked).proportion_ci(0.9, method="wilson")
    np.testing.assert_allclose(found, (right / asked, wanted.low, wanted.high), atol=1e-12)


def bonett_price(lost: int, won: int, asked: int, quantile: float) -> tuple[float, float]:
    """From the counts of discordant pairs, as the paper writes it."""
    p12, p21 = (lost + 1) / (asked + 2), (won + 1) / (asked + 2)
    half = quantile * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / (asked + 2))
    return p21 - p12 - half, p21 - p12 + half


@pytest.mark.parametrize(("lost", "won", "asked"), [(0, 0, 8), (8, 0, 8), (5, 2, 32), (0, 9, 128)])
def test_intervals_of_paired_differences_are_those_of_the_paper(lost, won, asked):
    scores = np.r_[np.zeros(lost), np.ones(won), np.ones(asked - lost - won)]
    others = np.r_[np.ones(lost), np.zeros(won), np.ones(asked - lost - won)]
    quantile = scipy.stats.norm.ppf(0.975)
    found = evidence.difference(scores.tolist(), others.tolist(), evidence.two_sided(0.95))
    low, high = bonett_price(lost, won, asked, quantile)
    np.testing.assert_allclose(found, ((won - lost) / asked, max(-1, low), min(1, high)), atol=1e-12)


def test_partial_credit_counts_as_it_is():
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 20))
    d = np.r_[a - b, 1, -1]
    found = evidence.difference(a.tolist(), b.tolist(), 2.0)
    half = 2 * d.std() / math.sqrt(len(d))
    np.testing.assert_allclose(found, ((a - b).mean(), d.mean() - half, d.mean() + half), atol=1e-12)


@pytest.mark.parametrize("comparisons", [1, 5 * 30 * 30])
def test_bounds_share_what_may_go_wrong(comparisons):
    wanted = scipy.stats.norm.isf(0.05 / comparisons)
    assert evidence.one_sided(0.95, comparisons) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("first", "asked", "rounds"),
    [(16, 100, (16, 32, 64, 100)), (8, 8, (8,)), (16, 3, (3,)), (1, 4, (1, 2, 4))],
)
def test_rounds_double(first, asked, rounds):
    assert Search(first=first).rounds(asked) == rounds


# -- the walk, on answers that a journal already holds ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Listed(Objective):
    """Costs from a list."""

    costs: tuple[tuple[Candidate, float], ...]
    unit = "coins"

    def cost(self, candidate, answered, exact):
        assert len(answered) == len(exact) > 0
        return evidence.exactly(dict(self.costs)[candidate])


class Made:
    """A journal that has answers to everything, in memory."""

    def __init__(self, lm, outcomes: dict[Candidate, list[str | None]], questions=QUESTIONS):
        self.entries: dict[str, Entry] = {}
        self.read: list[tuple[Candidate, int]] = []
        for setting, answers in outcomes.items():
            runner = Runner(lm, setting.decoding(DECODING))
            for question, answer in zip(questions, answers, strict=True):
                key = runner.key(Request("", prompt_ids(lm.tokenizer, question), 4))
                self.entries[key] = decoded(key, answer)

    def claim(self):
        raise ValueError("asked for something new")

    def add(self, entries):
        raise AssertionError(list(entries))

    def close(self): ...


def decoded(key: str, answer: str | None = "right", **costs) -> Entry:
    usual = dict(forwards=4, computed=300, widened=0.0, tokens=4, tokens_with_eos=4, seconds=1.0, cold=False)
    return Decoded(key=key, answer=answer, error=None, **usual | costs)


def outcomes(*rights: int, seed: int = 0) -> list[list[str]]:
    """Answers of which so many are right, of which harder questions are wrong in all settings."""
    order = np.random.default_rng(seed).permutation(len(QUESTIONS))
    return [["right" if order[i] < right else "wrong" for i in range(len(QUESTIONS))] for right in rights]


SETTINGS = [
    Candidate(policy).filled(DECODING)
    for policy in (policies.DualCache(), policies.PrefixCache(), policies.DKVDecode(), policies.DKVPrefill())
]


def walked(lm, answers: list[list[str]], costs, **options) -> Tuned:
    """The exact decoder and SETTINGS with these answers and costs."""
    settings = (EXACT, *SETTINGS)
    listed = Listed(tuple(zip(settings, costs, strict=True)))
    ledger = Made(lm, dict(zip(settings, answers, strict=True)))
    options = {"objective": listed, "first": 8, "accuracy_within": 0.05, **options}
    return Search(**options).run(lm, QUESTIONS, DECODING, SETTINGS, ledger)


def test_the_cheapest_within_the_tolerance_is_chosen(lm):
    """Two of 64 are within five points, seven are not; what is hopeless is dropped early."""
    found = walked(lm, outcomes(60, 58, 60, 53, 0), costs=(9.0, 5.0, 7.0, 4.0, 1.0))
    assert found.chosen.setting == SETTINGS[0]
    assert [row.setting for row in found.front] == [SETTINGS[2], SETTINGS[0], SETTINGS[1]]
    assert found.rows[0].setting == EXACT
    assert [row.questions for row in found.rows[:-1]] == [64] * 4
    hopeless = found.rows[-1]
    assert hopeless.questions < 64
    assert "less accurate than the exact decoder" in hopeless.dropped
    assert [row.accuracy.value for row in found.rows] == [60 / 64, 58 / 64, 60 / 64, 53 / 64, 0]
    assert (
        walked(lm, outcomes(60, 58, 60, 53, 0), (9.0, 5.0, 7.0, 4.0, 1.0), accuracy_within=0).chosen.setting
        == (SETTINGS[1])
    )


def test_the_exact_decoder_is_chosen_if_it_is_cheapest_or_nothing_is_as_good(lm):
    answers = outcomes(60, 58, 60, 53, 50)
    assert walked(lm, answers, costs=(1.0, 2.0, 2.0, 2.0, 2.0)).chosen.setting == EXACT
    assert walked(lm, outcomes(64, 0, 0, 0, 0), costs=(9.0, 1.0, 1.0, 1.0, 1.0)).chosen.setting == EXACT


def test_a_tie_goes_to_the_more_accurate(lm):
    found = walked(lm, outcomes(60, 58, 59, 58, 57), costs=(9.0, 1.0, 1.0, 1.0, 1.0))
    assert found.chosen.setting == SETTINGS[1]


def test_all_rounds_are_left_out_once_nothing_is_left(lm):
    found = walked(lm, outcomes(64, 0, 0, 0, 0), costs=(9.0, 1.0, 1.0, 1.0, 1.0))
    assert all(row.dropped for row in found.rows[1:])
    assert found.exact.questions == max(row.questions for row in found.rows) < 64


def test_rounds_hold_a_mixture_of_questions(lm):
    """A setting that fails on the kind that comes first in the list is not judged by that kind alone."""
    answers = [["right"] * 64, ["wrong"] * 8 + ["right"] * 56]
    ledger = Made(lm, dict(zip((EXACT, SETTINGS[0]), answers, strict=True)))
    listed = Listed(((EXACT, 2.0), (SETTINGS[0], 1.0)))
    found = Search(objective=listed, first=8, accuracy_within=0.2).run(
        lm, QUESTIONS, DECODING, SETTINGS[:1], ledger
    )
    assert found.chosen.setting == SETTINGS[0]
    assert found.chosen.questions == 64


def given(rights: np.ndarray) -> Given:
    entries = tuple(decoded(f"{i}") for i in range(len(rights)))
    return Given(entries, tuple(float(r) for r in rights))


def walk(lm, costs) -> Walk:
    listed = Listed(tuple(zip((EXACT, *SETTINGS), costs, strict=True)))
    requests = [Request(f"{i}", (1, 2), 4) for i in range(64)]
    search = Search(objective=listed, first=16, accuracy_within=0.1)
    return Walk(search, lm, QUESTIONS, requests, DECODING, listed, tuple(SETTINGS), None, False)


@pytest.mark.parametrize("seed", range(6))
def test_the_dropping_rule_is_that_of_bounds_computed_anew(lm, seed):
    rng, costs = np.random.default_rng(seed), (5.0, 4.0, 3.0, 2.0, 2.0)
    asked = int(rng.choice([16, 32, 64]))
    rates = rng.choice([0.2, 0.5, 0.8, 1.0], size=5)
    rights = rng.random((5, asked)) < rates[:, None]
    settings = (EXACT, *SETTINGS)
    found = walk(lm, costs).verdicts(dict(zip(settings, map(given, rights), strict=True)), range(64))

    # Three rounds of four settings, each compared with the exact decoder and the three others.
    quantile = scipy.stats.norm.isf(0.05 / (3 * 4 * 4))

    def surely_below(i: int, j: int, by: float) -> bool:
        lost, won = np.sum(rights[j] & ~rights[i]), np.sum(rights[i] & ~rights[j])
        return bonett_price(int(lost), int(won), asked, quantile)[1] < -by

    for i, setting in enumerate(SETTINGS, start=1):
        dominated = any(costs[j] <= costs[i] and surely_below(i, j, 0) for j in range(5) if j != i)
        assert (setting in found) == (surely_below(i, 0, 0.1) or dominated)


def test_the_rule_drops_both_kinds_and_keeps_others(lm):
    """So that the test above tests something."""
    most, half, few = (np.arange(64) < n for n in (64, 40, 4))
    rights = dict(zip((EXACT, *SETTINGS), map(given, (half, most, half, few, half)), strict=True))
    found = walk(lm, (5.0, 3.0, 4.0, 2.0, 2.0)).verdicts(rights, range(64))
    assert found.keys() == {SETTINGS[1], SETTINGS[2]}
    assert found[SETTINGS[1]] == "costs no less and is less accurate than DualCache()"
    assert "points less accurate than the exact decoder" in found[SETTINGS[2]]


def test_a_range_of_costs_that_overlaps_is_no_dominance(lm):
    class Ranged(Listed):
        def cost(self, candidate, answered, exact):
            value = dict(self.costs)[candidate]
            return evidence.Estimate(value, value - 1, value + 1)

    most, half = (np.arange(64) < n for n in (64, 40))
    rights = dict(zip((EXACT, *SETTINGS), map(given, (half, most, half, half, half)), strict=True))
    costs = (9.0, 3.0, 4.0, 5.0, 2.0)
    sure = walk(lm, costs).verdicts(rights, range(64))
    assert sure.keys() == {SETTINGS[1], SETTINGS[2]}
    ranged = dataclasses.replace(walk(lm, costs), objective=Ranged(walk(lm, costs).objective.costs))
    assert ranged.verdicts(rights, range(64)).keys() == {SETTINGS[2]}


def test_a_setting_that_fails_is_dropped_and_the_exact_decoder_must_not(lm):
    settings = (EXACT, *SETTINGS)
    failed = Entry(key="k", answer=None, error="RuntimeError: out of memory")
    half = np.arange(16) % 2 == 0
    broken = dict.fromkeys(settings, given(half)) | {SETTINGS[0]: Given((failed,) * 16, (0.0,) * 16)}
    found = walk(lm, (1.0,) * 5).verdicts(broken, range(64))
    assert found == {SETTINGS[0]: "failed: RuntimeError: out of memory"}

    asked = [Example([lm.model.spec.mask_id], "right")]  # a prompt that is refused
    with pytest.raises(RuntimeError, match=r"the exact decoder failed on question 0: ValueError: .*mask id"):
        Search(objective="bytes").run(lm, asked, DECODING, [policies.DualCache()])


# -- scores and questions -----------------------------------------------------------------------------------


def test_the_scorer_gets_the_answer_and_the_callers_own_question(lm):
    @dataclasses.dataclass(frozen=True)
    class Graded:
        prompt: str
        answer: str
        credit: float

    asked = [Graded(q.prompt, q.answer, 0.25) for q in QUESTIONS]
    settings = (EXACT, SETTINGS[0])
    ledger = Made(lm, dict(zip(settings, outcomes(64, 32), strict=True)))
    listed = Listed(tuple((s, 1.0) for s in settings))
    score = lambda answer, question: question.credit * (answer == question.answer)
    found = Search(objective=listed, score=score).run(lm, asked, DECODING, SETTINGS[:1], ledger)
    assert [row.accuracy.value for row in found.rows] == [0.25, 0.125]
    with pytest.raises(ValueError, match=r"score gave 7 for the answer 'right'; it must lie in \[0, 1\]"):
        Search(objective=listed, score=lambda *_: 7).run(lm, asked, DECODING, SETTINGS[:1], ledger)


def test_prompts_are_text_messages_or_ids(lm):
    text, messages = Example("ab", ""), Example([{"role": "user", "content": "ab"}], "")
    ids = prompt_ids(lm.tokenizer, text)
    assert ids == prompt_ids(lm.tokenizer, messages) == prompt_ids(lm.tokenizer, Example(np.asarray(ids), ""))
    for bad in (3, [], ["a", 1.5], None):
        with pytest.raises(ValueError, match="must be text, messages, or token ids"):
            prompt_ids(lm.tokenizer, Example(bad, ""))


def test_questions_of_a_file(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"prompt": "a\\u2028b", "answer": "1"}\n\n{"prompt": [3, 4], "answer": "2", "more": 1}\n'
    )
    assert read_jsonl(path) == [Example("a\u2028b", "1"), Example([3, 4], "2")]
    for bad in ("{", "[]", '{"prompt": "a"}', '{"prompt": "a", "answer": 1}'):
        path.write_text(f'{{"prompt": "a", "answer": "1"}}\n{bad}\n')
        with pytest.raises(ValueError, match=r"q\.jsonl:2: (not JSON|no object with)"):
            read_jsonl(path)
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "none.jsonl")


def test_what_the_caller_leaves_open_follows_from_the_answers(lm):
    asked = [Example("a", "1" * n) for n in (3, 8)]
    found = exact_decoding(Decoding(policy=policies.DualCache()), lm.tokenizer, asked)
    assert (found.policy, found.length, found.block, found.steps) == (Policy(), 12, 4, 12)
    assert exact_decoding(Decoding(block=5), lm.tokenizer, asked).length == 10
    lengths = (4, 6, 8, 32, 64, 128, 256, 512, 100)
    assert [default_block(n) for n in lengths] == [4, 6, 4, 8, 16, 32, 32, 32, 4]


# -- grids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [4, 32])
def test_every_grid_holds_settings_that_a_model_can_decode_with(family, length):
    exact = Decoding(length=length, block=4, steps=length)
    found = candidates(None, Shape(64, exact))
    kinds = {type(one.policy) for one in found}
    assert kinds == {type(policy) for policy in policies.ALL}
    assert len(set(found)) == len(found) < 50
    assert all(one.sampler and one.block and one.steps for one in found)
    shapes = set()
    for one in found:  # settings that differ in numbers alone are of one program
        shape = (type(one.policy), type(one.sampler), one.block, one.steps)
        if shape not in shapes:
            one.check(tiny(family), exact, 64)
        shapes.add(shape)


def test_grids_scale_with_the_request():
    at = lambda prompt, length, block: candidates(
        None, Shape(prompt, Decoding(length=length, block=block, steps=length))
    )
    short, long = at(64, 4, 4), at(2048, 256, 32)
    budgets = lambda grid: sorted({c.policy.budget for c in grid if isinstance(c.policy, policies.MaskKV)})
    assert (budgets(short), budgets(long)) == ([8, 16, 32], [256, 512, 1024])
    assert {c.block for c in short} == {4}
    assert {c.block for c in long} == {32, 256}
    assert {c.steps for c in long} == {64, 128, 256}


def test_a_class_stands_for_its_grid_and_a_policy_for_itself():
    at = Shape(64, Decoding(length=32, block=4, steps=32, sampler=samplers.Confidence(temperature=0.5)))
    assert candidates([policies.DualCache()], at) == (
        Candidate(policies.DualCache(), at.exact.sampler, 4, 32),
    )
    grid = candidates([policies.DualCache, policies.DualCache], at)
    assert {type(c.policy) for c in grid} == {policies.DualCache}
    assert {c.block for c in grid} == {4, 32}
    threshold = next(c.sampler for c in grid if isinstance(c.sampler, samplers.Threshold))
    assert threshold.temperature == 0.5
    own = Candidate(policies.SparseDLLM(), samplers.Factor(2.0), 8, 16)
    assert candidates([own, Candidate()], at) == (own,)


def test_end_of_text_cannot_come_last_in_random_order():
    last = samplers.Confidence(confidence_eos_eot_inf=True)
    found = candidates(None, Shape(64, Decoding(length=8, block=4, steps=8, sampler=last)))
    assert policies.DKVGreedy not in {type(c.policy) for c in found}


# -- costs --------------------------------------------------------------------------------------------------


def requests_of(model, **changes) -> Requests:
    return Requests(
        model.spec, model.dtype, dataclasses.replace(DECODING, length=8, block=4, steps=8, **changes)
    )


def answered(count: int = 1, prompt: int = 64, **costs) -> list[Answered]:
    return [Answered(prompt, decoded(f"{i}", **{"forwards": 8, **costs})) for i in range(count)]


def test_bytes_are_those_of_the_roofline():
    model = tiny("llada")
    of, layout = requests_of(model), dj.Layout(64, 8, 4, 8, padded=True)
    dual = Candidate(policies.DualCache()).filled(of.decoding)
    moved = lambda layout: sum(
        k.count * k.cost.bytes for k in work(model.spec, dual.policy, layout, 2, jnp.float32).steps
    )
    cost = lambda setting, answers: BytesMoved(of).cost(setting, answers, answers).value
    assert cost(dual, answered()) == pytest.approx(moved(layout) / 2)
    assert cost(dual, answered(forwards=4)) == pytest.approx(moved(layout) / 4)  # ended at half of the steps
    # One step in which the first block is sure, three in the other: four, whatever the schedule.
    parallel = dataclasses.replace(dual, sampler=samplers.Threshold(0.9))
    fewer = dataclasses.replace(layout, steps=4)
    assert cost(parallel, answered(forwards=4)) == pytest.approx(moved(fewer) / 2)
    mixed = answered() + answered(prompt=128)
    assert cost(dual, mixed) == pytest.approx((cost(dual, mixed[:1]) + cost(dual, mixed[1:])) / 2)


def test_predicted_time_is_that_of_the_accelerator():
    of = requests_of(tiny("llada"))
    dual, layout = Candidate(policies.DualCache()).filled(of.decoding), dj.Layout(64, 8, 4, 8, padded=True)
    made = work(of.spec, dual.policy, layout, 2, of.dtype)
    times = [
        PredictedTime(of, HARDWARE[name]).cost(dual, answered(), answered()).value for name in ("h100", "v5e")
    ]
    assert times == pytest.approx([1e3 * made.on(HARDWARE[name]).seconds / 2 for name in ("h100", "v5e")])
    assert times[0] < times[1]


def test_measured_drift_enters_the_prediction():
    of = requests_of(tiny("llada"))
    elastic = Candidate(policies.ElasticCache(window=2)).filled(of.decoding)
    calm, drifting = answered(computed=8 * 20), answered(computed=8 * 20 + 200, widened=200.0)
    cost = lambda answers: BytesMoved(of).cost(elastic, answers, answers).value
    assert cost(drifting) > cost(calm)


def test_memory_is_what_the_policy_stores_for_the_longest_prompt():
    model, of = tiny("dream"), requests_of(tiny("dream"))
    kept = Candidate(policies.SparseDLLM(keep=0.5)).filled(of.decoding)
    found = CacheBytes(of).cost(kept, answered() + answered(prompt=128), answered(2)).value
    cache = kept.policy.init(model.spec, dj.Layout(128, 8, 4, 8, padded=True), 1, jnp.float32)
    assert found == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_memory_ranks_caches_only(lm):
    ledger = Made(lm, dict(zip((EXACT, *SETTINGS[:2]), outcomes(60, 60, 60), strict=True)))
    search = Search(objective="memory", accuracy_within=0.05)
    found = search.run(lm, QUESTIONS, DECODING, SETTINGS[:2], ledger)
    assert found.chosen.setting in SETTINGS[:2]
    assert EXACT not in [row.setting for row in found.front]
    assert found.figure()

    hopeless = Made(lm, dict(zip((EXACT, SETTINGS[0]), outcomes(64, 0), strict=True)))
    none = search.run(lm, QUESTIONS, DECODING, SETTINGS[:1], hopeless)
    assert (none.front, none.chosen) == ((), none.exact)
    assert none.figure()

    # The exact decoder, which stores nothing, drops nothing that is worse but within the tolerance.
    ledger = Made(lm, dict(zip((EXACT, SETTINGS[0]), outcomes(64, 40), strict=True)))
    loose = dataclasses.replace(search, accuracy_within=0.9)
    assert loose.run(lm, QUESTIONS, DECODING, SETTINGS[:1], ledger).chosen.setting == SETTINGS[0]
    with pytest.raises(ValueError, match="does not rank a policy that stores nothing"):
        search.run(lm, QUESTIONS, DECODING, [Candidate(steps=2)], ledger)
    grid = candidates(
        [Policy, policies.DualCache], Shape(64, DECODING), CacheBytes(requests_of(lm.model)).ranks
    )
    assert {type(c.policy) for c in grid} == {policies.DualCache}


def test_time_is_relative_to_the_exact_decoder_and_of_warm_answers():
    ours = [answered(seconds=s)[0] for s in (1.0, 2.0, 9.0)] + answered(seconds=50.0, cold=True)
    exact = [answered(seconds=s)[0] for s in (2.0, 2.0, 3.0, 1.0)]
    assert MeasuredTime().cost(EXACT, ours, exact) == (1.0, 0.5, 3.0)
    with pytest.raises(ValueError, match="include compilation"):
        MeasuredTime().cost(EXACT, ours[3:], exact[3:])


# -- results ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(lm) -> Tuned:
    return walked(lm, outcomes(60, 58, 60, 53, 0), costs=(9.0, 5.0, 7.0, 4.0, 1.0))


def test_the_preset_is_read_back(found, tmp_path):
    path = tmp_path / "tune.toml"
    path.write_text(found.preset_toml("ours"))
    presets = read(path)
    assert presets == {"tiny-llada/ours": found.preset}
    preset = found.preset
    assert (preset.policy, preset.sampler) == (policies.DualCache(), samplers.Confidence())
    assert (preset.length, preset.block, preset.steps) == (4, 2, 4)
    assert "64 questions of tiny-llada" in preset.source


@dataclasses.dataclass(frozen=True)
class Mine(policies.DualCache):
    """A policy that the library does not know."""


def test_a_policy_that_cannot_be_read_back_has_no_preset(found):
    rows = [
        dataclasses.replace(row, setting=dataclasses.replace(row.setting, policy=Mine()))
        for row in found.rows
    ]
    with pytest.raises(ValueError, match="Mine"):
        dataclasses.replace(found, rows=tuple(rows)).preset_toml()


def test_the_table_and_the_figure_show_every_setting(found):
    table, figure = found.table(), found.figure()
    assert table.row_count == len(found.rows)
    cells = list(table.columns[-1].cells)
    assert list(table.columns[0].cells)[:3] == ["DKVDecode()", "DualCache()", "PrefixCache()"]
    assert cells[:3] == ["front", "[bold]chosen[/]", "front"]
    axes = figure.axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert "Policy" in labels
    assert "DKVPrefill, dropped" in labels
    assert "chosen: DualCache()" in labels
    assert axes.get_xlabel() == "coins"


def test_the_description_is_plain_json(found):
    import json

    described = json.loads(json.dumps(found.described()))
    chosen = described["rows"][described["chosen"]]
    assert chosen["policy"] == "DualCache()"
    assert chosen["accuracy"]["value"] == pytest.approx(58 / 64)
    assert [described["rows"][i]["cost"]["value"] for i in described["front"]] == [4.0, 5.0, 7.0]


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"accuracy_within": 1}, r"accuracy_within=1 must be a number in \[0, 1\)"),
        ({"accuracy_within": -0.1}, r"accuracy_within=-0.1 must be a number in \[0, 1\)"),
        ({"objective": "speed"}, "objective='speed' must be one of 'time', 'bytes', 'memory'"),
        ({"objective": 3}, "objective=3 must be one of"),
        ({"accelerator": "b9000"}, "accelerator='b9000' must be one of h100, h200"),
        ({"objective": "bytes", "accelerator": "h100"}, "it needs objective='time', not 'bytes'"),
        ({"first": 0}, "first=0 must be a whole number of at least 1"),
        ({"confidence": 1.0}, r"confidence=1.0 must be a number in \(0, 1\)"),
        ({"score": "exact"}, "score='exact' must be a function"),
    ],
)
def test_bad_options_are_refused(unannotated, options, reason):
    with pytest.raises(ValueError, match=reason):
        Search(**options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"questions": []}, "questions are empty"),
        ({"questions": "what?"}, "questions='what\\?' must be pairs"),
        ({"questions": [("a", 3)]}, r"questions hold \('a', 3\): they must be pairs"),
        ({"questions": [3]}, "questions hold 3"),
        ({"policies": []}, "nothing but the exact decoder"),
        ({"policies": [Policy()]}, "nothing but the exact decoder"),
        ({"policies": policies.DualCache()}, r"policies=DualCache\(\) must be a list"),
        ({"policies": ["DualCache"]}, "policies hold 'DualCache', which is no policy"),
        ({"policies": [Candidate(block=3)]}, "candidate Policy.*length=4 must be a multiple of block=3"),
        ({"policies": [policies.DKVGreedy()]}, "candidate DKVGreedy"),
        ({"model": 3}, "model=3 must be"),
        ({"tokenizer": 3}, "tokenizer=3 must be"),
        ({"length": 0}, "length=0 must be"),
        ({"progress": 1}, "progress=1 must be True or False"),
    ],
)
def test_bad_arguments_are_refused(lm, unannotated, options, reason):
    usual = dict(model=lm.model, tokenizer=lm.tokenizer, questions=QUESTIONS[:1], length=4, block=2)
    usual |= dict(policies=[policies.DualCache()], objective="bytes")
    with pytest.raises(ValueError, match=reason):
        dj.tune(**usual | options)
