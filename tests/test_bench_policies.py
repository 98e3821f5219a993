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
from bench.policies import orderings, pictures, plots, summary
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
from bench.policies.measure import Timing
from bench.policies.workloads import ASKED, ASKED_OF_PICTURES, UNLEARNT, Workload, workloads
from dllm_jax import samplers
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.tasks import Example
from tests.models import FAMILIES, canvas, random_tokens, tiny

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
    some, untimed, timed = policies.stages(workload, {}, Timing(turns=2, batch=2), saved=3)
    assert some["rows"] == untimed["rows"][:3]  # what is left of a run that is killed then
    assert not any("tokens_per_s" in row for row in untimed["rows"])
    assert list(policies.stages(workload, timed, Timing())) == []
    return timed


@pytest.fixture(scope="module")
def rows(results):
    return results["rows"]


@pytest.mark.parametrize("grid", GRIDS)
def test_the_grid_has_every_policy_and_an_exact_decoder_for_every_sampler(grid):
    assert {type(s.policy) for s in GRIDS[grid]} == {type(p) for p in dj.policies.ALL}
    compared = {s.unlabelled for s in GRIDS[grid] if s.policy == EXACT.policy}
    assert {s.exact for s in GRIDS[grid]} <= compared
    assert GRIDS[grid][0] == EXACT


@pytest.mark.parametrize("grid", GRIDS)
def test_no_setting_is_there_twice(grid):
    seen = [s.unlabelled for s in GRIDS[grid]]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("policy", KNOBS)
def test_every_policy_has_four_settings_along_its_main_knob(policy):
    settings = [s for s in LONG if type(s.policy).__name__ == policy and s.sampler == EXACT.sampler]
    knob = KNOBS[policy]
    of = lambda s: s.block(32, 4) if knob == "block" else getattr(s.policy, knob)
    assert len({of(setting) for setting in settings}) >= 4


@pytest.mark.parametrize("name", dj.embedded.TEXT)
def test_models_are_asked_what_their_cards_say_they_answer(name):
    log = json.loads((pathlib.Path(dj.embedded.path(name)) / "training_log.json").read_text())
    asked = {
        title for made in workloads(2, 128) for model, _, title in [made.partition(" ")] if model == name
    }
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


@pytest.mark.parametrize("grid", GRIDS)
def test_settings_are_read_back_from_what_results_call_them(grid):
    settings = (*GRIDS[grid], *calibrated((0.1, 0.6, 0.2, 0.1)))
    for setting in settings:
        again = setting_of(setting.named(32, 4), 32, 4)
        assert again == setting.unlabelled


def test_every_claim_of_the_papers_is_in_a_grid():
    grids = [{setting.unlabelled for setting in grid} for grid in GRIDS.values()]
    for claim in orderings.claims():
        assert any({claim.one.unlabelled, claim.other.unlabelled} <= grid for grid in grids), claim
        assert all(title in ASKED for title in claim.only)


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
    known = {"accuracy": 0.5, "interval": [0.4, 0.6], "token_accuracy": 0.75}
    old = [row | known | {"speed_over_exact": -1.0, "speed_range": [-1.0, -1.0]} for row in rows[:2]]
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
    assert set(runs) == {
        EXACT,
        grid[2].unlabelled,
        grid[3].unlabelled,
    }  # the new one, and what it is compared with
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
        row("DKVDecode(refresh_every=2)", delay, block=32),
        row("DKVDecode(refresh_every=2, delay=0)", none, block=32),
    ]
    table = orderings.table({"x": {"prompt": [256, 8], "length": 32, "block": 8, "rows": measured}})
    lines = table.splitlines()[2:]
    assert len(lines) == 1
    assert lines[0].endswith(f"| {verdict} |")


@pytest.mark.parametrize(
    ("sparse", "exact", "verdict"),
    [
        (0.99, 1.0, "yes"),
        (1.0, 0.9, "yes"),
        (0.94, 0.97, "within noise"),
        (0.8, 0.97, "no"),
        (0.0, 0.0, "both at the floor"),
    ],
)
def test_verdicts_on_what_is_kept(sparse, exact, verdict):
    measured = [row("SparseDLLM()", sparse), row("Policy()", exact)]
    table = orderings.table({"x": {"prompt": [256, 8], "length": 32, "block": 8, "rows": measured}})
    (line,) = table.splitlines()[2:]
    assert line.endswith(f"| {verdict} |")


def test_intervals_of_a_difference():
    measured = [row("SparseDLLM()", 0.8), row("Policy()", 0.9)]
    table = orderings.table({"x": {"prompt": [100, 8], "length": 32, "block": 8, "rows": measured}})
    assert "| -10.0 ± 9.8 |" in table  # 1.96 sqrt((0.16 + 0.09) / 100)


def test_some_claims_are_about_one_workload_only():
    named = lambda name: {name: {"prompt": [100, 8], "length": 4, "block": 4, "rows": rows}}
    settings = ("MaskKV(prompt_every=4, response_every=1, budget=32)", "Policy()")
    rows = [row(policy, 0.9, block=4) | {"steps": 4} for policy in settings]
    tables = [orderings.table(named(f"tiny-llada {title}")) for title in ("needle-1024", "needle-256")]
    assert ["94 %" in table for table in tables] == [True, False]


def test_right_answers_and_right_tokens(workload):
    wanted = (Example("", "407"), Example("", "211"), Example("", "9"))
    path = dj.embedded.path("tiny-llada")
    tokenizer = read_tokenizer(path)
    spec = dj.load(path).spec
    asked = dataclasses.replace(
        workload, model=dj.abstract(path), tokenizer=tokenizer, wanted=wanted, length=4
    )
    answer = lambda text, end: [*tokenizer.encode(text, add_special_tokens=False), *end]
    stop = [spec.eot_id]
    responses = np.array([
        answer("407", stop),
        answer("218", stop),  # three of its four tokens
        answer("9", [*stop, 7, 8]),  # what stands behind the end does not count
    ])  # fmt: skip
    scores = asked.scores(responses)
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert scores["token_accuracy"] == pytest.approx(9 / 10)
    low, high = scores["interval"]
    # Wilson's interval of 2 of 3: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    assert (low, high) == pytest.approx((0.2077, 0.9385), abs=1e-4)
    assert set(workload.scores(responses).values()) == {None}


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
    table = summary.table(measured, dj.embedded.TEXT).split("\n\n")[0].splitlines()
    names = {row["policy"].split("(")[0] for workload in measured.values() for row in workload["rows"]}
    known = [line for line in summary.LINES if type(line.chain.policy).__name__ in names]
    assert len(table) == 2 + len(shown) >= 2 + len(known)
    assert len(summary.fewer_steps(measured, dj.embedded.TEXT).splitlines()) == 2 + 1 + len(CACHES)
    assert len(known) >= 13, "the policies of the last run of the grid"
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


def test_the_tables_of_the_documentation_are_those_of_the_results():
    root = pathlib.Path(__file__).parents[1]
    measured = json.loads((root / "bench/results/policies_cpu.json").read_text())["models"]
    page = (root / "docs/results.md").read_text()
    for table in (summary.table(measured, dj.embedded.TEXT), summary.fewer_steps(measured, dj.embedded.TEXT)):
        assert table in page
    readme = (root / "README.md").read_text().splitlines()
    head = next(line for line in page.splitlines() if line.startswith("| policy | chain, `tiny-llada`"))
    shown = readme[readme.index(head) + 2 :][:12]
    assert all(line.startswith("| `") and line in page for line in shown), shown


def test_every_chunk_is_decoded_with_its_own_images():
    """One position of each prompt is embedded: the model must see that row, and not another prompt's."""
    model, spec = tiny("llada"), tiny("llada").spec
    prompt = np.array(random_tokens(spec, 4, 6))
    prompt[:, 2] = dj.EMBEDDED
    embeds = np.array(jax.random.normal(jax.random.key(1), (4, 6, spec.width)), np.float32) * 3
    workload = Workload("tiny", model, prompt, 4, 2, 2, (EXACT,), embeds=embeds)
    parts = [workload.run(EXACT, prompts).tokens for prompts in workload.chunks()]
    want = dj.generate(model, prompt, prompt_embeds=embeds, length=4, block=2).tokens
    np.testing.assert_array_equal(np.concatenate(parts), want)


def test_the_table_of_pictures_has_a_line_for_every_setting():
    found = {"accuracy": 0.5, "interval": [0.4, 0.6], "computed": 0.3, "kept_pairs": 80.0}
    measured = {
        f"tiny-llada-v {task}": {
            "length": asked.length,
            "block": 2,
            "rows": [setting.named(asked.length, 2) | found for setting in asked.grid],
        }
        for task, asked in ASKED_OF_PICTURES.items()
    }
    head, _, *lines = pictures.table(measured, "tiny-llada-v").splitlines()
    assert len(lines) == len(PICTURED)
    assert head.startswith("| policy | read-2 | read-5 | computed |")
    assert all(line.count("50.0% (40-60)") == 2 for line in lines)
