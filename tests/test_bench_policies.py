"""bench.policies: its grid, a run of it, its tables and figures, and the papers' claims beside them."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

import dllm_jax as dj
from bench.policies import __main__ as policies
from bench.policies import every, measure, orderings, plots, summary
from bench.policies.grid import (
    BLOCK_CAUSAL,
    CORE,
    EXACT,
    LATER,
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
from bench.policies.workloads import ASKED, workloads
from dllm_jax import samplers, tasks

ROOT = pathlib.Path(__file__).parents[1]
GRIDS = {"short": (*SHORT, *SHORT_EVICTION), "long": (*LONG, *LONG_EVICTION)}
GRIDS |= {"core": CORE, "pictured": PICTURED}
OF_BLOCKS = set(map(type, dj.policies.BLOCK_CAUSAL)) - {dj.policies.SubBlockCache}


@pytest.fixture(scope="module", autouse=True)
def fewest_kinds_of_steps():
    """No run compiles another program for narrow steps: widths change nothing (tests/test_policies.py)."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in {dj.policies.Policy, *map(type, dj.policies.ALL)}:
            patch.setattr(kind, "widths", lambda policy, spec, layout: (layout.length,))
        patch.setattr(jax, "clear_caches", lambda: None)  # programs serve again
        yield


@pytest.fixture(scope="module")
def workload():
    grid = (
        EXACT, Setting(dj.policies.DualCache()),
        Setting(sampler=samplers.RandomOrder(), variant="random order"),
        Setting(dj.policies.DKVGreedy(), samplers.RandomOrder(), variant="random order"),
        Setting(dj.policies.SparseDLLM(keep=0.25)),
    )  # fmt: skip
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
    seen = [s.unlabeled for s in GRIDS[grid]]
    assert len(set(seen)) == len(seen)
    assert {s.exact for s in GRIDS[grid]} <= set(seen)
    assert GRIDS[grid][0] == EXACT
    for setting in (*GRIDS[grid], *calibrated((0.1, 0.6, 0.2, 0.1))):
        again = setting_of(setting.named(32, 4), 32, 4)
        assert again == setting.unlabeled, "settings are read back from what results call them"


def test_models_that_attend_within_blocks_have_their_policies_compared():
    """And what those read: an exact step, which enters a block, and steps that read the chosen pairs."""
    assert {type(setting.policy) for setting in BLOCK_CAUSAL} > OF_BLOCKS
    for model in dj.bundled.BLOCK_CAUSAL:
        asked = dataclasses.replace(workloads(2)[f"{model} chain-among-values"](), length=8)
        length = asked.prompt.shape[1] + 8 + 3
        reads = lambda policy, asked=asked: measure._reads(asked, Setting(policy))["pairs_read"]
        assert reads(dj.policies.Policy()) == length
        counted = {8 + 4: 6, length + 8 + 4: 1}
        assert reads(dj.policies.MAGE(keep=8)) == sum(s * n for s, n in counted.items()) / 7


def test_every_claim_of_the_papers_is_in_a_grid():
    grids = [{setting.unlabeled for setting in grid} for grid in GRIDS.values()]
    for claim in orderings.CLAIMS:
        assert any({claim.one.unlabeled, claim.other.unlabeled} <= grid for grid in grids), claim
        assert all(title in ASKED for title in claim.only)


def test_rows(workload, results):
    exact, dual, other_order, greedy, sparse = results["rows"]
    assert exact["agreement"] == other_order["agreement"] == exact["accuracy"] == 1.0
    assert exact["computed"] == other_order["computed"] == 1.0
    assert exact["forwards"] == 32
    length = workload.prompt.shape[1] + 32
    assert dual["computed"] == pytest.approx((length + 3 * 4) / (4 * length))  # a full step per block
    assert dual["kept_pairs"] == length
    assert 0 < sparse["kept_pairs"] < length
    assert greedy["computed"] < 1
    assert measure._storage(workload, LATER[-1])[0] == length, "a block that slides"


def test_every_setting_is_printed(results, tmp_path, capsys):
    found = tmp_path / "found.json"
    found.write_text(json.dumps({"models": {"tiny": results, "other": results}}))
    every.main(found, only="tiny")
    printed = capsys.readouterr().out
    assert printed.count("4 prompts of") == 1
    assert printed.count("\n| `DualCache()` | `Confidence` | 4 | 32 | 100.0% (51 to 100) | 100.0% |") == 1
    assert "(Fast-dLLM, Table 1) | tiny | `DualCache()`" in printed


def test_figures_show_settings_by_name_and_points_that_were_measured():
    measured = json.loads((ROOT / "bench/results/policies_cpu.json").read_text())["models"]
    labels = [text.get_text() for text in plots.accuracy(measured).axes[0].texts]
    assert len(labels) == 8
    assert "DualCache()" in labels
    lines = plots.growth((1024,)).axes[0].lines
    points = {line.get_ydata()[0] for line in lines if line.get_marker() in plots.MARKERS}
    assert any(abs(1000 / one - 164.7) < 0.1 for one in points)
    points = [(1.0, 0.9), (0.5, 0.9), (0.4, 0.5), (0.4, 0.7), (0.3, 0.7), (0.2, 0.1), (0.6, 0.95)]
    assert plots.front(points) == [(0.2, 0.1), (0.3, 0.7), (0.5, 0.9), (0.6, 0.95)], "of what nothing beats"


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
        ((LATE, 0.9), (AT_ONCE, 0.89), 32, "within noise"),
        ((LATE, 0.9), (AT_ONCE, 0.9), 32, "no difference"),
        (("SparseDLLM()", 0.99), ("Policy()", 1.0), 8, "yes"),
        (("SparseDLLM()", 0.8), ("Policy()", 0.97), 8, "no"),
        (("SparseDLLM()", 0.0), ("Policy()", 0.0), 8, "both at the floor"),
        (("SparseDLLM(keep=0.1)", 0.5), ("SparseDLLM(keep=0.1, side='prefix')", 0.5), 32, "same computation"),
    ],
)  # fmt: skip
def test_verdicts(one, other, block, says):
    (line,) = verdict(one, other, block)
    assert line.endswith(f"| {says} |")


def test_right_answers_and_right_tokens(workload):
    asked = dataclasses.replace(workload, wanted=workload.wanted[:3])
    right = [f"{example.answer}" for example in asked.wanted]
    wrong = right[1][:-2] + ("a" if right[1][-2] != "a" else "b") + right[1][-1]
    encode = lambda text: workload.tokenizer.encode(text, add_special_tokens=False)
    stop, length = [workload.model.spec.eot_id], workload.length
    # One token is wrong; and what follows the end does not count.
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


def test_policies_that_were_not_measured_are_left_out_and_gaps_are_told():
    assert at_defaults(LONG, (*dj.policies.ALL, NewPolicy())) == [Setting(NewPolicy())]
    measured = json.loads((ROOT / "bench/results/policies_cpu.json").read_text())["models"]
    assert summary.lines(measured, (*dj.policies.ALL, NewPolicy())) == summary.lines(measured)
    for workload in measured.values():
        rows = [row for row in workload["rows"] if row["policy"] != "DualCache()"]
        workload["rows"] = [*rows, rows[0] | {"policy": "DualCache()", "steps": 1}]
    with pytest.raises(LookupError, match=r"DualCache\(\).* was not measured"):
        summary.table(measured, dj.bundled.TEXT)


def test_of_long_responses_the_beginning_counts():
    workload = workloads(8)["tiny-llada chain-in-128"]()
    spec, wanted = workload.model.spec, list(workload.wanted)
    right = np.array(tasks.encode_batch(workload.tokenizer, wanted, 128, spec).answer)
    right = np.where(np.isin(right, (spec.eos_id, spec.eot_id)), right[0, 0], right)
    wrong = right.copy()
    wrong[0, 3] = right[0, 4]
    assert workload.scores(right)["accuracy"] == 1
    assert workload.scores(wrong)["accuracy"] == 0.5
    assert dataclasses.replace(workload, beginning=False).scores(right)["accuracy"] == 0
