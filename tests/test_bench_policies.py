"""bench.policies, its grid, its figures and the table of the papers' orderings."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from bench.policies import __main__ as policies
from bench.policies import orderings, plots, summary
from bench.policies.grid import EXACT, LONG, SHORT, Setting, at_defaults, calibrated, setting_of
from bench.policies.measure import Timing
from bench.policies.workloads import Workload
from dllm_jax import samplers
from dllm_jax.published.expressions import call
from tests.models import FAMILIES, canvas, random_tokens, tiny

GRIDS = {"short": SHORT, "long": LONG}


@pytest.fixture(scope="module")
def workload():
    model = tiny("llada")
    grid = (
        EXACT,
        Setting(dj.policies.DualCache()),
        Setting(sampler=samplers.RandomOrder(), variant="random order"),
        Setting(dj.policies.DKVGreedy(), samplers.RandomOrder(), variant="random order"),
        Setting(dj.policies.SparseDLLM(keep=0.25)),
    )
    prompt = random_tokens(model.spec, 4, 6)
    return Workload("tiny", model, prompt, length=4, block=2, chunk=2, grid=grid)


@pytest.fixture(scope="module")
def results(workload):
    untimed, timed = policies.stages(workload, {}, Timing(turns=2, batch=2))
    assert not any("tokens_per_s" in row for row in untimed["rows"])
    assert list(policies.stages(workload, timed, Timing())) == []
    return timed


@pytest.fixture(scope="module")
def rows(results):
    return results["rows"]


@pytest.mark.parametrize("grid", GRIDS)
def test_the_grid_has_every_policy_and_an_exact_decoder_for_every_sampler(grid):
    assert {type(s.policy) for s in GRIDS[grid]} == {type(p) for p in dj.policies.ALL}
    compared = {s.exact for s in GRIDS[grid] if s.policy == EXACT.policy}
    assert {s.exact for s in GRIDS[grid]} <= compared
    assert GRIDS[grid][0] == EXACT


@pytest.mark.parametrize("grid", GRIDS)
def test_no_setting_is_there_twice(grid):
    seen = [(call(s.policy), *s.exact) for s in GRIDS[grid]]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("grid", GRIDS)
def test_settings_are_read_back_from_what_results_call_them(grid):
    settings = (*GRIDS[grid], *calibrated((0.1, 0.6, 0.2, 0.1)))
    for setting in settings:
        again = setting_of(setting.named(32, 4), 32)
        assert again == dataclasses.replace(setting, variant="")


def test_every_claim_of_the_papers_is_in_a_grid():
    bare = lambda setting: dataclasses.replace(setting, variant="")
    grids = [{bare(setting) for setting in grid} for grid in GRIDS.values()]
    for claim in orderings.claims():
        assert any({bare(claim.better), bare(claim.other)} <= grid for grid in grids), claim


def test_rows(workload, rows):
    exact, dual, other_order, greedy, sparse = rows
    assert exact["agreement"] == other_order["agreement"] == 1.0
    assert exact["computed"] == other_order["computed"] == 1.0
    assert exact["forwards"] == 4
    assert dual["computed"] == pytest.approx((2 * 10 + 2 * 2) / 40)  # two steps per block, one of them whole
    assert dual["kept_pairs"] == 10
    assert 0 < sparse["kept_pairs"] < 10
    assert greedy["accuracy"] is None
    for row in rows:
        low, high = row["speed_range"]
        assert 0 < low <= row["speed_over_exact"] <= high
        assert row["tokens_per_s"] > 0


def test_only_speed_is_measured_again(workload, rows, tmp_path, monkeypatch):
    made = lambda prompts, width: {"tiny x": lambda: dataclasses.replace(workload, chunk=prompts)}
    monkeypatch.setattr(policies, "workloads", made)
    old = [row | {"speed_over_exact": -1.0, "speed_range": [-1.0, -1.0], "accuracy": 0.5} for row in rows[:2]]
    entry = workload.described | {"rows": old}
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"date": "then", "models": {"tiny x": entry, "other y": entry}}))
    policies.main(again=path, only=("x",), timing=Timing(turns=2, batch=2))
    report = json.loads(path.read_text())
    assert report["date"] == "then"
    assert report["models"]["other y"]["rows"] == old
    for before, after in zip(old, report["models"]["tiny x"]["rows"], strict=True):
        assert after["speed_range"][0] > 0
        times = {"tokens_per_s", "speed_over_exact", "speed_range"}
        assert {key for key in before if before[key] != after[key]} == times
    timed = report["models"]["tiny x"]["timed"]
    assert (timed["turns"], timed["batch"]) == (2, 2)
    assert timed["device"]
    assert timed["date"]
    with pytest.raises(SystemExit, match="--only z"):
        policies.main(again=path, only=("z",))
    path.write_text(json.dumps({"models": {"tiny x": entry | {"model_sha256": "another"}}}))
    with pytest.raises(SystemExit, match="another checkpoint"):
        policies.main(again=path)


def test_a_grid_that_has_grown_runs_only_its_new_settings(workload, results, monkeypatch):
    runs = []
    run = Workload.run
    monkeypatch.setattr(
        Workload, "run", lambda self, setting, prompt: runs.append(setting) or run(self, setting, prompt)
    )
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # the programs of `results` serve again
    marked = results | {"rows": [row | {"accuracy": 0.25} for row in results["rows"]]}
    grid = list(workload.grid)
    lacks = marked | {"rows": [row for row in marked["rows"] if "DKVGreedy" not in row["policy"]]}
    (untimed,) = policies.stages(workload, lacks, None)
    assert set(runs) == {EXACT, grid[2], grid[3]}  # the new one, and what it is compared with
    assert [row["accuracy"] for row in untimed["rows"]] == [0.25, 0.25, 0.25, None, 0.25]
    assert untimed["rows"][3]["agreement"] == marked["rows"][3]["agreement"]
    assert "speed_range" not in untimed["rows"][3]
    runs.clear()
    (timed,) = policies.stages(workload, untimed, Timing(turns=2, batch=2))
    assert {setting.policy for setting in runs} == {EXACT.policy, grid[3].policy}
    assert timed["timed"] == results["timed"]
    assert [later["settings"] for later in timed["timed_later"]] == [1]
    assert all("speed_range" in row for row in timed["rows"])
    assert list(policies.stages(workload, timed, Timing())) == []
    other = dataclasses.replace(workload, sha256="another")
    assert next(policies.stages(other, timed, None))["rows"][0]["accuracy"] is None


def test_speed_is_left_out_where_it_is_noise():
    row = {"speed_over_exact": 2.0, "speed_range": [1.9, 2.2]}
    assert plots.speed(row) == "2.00x (1.90 to 2.20)"
    assert plots.speed(row | {"speed_range": [1.0, 2.2]}) == ""
    assert plots.speed({"speed_over_exact": 2.0}) == ""


def test_calibrated_layers_get_what_the_profile_says():
    for setting in calibrated((0.1, 0.6, 0.2, 0.1)):
        budgets = budgets_of(setting)
        assert len(set(budgets)) > 1
        assert sum(budgets) == 4 * setting.policy.budget


@pytest.mark.parametrize("grid", GRIDS)
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


def test_page_and_figures(workload, rows, tmp_path):
    found = tmp_path / "found.json"
    where = {"device": "test", "jax": "0", "dtype": "float32"}
    entry = workload.described | {"rows": rows}
    timed = dict(device="test", cores=2, jax="0", date="then", turns=2, batch=2)
    models = {"tiny": entry | {"timed": timed}, "untimed": entry}
    found.write_text(json.dumps(where | {"models": models}))
    plots.main(found, tmp_path / "docs")
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "`DualCache()`" in page
    assert "4 prompts of 6 tokens, length 4, block 2. Speed: test, 2 cores, jax 0, then, 2 turns" in page
    assert page.count("| cache KiB | speed |") == page.count("| cache KiB |\n") == 1
    drawn = {file.name for file in (tmp_path / "docs" / "figures").iterdir()}
    assert {"policies-tiny.png", "policies-tiny.svg"} < drawn


def row(policy: str, accuracy: float, block: int = 8) -> dict:
    return {
        "policy": policy, "sampler": "Confidence()", "block": block, "steps": 32, "accuracy": accuracy,
        "agreement": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("delay", "none", "verdict"),
    [(0.9, 0.5, "yes"), (0.5, 0.9, "no"), (0.9, 0.89, "within noise"), (0.9, 0.9, "no difference")],
)
def test_verdicts(delay, none, verdict):
    measured = [
        row("DKVDecode(refresh_every=2)", delay),
        row("DKVDecode(refresh_every=2, delay=0)", none),
    ]
    table = orderings.table({"x": {"prompt": [256, 8], "length": 32, "block": 8, "rows": measured}})
    lines = table.splitlines()[2:]
    assert len(lines) == 1
    assert lines[0].endswith(f"| {verdict} |")


@pytest.mark.parametrize(
    ("block", "both", "prefix", "verdict"),
    [
        (8, 0.9, 0.2, "yes"),
        (8, 0.5, 0.5, "no difference"),
        (8, 0.0, 0.0, "both at the floor"),
        (32, 0.5, 0.5, "same computation"),
        (32, 0.0, 0.0, "same computation"),
    ],
)
def test_sides_that_cannot_differ_are_marked(block, both, prefix, verdict):
    measured = [
        row("SparseDLLM(keep=0.1)", both, block),
        row("SparseDLLM(keep=0.1, side='prefix')", prefix, block),
    ]
    table = orderings.table({"x": {"prompt": [256, 8], "length": 32, "block": block, "rows": measured}})
    assert table.splitlines()[2].endswith(f"| {verdict} |")


@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_are_one_computation_in_a_block_that_ends_the_response(family):
    both, prefix = (dj.policies.SparseDLLM(side=side) for side in ("both", "prefix"))
    now = canvas(np.arange(12)[None] >= 6, prompt=6, family=family)
    size = lambda policy: policy.init(now.spec, now.layout, 1, jnp.float32).layers.k.shape
    assert size(both) == size(prefix)
    for stored in ("always_stored", "candidates"):
        np.testing.assert_array_equal(getattr(both, stored)(now), getattr(prefix, stored)(now))
    now = canvas(np.arange(12)[None] >= 6, prompt=6, block=3, family=family)
    assert (both.candidates(now) != prefix.candidates(now)).any()


class NewPolicy(dj.policies.DualCache):
    """A policy that neither the grid nor the results know."""


def test_a_policy_that_is_not_named_is_compared_at_its_defaults():
    new = NewPolicy()
    assert at_defaults(LONG, (*dj.policies.ALL, new)) == [Setting(new)]


def test_what_the_readme_shows_is_in_the_results():
    """Results do not hold policies that are newer than they are; of the others no line is missing."""
    path = pathlib.Path(__file__).parents[1] / "bench" / "results" / "policies_cpu.json"
    measured = json.loads(path.read_text())["models"]
    shown = summary.lines(measured, (*dj.policies.ALL, NewPolicy()))
    assert shown == summary.lines(measured)
    table = summary.table(measured, "tiny-llada").split("\n\n")[0].splitlines()
    assert len(table) == 2 + len(shown) >= 2 + len(summary.LINES)
    for workload in measured.values():
        workload["rows"].append(workload["rows"][0] | {"policy": "NewPolicy()"})
    assert summary.lines(measured, (*dj.policies.ALL, NewPolicy()))[-1].chain == Setting(NewPolicy())
    for workload in measured.values():
        workload["rows"] = [row for row in workload["rows"] if row["policy"] != "DualCache()"]
    assert "DualCache" not in summary.table(measured, "tiny-llada")
    for workload in measured.values():
        workload["rows"].append(workload["rows"][0] | {"policy": "DualCache()", "steps": 1})
    with pytest.raises(LookupError, match=r"DualCache\(\).* was not measured"):
        summary.table(measured, "tiny-llada")
