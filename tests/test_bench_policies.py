"""bench.policies: its grid, a run of it, its tables and figures, and the papers' claims beside them."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

import dllm_jax as dj
from bench.policies import __main__ as policies
from bench.policies import every, orderings, plots, summary
from bench.policies.grid import (
    CACHES,
    CORE,
    EXACT,
    LONG,
    LONG_EVICTION,
    PICTURED,
    SHORT,
    SHORT_EVICTION,
    Setting,
    at_defaults,
    calibrated,
    setting_of,
)
from bench.policies.workloads import ASKED, ASKED_OF_PICTURES, UNLEARNT, Workload, workloads
from dllm_jax import samplers
from tests.models import random_tokens, tiny

ROOT = pathlib.Path(__file__).parents[1]
GRIDS = {
    "short": (*SHORT, *SHORT_EVICTION),
    "long": (*LONG, *LONG_EVICTION),
    "core": CORE,
    "pictured": PICTURED,
}
KNOBS = {  # of each policy, the settings along its main one
    "PrefixCache": "block", "DualCache": "block", "DKVDecode": "refresh_every", "DKVPD": "refresh_every",
    "DLLMCache": "response_every", "SparseDLLM": "keep", "MaskKV": "budget", "ElasticCache": "gamma",
    "D2Cache": "p", "EvictPrompt": "budget",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def fewest_kinds_of_steps():
    """No run compiles another program for narrow steps: widths change nothing (tests/test_policies.py)."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in {dj.policies.Policy, *map(type, dj.policies.ALL)}:
            patch.setattr(kind, "widths", lambda policy, spec, layout: (layout.length,))
        yield


@pytest.fixture(scope="module")
def workload():
    grid = (
        EXACT,
        Setting(dj.policies.DualCache()),
        Setting(sampler=samplers.RandomOrder(), variant="random order"),
        Setting(dj.policies.DKVGreedy(), samplers.RandomOrder(), variant="random order"),
        Setting(dj.policies.SparseDLLM(keep=0.25)),
    )
    return dataclasses.replace(workloads(4)["tiny-llada chain"](), grid=grid, chunk=2)


@pytest.fixture(scope="module")
def results(workload):
    some, whole = policies.stages(workload, {}, saved=3)
    assert some["rows"] == whole["rows"][:3], "what is left of a run that is killed then"
    assert list(policies.stages(workload, whole)) == []
    return whole


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_has_every_policy_once_in_a_setting_and_an_exact_decoder_for_every_sampler(grid):
    assert {type(s.policy) for s in GRIDS[grid]} == {type(p) for p in dj.policies.ALL}
    seen = [s.unlabelled for s in GRIDS[grid]]
    assert len(set(seen)) == len(seen)
    assert {s.exact for s in GRIDS[grid]} <= set(seen)
    assert GRIDS[grid][0] == EXACT
    for setting in (*GRIDS[grid], *calibrated((0.1, 0.6, 0.2, 0.1))):
        again = setting_of(setting.named(32, 4), 32, 4)
        assert again == setting.unlabelled, "settings are read back from what results call them"


@pytest.mark.parametrize("policy", KNOBS)
def test_every_policy_has_four_settings_along_its_main_knob(policy):
    settings = [s for s in LONG if type(s.policy).__name__ == policy and s.sampler == EXACT.sampler]
    knob = KNOBS[policy]
    of = lambda s: s.block(32, 4) if knob == "block" else getattr(s.policy, knob)
    assert len({of(setting) for setting in settings}) >= 4


@pytest.mark.parametrize("name", dj.embedded.TEXT)
def test_models_are_asked_what_their_cards_say_they_answer(name):
    log = json.loads((pathlib.Path(dj.embedded.path(name)) / "training_log.json").read_text())
    asked = {title for made in workloads(2) for model, _, title in [made.partition(" ")] if model == name}
    assert asked | UNLEARNT[name] == set(ASKED)
    titles = {
        "chain among values": "chain-among-values", "chain of 16": "chain-of-16", "needles": "needles-256",
    }  # fmt: skip
    for row in log["held_out"]:
        title = titles.get(row["task"], row["task"])
        title = f"needle-{row['prompt']}" if title == "needle" else title
        if title in ASKED and (title != "few-shot" or row["prompt"] < 200):
            assert (row["exact"] >= 0.2) == (title in asked), (title, row["exact"])


def test_blocks_divide_every_response_and_steps_divide_blocks():
    for asked in (*ASKED.values(), *ASKED_OF_PICTURES.values()):
        for setting in asked.grid:
            block, steps = (
                setting.block(asked.length, min(4, asked.length)),
                asked.length // setting.divide_steps,
            )
            layout = dj.Layout(64, asked.length, block, steps, padded=False)
            assert layout.blocks * block == asked.length


def test_every_claim_of_the_papers_is_in_a_grid():
    grids = [{setting.unlabelled for setting in grid} for grid in GRIDS.values()]
    for claim in orderings.CLAIMS:
        assert any({claim.one.unlabelled, claim.other.unlabelled} <= grid for grid in grids), claim
        assert all(title in ASKED for title in claim.only)


def test_rows(workload, results):
    exact, dual, other_order, greedy, sparse = results["rows"]
    assert exact["agreement"] == other_order["agreement"] == exact["accuracy"] == 1.0
    assert exact["computed"] == other_order["computed"] == 1.0
    assert exact["forwards"] == 32
    length = workload.prompt.shape[1] + 32
    assert dual["computed"] == pytest.approx(
        (length + 3 * 4) / (4 * length)
    )  # per block, of which one is full
    assert dual["kept_pairs"] == length
    assert 0 < sparse["kept_pairs"] < length
    assert greedy["computed"] < 1


def test_a_grid_that_has_grown_runs_only_its_new_settings(workload, results, monkeypatch):
    runs = []
    run = Workload.run
    monkeypatch.setattr(
        Workload, "run", lambda self, setting, prompt: runs.append(setting) or run(self, setting, prompt)
    )
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # the programs of `results` serve again
    marked = results | {"rows": [row | {"accuracy": 0.25} for row in results["rows"]]}
    lacks = marked | {"rows": [row for row in marked["rows"] if "DKVGreedy" not in row["policy"]]}
    (grown,) = policies.stages(workload, lacks)
    # The new one, and what it is compared with.
    assert set(runs) == {EXACT, *(setting.unlabelled for setting in workload.grid[2:4])}
    assert [row["accuracy"] for row in grown["rows"]] == [
        0.25, 0.25, 0.25, results["rows"][3]["accuracy"], 0.25,
    ]  # fmt: skip
    other = dataclasses.replace(workload, sha256="another")
    assert next(policies.stages(other, grown))["rows"][0]["accuracy"] == 1.0


def test_calibrated_layers_get_what_the_profile_says():
    for setting in calibrated((0.1, 0.6, 0.2, 0.1)):
        budgets = budgets_of(setting)
        assert len(set(budgets)) > 1
        assert sum(budgets) == 4 * setting.policy.budget


@pytest.mark.parametrize("grid", ["short", "long"])
def test_pyramids_descend_at_the_budget(grid):
    pyramids = [s for s in GRIDS[grid] if s.variant == "PyramidKV"]
    assert [s.policy.budget for s in pyramids] == [8, 32]
    for setting in pyramids:
        budgets = budgets_of(setting)
        assert budgets == sorted(set(budgets), reverse=True)
        assert sum(budgets) == 4 * setting.policy.budget


def budgets_of(setting: Setting) -> list[int]:
    spec = dataclasses.replace(tiny("llada").spec, layers=4)
    return setting.policy.table(spec, dj.Layout(76, 4, 4, 4))[-1].tolist()


def test_the_front_is_what_nothing_else_beats():
    points = [(1.0, 0.9), (0.5, 0.9), (0.4, 0.5), (0.4, 0.7), (0.3, 0.7), (0.2, 0.1), (0.6, 0.95)]
    assert plots.front(points) == [(0.2, 0.1), (0.3, 0.7), (0.5, 0.9), (0.6, 0.95)]
    assert plots.front([]) == []


def test_every_setting_is_printed_and_drawn(results, tmp_path, capsys):
    found = tmp_path / "found.json"
    found.write_text(json.dumps({"models": {"tiny": results, "other": results}}))
    every.main(found, only="tiny")
    printed = capsys.readouterr().out
    assert printed.count("4 prompts of") == 1
    assert printed.count("\n| `DualCache()` | `Confidence` | 4 | 32 | 100.0% (51 to 100) | 100.0% |") == 1
    assert "(Fast-dLLM, Table 1) | tiny | `DualCache()`" in printed
    plots.main(found, tmp_path / "figures")
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {
        "policies-tiny.svg",
        "policies-other.svg",
    }


def verdict(one: tuple[str, float], other: tuple[str, float], block: int = 8, title="x") -> list[str]:
    """The lines of the table of claims where two settings were measured."""
    measured = [
        {"policy": name, "sampler": "Confidence()", "block": block, "steps": 32, "accuracy": rate}
        for name, rate in (one, other)
    ]
    workload = {"prompt": [256, 8], "length": 32, "block": block, "rows": measured}
    return orderings.table({title: workload}).splitlines()[2:]


LATE, AT_ONCE = "DKVDecode(refresh_every=2)", "DKVDecode(refresh_every=2, delay=0)"


@pytest.mark.parametrize(
    ("one", "other", "block", "says"),
    [
        ((LATE, 0.9), (AT_ONCE, 0.5), 32, "yes"),
        ((LATE, 0.5), (AT_ONCE, 0.9), 32, "no"),
        ((LATE, 0.9), (AT_ONCE, 0.89), 32, "within noise"),
        ((LATE, 0.9), (AT_ONCE, 0.9), 32, "no difference"),
        (("SparseDLLM()", 0.99), ("Policy()", 1.0), 8, "yes"),
        (("SparseDLLM()", 0.94), ("Policy()", 0.97), 8, "within noise"),
        (("SparseDLLM()", 0.8), ("Policy()", 0.97), 8, "no"),
        (("SparseDLLM()", 0.0), ("Policy()", 0.0), 8, "both at the floor"),
        (("SparseDLLM(keep=0.1)", 0.9), ("SparseDLLM(keep=0.1, side='prefix')", 0.2), 8, "yes"),
        (("SparseDLLM(keep=0.1)", 0.5), ("SparseDLLM(keep=0.1, side='prefix')", 0.5), 32, "same computation"),
    ],
)  # fmt: skip
def test_verdicts(one, other, block, says):
    (line,) = verdict(one, other, block)
    assert line.endswith(f"| {says} |")


def test_intervals_of_a_difference_and_claims_about_one_workload_only():
    (line,) = verdict(("SparseDLLM()", 0.8), ("Policy()", 0.9))
    assert "| -10.0 ± 6.1 |" in line  # 1.96 sqrt((0.16 + 0.09) / 256)
    few = ("MaskKV(prompt_every=4, response_every=1, budget=32)", 0.9), ("Policy()", 0.9)
    assert [len(verdict(*few, title=f"tiny {name}")) for name in ("needle-1024", "needle-256")] == [1, 0]


def test_right_answers_and_right_tokens(workload):
    asked = dataclasses.replace(workload, wanted=workload.wanted[:3])
    right = [f"{example.answer}" for example in asked.wanted]
    wrong = right[1][:-2] + ("a" if right[1][-2] != "a" else "b") + right[1][-1]
    encode = lambda text: workload.tokenizer.encode(text, add_special_tokens=False)
    stop, length = [workload.model.spec.eot_id], workload.length
    # One token is wrong; and what stands behind the end does not count.
    rows = [encode(right[0]) + stop, encode(wrong) + stop, [*encode(right[2]), *stop, 7, 8]]
    responses = np.array([row[:length] + [workload.model.spec.eos_id] * (length - len(row)) for row in rows])
    scores = asked.scores(responses)
    assert scores["accuracy"] == pytest.approx(2 / 3)
    tokens = sum(len(encode(text)) + 1 for text in right)
    assert scores["token_accuracy"] == pytest.approx((tokens - 1) / tokens)
    # Wilson's interval of 2 of 3: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    assert scores["interval"] == pytest.approx([0.2077, 0.9385], abs=1e-4)


class NewPolicy(dj.policies.DualCache):
    """A policy that neither the grid nor the results know."""


def test_a_policy_that_is_not_named_is_compared_at_its_defaults():
    new = NewPolicy()
    assert at_defaults(LONG, (*dj.policies.ALL, new)) == [Setting(new)]


def test_results_without_newer_policies_and_with_gaps():
    measured = json.loads((ROOT / "bench/results/policies_cpu.json").read_text())["models"]
    shown = summary.lines(measured, (*dj.policies.ALL, NewPolicy()))
    assert shown == summary.lines(measured)
    assert len(summary.fewer_steps(measured, dj.embedded.TEXT).splitlines()) == 2 + 1 + len(CACHES)
    for workload in measured.values():
        workload["rows"].append(workload["rows"][0] | {"policy": "NewPolicy()"})
    assert summary.lines(measured, (*dj.policies.ALL, NewPolicy()))[-1].chain == Setting(NewPolicy())
    for workload in measured.values():
        workload["rows"] = [row for row in workload["rows"] if row["policy"] != "DualCache()"]
    assert "DualCache" not in summary.table(measured, dj.embedded.TEXT)
    for workload in measured.values():
        workload["rows"].append(workload["rows"][0] | {"policy": "DualCache()", "steps": 1})
    with pytest.raises(LookupError, match=r"DualCache\(\).* was not measured"):
        summary.table(measured, dj.embedded.TEXT)


def test_the_tables_of_the_documentation_are_those_of_the_results(capsys):
    """Of the measured policies no line is missing, and the README's are those of its tasks and policies."""
    page = (ROOT / "docs/background/results.md").read_text()
    measured = json.loads((ROOT / "bench/results/policies_cpu.json").read_text())["models"]
    tables = summary.table(measured, dj.embedded.TEXT), summary.fewer_steps(measured, dj.embedded.TEXT)
    assert all(table in page for table in tables)
    assert summary.brief(measured) in (ROOT / "README.md").read_text()
    assert orderings.short(measured) in (ROOT / "docs/background/benchmarks.md").read_text()
    summary.main(ROOT / "bench/results/policies_pictures_cpu.json")
    assert capsys.readouterr().out.strip() in (ROOT / "docs/how-to/vision.md").read_text()


def test_every_chunk_is_decoded_with_its_own_images():
    """One position of each prompt is embedded: the model must see that row, and not another prompt's."""
    model, spec = tiny("llada"), tiny("llada").spec
    prompt = np.array(random_tokens(spec, 4, 6))
    prompt[:, 2] = dj.EMBEDDED
    embeds = np.array(jax.random.normal(jax.random.key(1), (4, 6, spec.width)), np.float32) * 3
    workload = Workload("tiny", model, prompt, 4, 2, 2, (EXACT,), (), None, "", embeds)
    parts = [workload.run(EXACT, prompts).tokens for prompts in workload.chunks()]
    want = dj.generate(model, prompt, prompt_embeds=embeds, length=4, block=2).tokens
    np.testing.assert_array_equal(np.concatenate(parts), want)
