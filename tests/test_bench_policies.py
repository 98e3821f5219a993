"""bench/policies.py, its grid, its figures and the table of the papers' orderings."""

import dataclasses
import json

import pytest

import dllm_jax as dj
from bench import orderings, plots, policies, summary
from bench.policies_grid import EXACT, LONG, SHORT, Setting, calibrated
from bench.policies_workloads import Workload
from dllm_jax import expressions, samplers
from dllm_jax.expressions import call
from tests.models import random_tokens, tiny

GRIDS = {"short": SHORT, "long": LONG}


@pytest.fixture(scope="module")
def workload():
    model = tiny("llada")
    grid = (
        EXACT,
        Setting(dj.policies.DualCache()),
        Setting(sampler=samplers.RandomOrder(), variant="random order"),
        Setting(dj.policies.DKVGreedy(), samplers.RandomOrder(), variant="random order"),
        Setting(dj.policies.MaskKV(budget=2, prompt_every=8, response_every=1)),
    )
    prompt = random_tokens(model.spec, 4, 6)
    return Workload("tiny", model, prompt, length=4, block=2, chunk=2, grid=grid)


@pytest.fixture(scope="module")
def rows(workload):
    return policies.measure(workload, repeats=1)


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
        assert expressions.policy(call(setting.policy)) == setting.policy
        assert expressions.sampler(call(setting.sampler)) == setting.sampler


def test_every_claim_of_the_papers_is_in_a_grid():
    bare = lambda setting: dataclasses.replace(setting, variant="")
    grids = [{bare(setting) for setting in grid} for grid in GRIDS.values()]
    for claim in orderings.claims():
        assert any({bare(claim.better), bare(claim.other)} <= grid for grid in grids), claim


def test_rows(workload, rows):
    exact, dual, other_order, greedy, mask_kv = rows
    assert exact["agreement"] == other_order["agreement"] == 1.0
    assert exact["computed"] == other_order["computed"] == 1.0
    assert exact["forwards"] == 4
    assert dual["computed"] == pytest.approx((2 * 10 + 2 * 2) / 40)  # two steps per block, one of them whole
    assert dual["kept_pairs"] == 10
    assert mask_kv["kept_pairs"] < 10
    assert greedy["accuracy"] is None
    assert all(row["tokens_per_s"] > 0 and row["speed_over_exact"] > 0 for row in rows)


def test_calibrated_layers_get_what_the_profile_says():
    for setting in calibrated((0.1, 0.6, 0.2, 0.1)):
        budgets = setting.policy.table(
            dataclasses.replace(tiny("llada").spec, layers=4), dj.Layout(64, 4, 4, 4)
        )[-1]
        assert len(set(budgets.tolist())) > 1


def test_page_and_figures(workload, rows, tmp_path):
    found = tmp_path / "found.json"
    where = {"device": "test", "jax": "0", "dtype": "float32"}
    found.write_text(json.dumps(where | {"models": {"tiny": workload.described | {"rows": rows}}}))
    plots.main(found, tmp_path / "docs")
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "`DualCache()`" in page
    assert "4 prompts of 6 tokens, length 4, block 2" in page
    assert {file.name for file in (tmp_path / "docs" / "figures").iterdir()} == {
        "policies-tiny.png",
        "policies-tiny.svg",
    }


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


def test_what_the_readme_shows_is_in_the_grid():
    bare = lambda setting: dataclasses.replace(setting, variant="")
    assert {bare(setting) for setting in summary.SHOWN} <= {bare(setting) for setting in LONG}
    assert {type(setting.policy) for setting in summary.SHOWN} == {type(p) for p in dj.policies.ALL}
