"""`reproduce`: the published tables, what is refused, and runs on local data with a bundled model."""

import importlib.util
import json
import math
import tomllib

import pytest

import dllm_jax as dj
from dllm_jax.eval.cli.reproduce import reproduce
from dllm_jax.eval.run.files import write_json
from dllm_jax.eval.run.published import TableRequest, _scores
from dllm_jax.eval.run.settings import Checkpoint
from dllm_jax.published import tables
from tests import refuses

LISTED = {  # cells of all models and those whose accuracy is printed
    "maskkv/1": (336, 336), "maskkv/2": (9, 8), "dkv-cache/1": (42, 42), "dkv-cache/2": (30, 30),
    "dkv-cache/3": (16, 16), "dkv-cache/4": (8, 6), "elastic-cache/1": (24, 24), "elastic-cache/2": (24, 24),
    "sparse-dllm/1": (70, 70), "sparse-dllm/2": (70, 70), "d2cache/1": (48, 48),
    "illada/settings": (8, 0), "stable-diffcoder/settings": (4, 0),
}  # fmt: skip
# Copied from the papers by hand.
PRINTED = [
    ("maskkv/1", "llada-8b-instruct", "passage_retrieval_en", "MaskKV, B = 32", 90.33, None, None),
    ("maskkv/1", "dream-v0-instruct-7b", "repobench-p", "SnapKV, B = 128", 36.51, None, None),
    ("maskkv/2", "llada-8b-instruct", "longbench", "+PyramidKV", 33.52, None, None),
    ("dkv-cache/1", "llada-8b-instruct", "gpqa", "dKV-Cache-Greedy w/ window (random)", 28.35, 18.26, 1.60),
    ("dkv-cache/2", "dream-v0-base-7b", "gsm8k", "dKV-Cache-PD, T = L/2", 63.31, 99.5, 6.6),
    ("dkv-cache/3", "dream-v0-base-7b", "gpqa", "dKV-Cache-Prefill, T = L", 35.27, 75.40, 10.19),
    ("dkv-cache/4", "dream-v0-base-7b", "gsm8k", "Right-Shift", 32.68, None, None),
    ("elastic-cache/1", "llada-8b-instruct", "gsm8k", "Elastic-Cache, length 512", 77.71, 90.1, 25.2),
    ("elastic-cache/2", "llada-1.5", "mbpp", "Fast-dLLM, length 256", 34.60, 28.0, 11.6),
    ("sparse-dllm/1", "llada-1.5", "humaneval", "dKV-Cache", 39.63, 14.40, 1.2),
    ("sparse-dllm/2", "dream-v0-instruct-7b", "math", "Sparse-dLLM", 40.48, 36.72, 4.1),
    ("d2cache/1", "dream-v0-instruct-7b", "mmlu-pro", "d2Cache", 46.8, 10.12, 4.7),
]


def test_the_tables_are_whole_and_hold_what_is_printed():
    """And speed-ups are quotients of speeds, but for roundings and what papers themselves print otherwise."""
    presets = set(dj.presets)
    assert tables.names() == list(LISTED)
    for name, count in LISTED.items():
        table, seen = tables.table(name), set()
        assert (len(table.cells), sum(cell.accuracy is not None for cell in table.cells)) == count
        for cell in table.cells:
            assert set(cell.preset_names) <= presets
            assert (cell.missing is None) <= bool(cell.preset_names)
            exact = cell if cell.over is None else table.of(cell.model)[cell.task, cell.over]
            assert exact.over is None
            if cell.speedup is not None:
                assert cell.speed / exact.speed == pytest.approx(cell.speedup, rel=0.14, abs=0.06)
            if cell.missing is None and cell.method not in seen:
                seen.add(cell.method)
                assert all(preset.length for preset in cell.settings())
                exact = not any(preset.policy.reuses for preset in cell.settings())
                assert exact or cell.over is not None or cell.accuracy is None
    for name, model, *key, accuracy, speed, speedup in PRINTED:
        cell = tables.table(name).of(model)[tuple(key)]
        assert (cell.accuracy, cell.speed, cell.speedup) == (accuracy, speed, speedup)
    half = tables.table("dkv-cache/2").of("dream-v0-base-7b")["gsm8k", "Half-Steps, T = L/2"]
    assert [preset.steps for preset in half.settings()] == [64]


def test_scores_that_a_task_lacks_are_named_and_not_averaged(tmp_path):
    """Of tasks whose scores are known when they were asked."""
    sample = {"filter": "none", "metrics": ["acc"], "acc": 1.0}
    right = sample | {"metrics": ["exact_match"], "exact_match": True}
    of = tables.Benchmark("gsm8k", "gsm8k", "exact_match,none")
    assert _scores(of, {"a": [right], "b": [right | {"filter": "x"}, right]}) == [1.0, 1.0]
    message = "task b has no finite scores of metric 'exact_match' with filter 'none'.*: it has "
    refuses(f"{message}acc,none", _scores, of, {"a": [right], "b": [sample]})
    refuses(f"{message}exact_match,x", _scores, of, {"a": [right], "b": [right | {"filter": "x"}]})
    refuses(f"{message}none", _scores, of, {"a": [right], "b": []})
    refuses(f"{message}exact_match,none", _scores, of, {"b": [right | {"exact_match": math.nan}]})
    refuses(f"^{tmp_path}/a.json: NaN, infinity or a", write_json, tmp_path / "a.json", {"a": [math.nan]})
    assert not any(tmp_path.iterdir())


def test_a_row_has_a_number_for_each_task():
    text = tables.FILE.read_text().replace('"Un-Shift" = "71.78 76.34"', '"Un-Shift" = "71.78"')
    with pytest.raises(ValueError, match=r"Un-Shift: 1 numbers for 2 tasks: '71\.78'"):
        tables.table("dkv-cache/4", text)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "a table is missing: one of maskkv/1, maskkv/2, "),
        (["dkv-cache/9"], "'dkv-cache/9' is not among the tables: maskkv/1, "),
        (["dkv-cache/5"], "dkv-cache/5 holds settings, no results"),
        (["dkv-cache/2"], "tiny-llada is a llada model; dkv-cache/2, dream-v0-base-7b: another family"),
        (["sparse-dllm/1"], "has rows of llada-8b-instruct, llada-1.5: --rows-of says which"),
        (["sparse-dllm/1", "--rows-of", "dream"], "--rows-of dream: sparse-dllm/1 has rows of"),
        (["maskkv/1"], "maskkv/1: qasper, w/o Cache: it needs --data"),
        (["maskkv/1", "--data", "."], "qasper.jsonl does not exist"),
        (["maskkv/1", "--tasks", "qasper2"], "--tasks 'qasper2' is not in maskkv/1: qasper; "),
        (["maskkv/1", "--methods", "SqueezeAttention, B = 32"], "needs a number per layer that is not"),
        (["dkv-cache/1", "--tasks", "mbpp"], "dkv-cache/1: mbpp, Base (random): its answers are programs"),
        (["dkv-cache/1", "--tasks", "mbpp", "--run-code"], "set HF_ALLOW_CODE_EVAL=1"),
        (["dkv-cache/1", "--limit", "0"], "limit=0 must be"),
        (["dkv-cache/1", "--list", "--chip", "b9000"], "--chip b9000 must be one of h100"),
        (["dkv-cache/1", "--prompt", "512"], "add --list"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_measured_are_refused_before_anything_is_loaded(
    words, reason, monkeypatch, tmp_path, evaluate
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)  # as if lm_eval were installed
    monkeypatch.setattr(Checkpoint, "open", lambda self: pytest.fail("it was loaded"))
    assert evaluate("reproduce", *words, error=reason) == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cell = tables.table("dkv-cache/1").of("llada-8b-instruct")["gsm8k", "Base (random)"]
    assert "lm_eval is not installed" in TableRequest().lacks(cell)


def test_list_alone_says_which_tables_there_are(evaluate, capsys):
    assert evaluate("reproduce", "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == tables.names()
    assert (
        "d2Cache (arXiv:2509.23094), Table 1; llada-8b-instruct" in lines[tables.names().index("d2cache/1")]
    )


SMALL = """
source = "A paper, Table 1"
hardware = "an abacus"
tasks = ["hotpotqa"]
[methods]
"exact" = { preset = "maskkv", policy = "Policy()", length = 4, steps = 4, block = 2 }
"half" = { preset = "maskkv", policy = "Policy()", length = 4, block = 2, steps_by = 16, over = "exact" }
"cached" = { preset = "maskkv", policy = "DualCache()", length = 4, steps = 4, block = 2, over = "exact" }
"lost" = { missing = "it is lost", over = "exact" }
[accuracy.llada-8b-instruct]
"exact" = "90"
"cached" = "80"
[speed.llada-8b-instruct]
"exact" = "2"
"cached" = "6"
[speedup.llada-8b-instruct]
"cached" = "3"
"""


def small(**changes) -> tables.Table:
    """A table that tiny-llada can answer."""
    known = tomllib.loads(tables.FILE.read_text())["benchmarks"]
    return tables.of(tomllib.loads(SMALL) | changes, known, "small/1")


MODEL = "llada-8b-instruct"


def cells_in(folder) -> list[dict]:
    """What was written of the small table."""
    return json.loads((folder / f"reproduce-small-1-{MODEL}.json").read_text())["cells"]


@pytest.fixture
def data(tmp_path):
    """LongBench's hotpotqa, of three questions that tiny-llada answers."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = {"b=407;T=211;z=830;k=566;T=": "211", "ab=407;T=211;iz=830;ab=": "407"}
    rows["aob=407;T=211;iez=830;T="] = "211"
    sample = lambda text: {"context": text, "input": "", "answers": [rows[text]], "all_classes": None}
    (folder / "hotpotqa.jsonl").write_text("".join(json.dumps(sample(text)) + "\n" for text in rows))
    (folder / "dataset2prompt.json").write_text(json.dumps({"hotpotqa": "{context}{input}"}))
    return folder


def test_cells_are_measured_beside_what_is_printed_and_resumed(data, tmp_path, monkeypatch, capsys):
    table, model, out = small(), MODEL, tmp_path / "out"
    asked = TableRequest(data=data, out=out, methods=("cached",))
    cells = asked.chosen(table, model)
    assert [method for _, method in cells] == ["exact", "cached"]  # the exact decoder comes along
    assert len(TableRequest(data=data).chosen(table, model)) == 3  # what is lost is left out
    figure = tmp_path / "figure.png"
    assert reproduce(table, model, cells, asked, Checkpoint(), figure) == 0
    text = capsys.readouterr().out
    assert "printed speeds are of an abacus" in text
    assert "tiny-llada has not the shape of llada-8b-instruct" in text
    assert figure.stat().st_size > 1000

    found = exact, cached = cells_in(out)
    assert exact["ours"]["accuracy"] == cached["ours"]["accuracy"] == [1, 1, 1]
    assert cached["printed"] == dict(accuracy=80, speed=6, speedup=3)
    assert cached["ours"]["totals"]["requests"] == 3
    assert (exact["ours"]["speedup"], cached["policies"]) == (None, ["DualCache()"])
    assert cached["ours"]["speedup"] == pytest.approx(cached["ours"]["speed"] / exact["ours"]["speed"])

    # A second run decodes nothing; one with other settings, or of another model, is another run.
    monkeypatch.setattr("dllm_jax.generate_many", None)
    assert reproduce(table, model, cells, asked, Checkpoint()) == 0
    assert cells_in(out) == [*found]
    alone = {key: cell for key, cell in cells.items() if "exact" in key}
    assert reproduce(table, model, alone, asked, Checkpoint()) == 0
    assert cells_in(out) == [*found]  # the other cell stays
    with pytest.raises(ValueError, match="choose another --out"):
        reproduce(table, model, cells, TableRequest(data=data, out=out, limit=1), Checkpoint())


def test_averages_are_over_tasks(data, tmp_path):
    (data / "qasper.jsonl").write_text((data / "hotpotqa.jsonl").read_text().replace('"211"', '"999"'))
    templates = dict.fromkeys(("hotpotqa", "qasper"), "{context}{input}")
    (data / "dataset2prompt.json").write_text(json.dumps(templates))
    known = tomllib.loads(tables.FILE.read_text())["benchmarks"]
    known["both"] = {"average": ["hotpotqa", "qasper"]}
    table = tables.of(tomllib.loads(SMALL) | {"tasks": ["both"]}, known, "small/1")
    asked = TableRequest(data=data, out=tmp_path, methods=("exact",))
    assert reproduce(table, MODEL, asked.chosen(table, MODEL), asked, Checkpoint()) == 0
    (row,) = cells_in(tmp_path)
    mean, low, high = row["ours"]["accuracy"]
    assert mean == pytest.approx((1 + 1 / 3) / 2)
    assert 0.5 <= low < mean < high <= 1
    assert row["presets"] == ["maskkv/llada-8b-instruct/hotpotqa", "maskkv/llada-8b-instruct/qasper"]


TASK = """
task: gsm8k
dataset_path: json
test_split: test
doc_to_text: "{{context}}"
doc_to_target: "{{answers[0]}}"
output_type: generate_until
generation_kwargs: {until: ["\\n"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list: [{name: flexible-extract, filter: [{function: take_first}]}]
"""


@pytest.mark.filterwarnings("ignore")  # lm_eval's and its dependencies' own
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness: the 'harness' extra"
)
def test_tasks_of_lm_eval_are_asked(data, tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    (data / "lm_eval").mkdir()
    source = f"data_files: {{test: {data / 'hotpotqa.jsonl'}}}, cache_dir: {data / 'cache'}"
    files = f"dataset_kwargs: {{{source}}}\n"
    (data / "lm_eval" / "gsm8k.yaml").write_text(TASK + files)
    methods = tomllib.loads(SMALL.replace('"maskkv"', '"dkv-decode"'))["methods"]
    table = small(tasks=["gsm8k"], shots=[0], methods=methods)
    asked = TableRequest(data=data, out=tmp_path, methods=("cached",), limit=2)
    cells = asked.chosen(table, MODEL)
    assert reproduce(table, MODEL, cells, asked, Checkpoint()) == 0
    exact, cached = cells_in(tmp_path)
    assert cached["ours"]["accuracy"] == [1, 1, 1]
    assert (exact["ours"]["totals"]["requests"], cached["ours"]["totals"]["failed"]) == (2, 0)
    assert cached["ours"]["speedup"] > 0
    for name, other in (("flexible-extract", "other"), ("exact_match,", "acc,")):  # before anything is loaded
        (data / "lm_eval" / "gsm8k.yaml").write_text(TASK.replace(name, other) + files)
        said = "has no finite scores of metric 'exact_match' with filter 'flexible-extract'.* it has "
        refuses(f"task gsm8k {said}.*{other.strip(',')}", reproduce, table, MODEL, cells, asked, None)
    (data / "lm_eval" / "gsm8k.yaml").write_text(TASK + files.replace("hotpotqa", "gone"))
    with pytest.raises(ValueError, match="lm_eval cannot load gsm8k"):
        reproduce(table, MODEL, cells, asked, Checkpoint())
