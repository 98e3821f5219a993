"""Tuning: bounds against scipy, the dropping rule, what is chosen, costs; answers are those of a journal."""

import dataclasses
import io
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import scipy.stats

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers
from dllm_jax.eval.cli.tune import named_candidates, read_jsonl
from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.eval.run.settings import Decoding, LanguageModel
from dllm_jax.eval.tuning import Candidate, Objective, Search, Tuned, evidence
from dllm_jax.eval.tuning.candidates import candidates, default_block, taken
from dllm_jax.eval.tuning.objectives import MeasuredTime, objective_for
from dllm_jax.eval.tuning.questions import as_questions, question_ids
from dllm_jax.eval.tuning.search import exact_decoding
from dllm_jax.policies import Policy
from dllm_jax.published.preset import read_preset
from dllm_jax.roofline import HARDWARE, work
from dllm_jax.tasks import Example, ReadNumbers, examples
from tests.models import tiny

DECODING = Decoding(length=4, block=2, steps=4, batch=2)
EXACT = Candidate().filled(DECODING)
SETTINGS = [
    Candidate(policy).filled(DECODING)
    for policy in (policies.DualCache(), policies.PrefixCache(), policies.DKVDecode(), policies.DKVPrefill())
]
REQUESTS = [
    EvalRequest(f"{i}", (1, 2, i), 4, score=lambda answer: float(answer == "right")) for i in range(64)
]


@pytest.mark.parametrize(("right", "asked"), [(0, 1), (3, 8), (64, 64), (201, 256)])
def test_intervals_of_accuracies_are_those_of_scipy(right, asked):
    found = evidence.accuracy_estimate([1.0] * right + [0.0] * (asked - right), evidence.quantile(0.9, 2))
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
    found = evidence.difference(scores.tolist(), others.tolist(), evidence.quantile(0.95, 2))
    low, high = bonett_price(lost, won, asked, scipy.stats.norm.ppf(0.975))
    np.testing.assert_allclose(found, ((won - lost) / asked, max(-1, low), min(1, high)), atol=1e-12)


@dataclasses.dataclass(frozen=True)
class Listed(Objective):
    """Costs from a list, of the exact decoder and SETTINGS, give or take."""

    costs: tuple[float, ...]
    slack: float = 0.0
    unit: str = "coins"

    def cost(self, candidate, answered, exact):
        assert len(answered) == len(exact) > 0
        value = self.costs[(EXACT, *SETTINGS).index(candidate)]
        return evidence.Estimate(value, value - self.slack, value + self.slack)


class Made(Journal):
    """A journal in memory that has answers to everything."""

    def __init__(self, lm: LanguageModel, outcomes: list[list[str]]):
        self.entries: dict[str, Entry] = {}
        for setting, answers in zip((EXACT, *SETTINGS), outcomes, strict=False):
            runner = Runner(lm, dataclasses.replace(DECODING, **vars(setting)))
            for request, answer in zip(REQUESTS, answers, strict=True):
                self.entries[runner.key(request)] = decoded(runner.key(request), answer)

    def claim(self):
        raise AssertionError("asked for something new")

    def close(self): ...


def decoded(key: str, answer: str | None = "right", **costs) -> Entry:
    usual = dict(forwards=4, computed=300, widened=0.0, tokens=4, tokens_with_eos=4, seconds=1.0)
    return Entry(key=key, answer=answer, error=None, **usual | costs)


def outcomes(*rights: int) -> list[list[str]]:
    """Answers of which so many are right, of which harder questions are wrong in all settings."""
    order = np.random.default_rng(0).permutation(len(REQUESTS))
    return [["right" if hard < right else "wrong" for hard in order] for right in rights]


def walked(answers: list[list[str]], costs, **options) -> Tuned:
    lm, objective = LanguageModel("tiny-llada", tiny("llada"), None, "weights"), Listed(costs)
    search = Search(**{"objective": objective, "first": 8, "accuracy_within": 0.05, **options})
    settings = (EXACT, *SETTINGS)[: len(answers)]
    runners = {s: Runner(lm, dataclasses.replace(DECODING, **vars(s))) for s in settings}
    rows = search.walk(REQUESTS, runners, objective, Made(lm, answers))
    return Tuned(rows, lm.name, 4, objective.unit, search.accuracy_within, search.confidence)


@pytest.fixture(scope="module")
def found() -> Tuned:
    """Two of 64 are within five points, seven are not; what is hopeless is dropped early."""
    return walked(outcomes(60, 58, 60, 53, 0), costs=(9.0, 5.0, 7.0, 4.0, 1.0))


def test_the_cheapest_within_the_tolerance_is_chosen(found):
    assert [row.setting for row in (found.chosen, *found.front)] == [SETTINGS[i] for i in (0, 2, 0, 1)]
    assert found.rows[0].setting == EXACT
    assert [row.questions for row in found.rows[:-1]] == [64] * 4
    assert found.rows[-1].questions < 64
    assert "less accurate than the exact decoder" in found.rows[-1].dropped
    assert [row.accuracy.value for row in found.rows] == [60 / 64, 58 / 64, 60 / 64, 53 / 64, 0]
    for rights, costs, chosen, options in (
        ((60, 58, 60, 53, 0), (9.0, 5.0, 7.0, 4.0, 1.0), 2, {"accuracy_within": 0}),
        ((60, 58, 60, 53, 50), (1.0, 2.0, 2.0, 2.0, 2.0), 0, {}),  # the exact decoder is cheapest
        ((60, 58, 59, 58, 57), (9.0, 1.0, 1.0, 1.0, 1.0), 2, {}),  # a tie goes to the more accurate
        ((64, 0, 0, 0, 0), (9.0, 1.0, 1.0, 1.0, 1.0), 0, {}),
    ):
        other = walked(outcomes(*rights), costs, **options)
        assert other.chosen.setting == (EXACT, *SETTINGS)[chosen]
    # Rounds are left out once nothing is left.
    assert all(row.dropped for row in other.rows[1:])
    assert other.exact.questions == max(row.questions for row in other.rows) < 64


def given(*rights: np.ndarray) -> dict:
    """Scored answers of the exact decoder and SETTINGS."""
    scored = [[decoded(f"{i}") | {"score": float(r)} for i, r in enumerate(row)] for row in rights]
    return dict(zip((EXACT, *SETTINGS), scored, strict=True))


def verdicts(answers: dict, costs, within: float = 0.1, slack: float = 0.0, bounds: int = 3 * 4 * 4) -> dict:
    priced = {s: evidence.Estimate(c, c - slack, c + slack) for s, c in zip(answers, costs, strict=True)}
    return Search(accuracy_within=within).verdicts(answers, priced, bounds)


@pytest.mark.parametrize("seed", range(6))
def test_the_dropping_rule_is_that_of_bounds_computed_anew(seed):
    rng, costs = np.random.default_rng(seed), (5.0, 4.0, 3.0, 2.0, 2.0)
    asked = int(rng.choice([16, 32, 64]))
    rates = rng.choice([0.2, 0.5, 0.8, 1.0], size=5)
    rights = rng.random((5, asked)) < rates[:, None]
    found = verdicts(given(*rights), costs)

    # Three rounds of four settings, each compared with the exact decoder and the three others.
    quantile = scipy.stats.norm.isf(0.05 / (3 * 4 * 4))

    def surely_below(i: int, j: int, by: float) -> bool:
        lost, won = np.sum(rights[j] & ~rights[i]), np.sum(rights[i] & ~rights[j])
        return bonett_price(int(lost), int(won), asked, quantile)[1] < -by

    for i, setting in enumerate(SETTINGS, start=1):
        dominated = any(costs[j] <= costs[i] and surely_below(i, j, 0) for j in range(5) if j != i)
        assert (setting in found) == (surely_below(i, 0, 0.1) or dominated)


def test_the_rule_drops_both_kinds_and_keeps_others():
    """So that the test above tests something; a range of costs that overlaps is no dominance."""
    answers = given(*(np.arange(64) < n for n in (40, 64, 40, 4, 40)))
    costs = (5.0, 3.0, 4.0, 2.0, 2.0)
    found = verdicts(answers, costs)
    assert found.keys() == {SETTINGS[1], SETTINGS[2]}
    assert found[SETTINGS[1]] == "costs no less and is less accurate than DualCache()"
    assert "points less accurate than the exact decoder" in found[SETTINGS[2]]
    assert verdicts(answers, costs, slack=1.0).keys() == {SETTINGS[2]}

    # A setting that fails is dropped, and dominates no other.
    failed = Entry(key="k", answer=None, error="RuntimeError: out of memory")
    answers[SETTINGS[0]] = [failed | {"score": 1.0}] * 64
    reasons = {SETTINGS[0]: "failed: RuntimeError: out of memory", SETTINGS[2]: found[SETTINGS[2]]}
    assert verdicts(answers, costs) == reasons


def test_bounds_share_what_may_go_wrong_among_settings_rivals_and_rounds(monkeypatch):
    """Four settings, rounds of 8, 16, 32, 64; the rows' own intervals have two sides each."""
    seen, quantile = set(), evidence.quantile
    monkeypatch.setattr(evidence, "quantile", lambda *args: seen.add(args) or quantile(*args))
    walked(outcomes(60, 58, 60, 53, 60), (9.0, 5.0, 7.0, 4.0, 1.0), confidence=0.9)
    assert seen == {(0.9, 4 * 4 * 4), (0.9, 2)}


def test_prompts_are_text_messages_or_ids(lm):
    ids = question_ids(lm.tokenizer, "ab")
    assert ids == question_ids(lm.tokenizer, [{"role": "user", "content": "ab"}])
    assert ids == question_ids(lm.tokenizer, np.asarray(ids))
    for bad in (3, [], ["a", 1.5], None):
        with pytest.raises(ValueError, match="must be text, messages, or token ids"):
            question_ids(lm.tokenizer, bad)
    with pytest.raises(ValueError, match=r"prompt='1.ud83d' holds the lone surrogate U.D83D at position 1"):
        question_ids(lm.tokenizer, "1\ud83d")
    with pytest.raises(ValueError, match=r"questions.1..answer='.ud83d' holds the lone surrogate"):
        dj.tune(lm.model, lm.tokenizer, [("a", "1"), ("a", "\ud83d")])


def test_names_on_the_command_line_are_classes_and_candidates():
    text = "Candidate(EvictPrompt(layers=PyramidKV()); Threshold(0.8); block=Sliding(4; longest=8))"
    assert (named_candidates("DualCache"), named_candidates("DualCache()")) == (
        policies.DualCache,
        policies.DualCache(),
    )
    assert named_candidates(text) == Candidate(
        policies.EvictPrompt(layers=eviction.PyramidKV()), samplers.Threshold(0.8), dj.Sliding(4, longest=8)
    )


def test_questions_of_a_file(tmp_path):
    path = tmp_path / "q.jsonl"
    lines = '{"prompt": "a\\u2028b", "answer": "1"}', "", '{"prompt": [3, 4], "answer": "2", "more": 1}\n'
    path.write_text("\n".join(lines))
    assert read_jsonl(path) == [Example("a\u2028b", "1"), Example([3, 4], "2")]
    for bad in ("{", "[]", '{"prompt": "a"}', '{"prompt": "a", "answer": 1}'):
        path.write_text(f'{{"prompt": "a", "answer": "1"}}\n{bad}\n')
        with pytest.raises(ValueError, match=r"q\.jsonl:2: (not JSON|expected an object|no object with)"):
            read_jsonl(path)
    path.write_text(f'{lines[0]}\n{{"prompt": "T=1;\\ud83d", "answer": "1"}}')
    with pytest.raises(ValueError, match=r"q\.jsonl:2: the object\['prompt'\] holds .* U.D83D at position 4"):
        read_jsonl(path)
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "none.jsonl")


def test_the_default_grid_leaves_out_what_the_model_refuses():
    exact = Decoding(length=8, block=4, steps=8)
    grid = candidates(None, exact, 8)
    kinds = lambda family: {type(c.policy).__name__ for c in taken(grid, tiny(family), exact, 8)}
    every = {type(candidate.policy).__name__ for candidate in grid}
    assert kinds("llada") == every
    assert {"DualCache", "MaskKV", "D2Cache"} <= kinds("sdar") <= every - {"DLLMCache", "ESDLLM"}
    refused = [candidate for candidate in grid if type(candidate.policy) is policies.DLLMCache]
    with pytest.raises(ValueError, match=r"no policy of policies\.ALL fits: candidate DLLMCache\("):
        taken(refused, tiny("sdar"), exact, 8)


def test_questions_may_be_dicts_of_prompt_and_answer():
    """Such as the rows of a dataset, which have other columns too."""
    asked = {"prompt": "2+2=", "answer": "4", "source": "a book"}
    assert as_questions([asked, ("1+1=", "2")]) == (Example("2+2=", "4"), Example("1+1=", "2"))
    with pytest.raises(ValueError, match="they must be pairs"):
        as_questions([{"prompt": "2+2="}])
    with pytest.raises(ValueError, match=r"questions.0. has an image, .* tasks\.accuracy"):
        as_questions(examples(ReadNumbers(), 0, 2, 1, "held_out"))


def test_open_settings_follow_from_the_answers(lm):
    asked = [Example("a", "1" * n) for n in (3, 8)]
    spec = tiny("llada").spec
    found = exact_decoding(Decoding(policy=policies.DualCache()), lm.tokenizer, asked, spec)
    assert (found.policy, found.length, found.block, found.steps) == (Policy(), 12, 4, 12)
    blocks = (5, dj.Sliding(5))
    lengths = [exact_decoding(Decoding(block=b), lm.tokenizer, asked, spec).length for b in blocks]
    assert lengths == [10, 10]
    sdar = exact_decoding(Decoding(length=32), lm.tokenizer, asked, tiny("sdar").spec)
    assert (sdar.block, sdar.steps) == (12, 36)
    Candidate().filled(sdar).check(tiny("sdar"), sdar, 8)
    with pytest.raises(ValueError, match="tune does not support diffusion-gemma: a canvas may end early"):
        exact_decoding(Decoding(), lm.tokenizer, asked, tiny("diffusion-gemma").spec)
    lengths = (4, 6, 8, 32, 64, 128, 256, 512, 100)
    assert [default_block(n) for n in lengths] == [4, 6, 4, 8, 16, 32, 32, 32, 4]
    rounds = {(16, 100): (16, 32, 64, 100), (8, 8): (8,), (16, 3): (3,), (1, 4): (1, 2, 4)}
    assert {(first, n): Search(first=first).rounds(n) for first, n in rounds} == rounds


@pytest.mark.parametrize(
    ("family", "length", "block"), [("llada", 4, 4), ("dream", 32, 4), ("dream", 32, dj.Sliding(12))]
)
def test_every_grid_holds_settings_that_a_model_can_decode_with(family, length, block):
    exact = Decoding(length=length, block=block, steps=length)
    found = candidates(None, exact, 64)
    assert {type(one.policy) for one in found} == {type(policy) for policy in policies.ALL}
    assert len(set(found)) == len(found) < 60
    assert all(one.sampler and one.block and one.steps for one in found)
    # Settings that differ in numbers alone are of one program.
    programs = {(type(c.policy), type(c.sampler), c.block, c.steps): c for c in found}
    for one in programs.values():
        one.check(tiny(family), exact, 64)


def test_a_class_stands_for_its_grid_and_a_policy_for_itself():
    exact = Decoding(length=32, block=4, steps=32, sampler=samplers.Confidence(temperature=0.5))
    (alone,) = candidates([policies.DualCache()], exact, 64)
    assert alone == Candidate(policies.DualCache(), exact.sampler, 4, 32)
    grid = candidates([policies.DualCache, policies.DualCache], exact, 64)
    assert {(type(c.policy), c.block) for c in grid} == {(policies.DualCache, 4), (policies.DualCache, 32)}
    assert [c.sampler.temperature for c in grid if isinstance(c.sampler, samplers.Threshold)] == [0.5]
    drafted = dataclasses.replace(exact, sampler=samplers.FreeDave(exact.sampler))
    kinds = {c.sampler for c in candidates([policies.DualCache], drafted, 64)}
    assert kinds == {drafted.sampler, samplers.Threshold(temperature=0.5)}
    own = Candidate(policies.SparseDLLM(), samplers.Factor(2.0), 8, 16)
    assert candidates([own, Candidate()], exact, 64) == (own,)

    # Grids scale with the request.
    asked = (64, 4, 4), (2048, 256, 32)
    short, long = (candidates(None, Decoding(length=n, block=b, steps=n), prompt) for prompt, n, b in asked)
    budgets = lambda grid: sorted({c.policy.budget for c in grid if isinstance(c.policy, policies.MaskKV)})
    assert (budgets(short), budgets(long)) == ([8, 16, 32], [256, 512, 1024])
    assert {c.block for c in long} == {32, 256, dj.Sliding(32)}
    assert {c.steps for c in long} == {64, 128, 256}

    # End-of-text cannot come last in random order.
    last = dataclasses.replace(exact, sampler=samplers.Confidence(confidence_eos_eot_inf=True))
    assert policies.DKVGreedy not in {type(c.policy) for c in candidates(None, last, 64)}


# -- costs --------------------------------------------------------------------------------------------------

LONGER = dataclasses.replace(DECODING, length=8, block=4, steps=8)
DUAL = Candidate(policies.DualCache()).filled(LONGER)
LAYOUT = dj.Layout(64, 8, 4, 8, padded=True)


def answered(count: int = 1, prompt: int = 64, **costs) -> list[dict]:
    row = {"prompt_tokens": prompt - 3, "forwards": 8} | costs  # buckets of 64
    return [decoded(f"{i}") | row for i in range(count)]


def cost(candidate: Candidate, answers: list[dict], objective="bytes", accelerator=None) -> float:
    objective = objective_for(objective, accelerator, tiny("llada"), LONGER)
    return objective.cost(candidate, answers, answers).value


def test_bytes_are_those_of_the_roofline():
    steps = lambda layout: work(tiny("llada").spec, DUAL.policy, layout, 2, jnp.float32).steps
    moved = lambda layout: sum(kind.count * kind.cost.bytes for kind in steps(layout))
    assert cost(DUAL, answered()) == pytest.approx(moved(LAYOUT) / 2)
    assert cost(DUAL, answered(forwards=4)) == pytest.approx(moved(LAYOUT) / 4)  # ended at half of the steps
    # One step in which the first block is sure, three in the other: four, under any schedule.
    parallel = dataclasses.replace(DUAL, sampler=samplers.Threshold(0.9))
    fewer = dataclasses.replace(LAYOUT, steps=4)
    assert cost(parallel, answered(forwards=4)) == pytest.approx(moved(fewer) / 2)
    mixed = answered() + answered(prompt=128)
    assert cost(DUAL, mixed) == pytest.approx((cost(DUAL, mixed[:1]) + cost(DUAL, mixed[1:])) / 2)

    # A pass computes the branches of drafts, too.
    assert cost(dataclasses.replace(DUAL, sampler=samplers.FreeDave()), answered()) > cost(DUAL, answered())

    # Measured drift enters the prediction.
    elastic = Candidate(policies.ElasticCache(window=2)).filled(LONGER)
    calm, drifting = answered(computed=8 * 20), answered(computed=8 * 20 + 200, widened=200.0)
    assert cost(elastic, drifting) > cost(elastic, calm)


def test_answers_that_end_within_a_block_of_the_model_are_predicted_as_they_run():
    model, exact = tiny("sdar"), Decoding(length=32, block=12, steps=36, batch=1)
    setting = Candidate(policies.DualCache()).filled(exact)
    found = objective_for("bytes", None, model, exact).cost(setting, answered(forwards=36), answered())
    layout = dj.Layout(64, 36 + 11, 12, 36, padded=True, tail=11)  # three blocks, and what completes a fourth
    made = work(model.spec, setting.policy, layout, 1, jnp.float32).steps
    per_step = np.average([kind.cost.bytes for kind in made], weights=[kind.count for kind in made])
    assert found.value == pytest.approx(36 * per_step)


def test_predicted_time_is_that_of_the_accelerator():
    made = work(tiny("llada").spec, DUAL.policy, LAYOUT, 2, jnp.float32)
    times = [cost(DUAL, answered(), "time", at) for at in ("h100", HARDWARE["v5e"])]
    assert times == pytest.approx([1e3 * made.on(HARDWARE[name]).seconds / 2 for name in ("h100", "v5e")])
    assert times[0] < times[1]


def test_time_is_relative_to_the_exact_decoder():
    ours = [answered(seconds=s)[0] for s in (1.0, 2.0, 9.0)]
    exact = [answered(seconds=s)[0] for s in (2.0, 2.0, 3.0)]
    assert MeasuredTime().cost(EXACT, ours, exact) == (1.0, 0.5, 3.0)


@dataclasses.dataclass(frozen=True)
class Mine(policies.DualCache):
    """A policy that the library does not know."""


def test_the_preset_is_read_back(found, tmp_path):
    path, preset = tmp_path / "tune.toml", found.preset
    path.write_text(found.preset_toml("ours"))
    assert read_preset(path) == {"tiny-llada/ours": preset}
    assert (preset.policy, preset.sampler) == (policies.DualCache(), samplers.Confidence())
    assert (preset.length, preset.block, preset.steps) == (4, 2, 4)
    assert "64 questions of tiny-llada" in preset.source
    set_ = lambda row, changes: dataclasses.replace(row, setting=dataclasses.replace(row.setting, **changes))
    of = lambda **changes: dataclasses.replace(found, rows=tuple(set_(row, changes) for row in found.rows))
    path.write_text(of(block=(block := dj.Sliding(2, longest=3))).preset_toml())
    assert [preset.block for preset in read_preset(path).values()] == [block]
    with pytest.raises(ValueError, match="Mine"):
        of(policy=Mine()).preset_toml()


def test_the_table_the_figure_and_the_description_show_every_setting(found):
    table, axes = found.table(), found.figure().axes[0]
    assert table.row_count == len(found.rows)
    first = [f"{name}()\n[dim]{note}[/]" for name, note in (("DKVDecode", "front"), ("DualCache", "chosen"))]
    assert list(table.columns[0].cells)[:2] == first
    assert [table.columns[i].header for i in (4, 5, 6)] == ["forward\npasses", "computed\ntokens", "seconds"]
    assert [list(table.columns[i].cells)[1] for i in (4, 5, 6)] == ["4", "300", "1"]
    console = rich.console.Console(width=80, file=io.StringIO(), color_system=None)
    console.print(table)
    drawn = console.file.getvalue()
    assert "…" not in drawn
    assert str(table).split() == str(found).split() == drawn.split()
    assert repr(found) == f"Tuned(tiny-llada: {len(found.rows)} settings, chosen DualCache())"
    assert re.search(r"DualCache\(\) +64 +90\.6 +-3\.1 +4 +300 +1 +5 *$", drawn, re.MULTILINE)
    labels = axes.get_legend_handles_labels()[1]
    assert {"Policy", "DKVPrefill, dropped", "chosen: DualCache()"} <= set(labels)
    assert axes.get_xlabel() == "coins"

    described = json.loads(json.dumps(found.described()))
    chosen = described["rows"][described["chosen"]]
    assert chosen["policy"] == "DualCache()"
    assert chosen["accuracy"]["value"] == pytest.approx(58 / 64)
    assert [described["rows"][i]["cost"]["value"] for i in described["front"]] == [4.0, 5.0, 7.0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"accuracy_within": 1}, r"accuracy_within=1 must be a number in \[0, 1\)"),
        ({"objective": "speed"}, "objective='speed' must be one of 'time', 'bytes'"),
        ({"objective": "time", "accelerator": "b9000"}, "accelerator='b9000' must be one of h100, h200"),
        ({"accelerator": "h100"}, "it needs objective='time', not 'bytes'"),
        ({"score": "exact"}, "score='exact' must be a function"),
        ({"questions": []}, "questions=.* must be pairs .* one or more"),
        ({"questions": "what?"}, "questions='what\\?' must be pairs"),
        ({"questions": [("a", 3)]}, r"questions hold .*, 3\): they must be pairs|'a'.* answer being text"),
        ({"policies": []}, "no setting but the exact decoder"),
        ({"policies": policies.DualCache()}, r"policies=DualCache\(\) must be a list"),
        ({"policies": ["DualCache"]}, "policies hold 'DualCache', which is no policy"),
        ({"policies": [Candidate(block=3)]}, "candidate Policy.*length=4 must be a multiple of block=3"),
        ({"policies": [policies.DKVGreedy()]}, "candidate DKVGreedy"),
        (
            {"policies": [Candidate(policies.D2Cache(), block=dj.Sliding(2))]},
            "candidate D2Cache.* is not supported by",
        ),
        (
            {"block": 2.5},
            "block=2.5 must be a whole number of at least 1 or a Sliding or an AdaBlock, or None for all",
        ),
        ({"model": 3}, "model=3 must be"),
    ],
)
def test_bad_arguments_are_refused(lm, unannotated, options, reason):
    usual = dict(model=lm.model, tokenizer=lm.tokenizer, questions=[("a", "right")], length=4, block=2)
    usual |= dict(policies=[policies.DualCache()], objective="bytes")
    with pytest.raises(ValueError, match=reason):
        dj.tune(**usual | options)


def test_former_names_of_arguments_warn_and_act(lm, unannotated):
    asked = dict(model=lm.model, tokenizer=lm.tokenizer, questions=[("a", "right")], length=4, block=2)
    for former, name in (("batch", "slots"), ("first", "first_round")):
        with (
            pytest.warns(DeprecationWarning, match=rf"use {name}="),
            pytest.raises(ValueError, match=f"{name}=0"),
        ):
            dj.tune(**asked, **{former: 0})
        with pytest.warns(match=f"use {name}="), pytest.raises(TypeError, match=f"{name}=3 and its former"):
            dj.tune(**asked, **{former: 2, name: 3})
        with pytest.warns(match=f"use {name}="):
            assert dj.tune(**asked, **{former: 2}).model == lm.name, "not the option's"


def test_a_question_that_the_exact_decoder_cannot_answer_is_named(lm):
    asked = [Example([lm.model.spec.mask_id], "right")]
    with pytest.raises(RuntimeError, match=r"the exact decoder failed on question 0: ValueError: .*mask id"):
        dj.tune(lm.model, lm.tokenizer, asked, [policies.DKVPrefill()], objective="bytes", length=4, block=2)
