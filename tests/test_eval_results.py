"""Results: not replaced by others, put together from parts, compared; and the commands of the page."""

import dataclasses
import functools
import json
import pathlib
import re
import shlex
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import rich.console
import tyro

import dllm_jax as dj
from dllm_jax.command_line import plain_errors
from dllm_jax.eval import __main__ as command
from dllm_jax.eval.benchmarks import synthetic
from dllm_jax.eval.cli import commands as cli
from dllm_jax.eval.cli.options import part_of
from dllm_jax.eval.results import record, show
from dllm_jax.eval.results.comparison import bootstrap, compare_records
from dllm_jax.eval.results.record import paths, read
from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.files import write_json
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.settings import Checkpoint, Decoding
from dllm_jax.state.sliding import Sliding
from dllm_jax.tasks import FewShot, Sorting

COUNT = 7


def answer(out, part: str = "1/1") -> int:
    options = cli.EvalOptions(decoding=Decoding(length=4, block=2, batch=2), out=out, part=part)
    return cli.run_tasks(options, "FewShot(kinds=3)", (5,), COUNT)


def test_parts_are_merged_without_loss(tmp_path, capsys, evaluate):
    assert answer(tmp_path / "whole") == 0
    folders = [tmp_path / f"part{i}" for i in range(3)]
    for number, folder in enumerate(folders, start=1):
        assert answer(folder, f"{number}/3") == 0
        assert [file.name for file in folder.iterdir()] == ["journal.jsonl"]  # no result of a part
    held = [len(Journal(folder / "journal.jsonl").entries) for folder in folders]
    assert sum(held) == COUNT
    assert min(held) > 0

    assert evaluate("merge", tmp_path / "all", *folders) == 0
    assert f"{COUNT} answers added" in capsys.readouterr().out
    merged = (tmp_path / "all" / "journal.jsonl").read_text()
    assert answer(tmp_path / "all") == 0
    assert (tmp_path / "all" / "journal.jsonl").read_text() == merged, "answers were computed again"
    read = lambda folder: json.loads((tmp_path / folder / "tasks-Policy.json").read_text())["requests"]
    of = lambda folder: [(r["id"], r["answer"], r["score"], r["computed"]) for r in read(folder)]
    assert of("whole") == of("all")


def test_an_answer_counts_before_a_failure(tmp_path):
    failed, answered = (Entry(key="k", answer=a, error=e) for a, e in ((None, "died"), ("7", None)))
    for name, entries in (("a", [answered]), ("b", [failed])):
        journal = Journal(tmp_path / name)
        journal.add(entries)
        journal.close()
    for order in ("ab", "ba"):
        target = tmp_path / f"into-{order}"
        assert Journal(target).merge([tmp_path / name for name in order]) == 1
        assert Journal(target).entries == {"k": answered}
        assert Journal(target).merge([str(tmp_path / "b")]) == 0  # what is answered stays so
    with pytest.raises(FileNotFoundError, match="no part was evaluated there"):
        Journal(tmp_path / "into").merge([tmp_path / "c"])


def test_files_that_are_no_part_are_refused(tmp_path):
    for text in ("0/4", "5/4", "2", "a/b", "1/0", "-1/2", "1/2/3", ""):
        with pytest.raises(ValueError, match="must be like 2/4"):
            part_of(text)
    with pytest.raises(ValueError, match=r"'DualCache\(\)' and another .*tasks-DualCache\.json"):
        paths(tmp_path, "tasks", ("DualCache", "Policy", "DualCache()"))


def test_a_result_is_replaced_by_the_same_run_only(tmp_path):
    decoding = Decoding(length=4, block=2, batch=2)
    options = cli.EvalOptions(decoding=decoding, out=tmp_path)
    run = lambda task="FewShot(kinds=3)", **changes: cli.run_tasks(
        dataclasses.replace(options, **changes), task, (5,), 1
    )
    assert run() == 0
    content = (tmp_path / "tasks-Policy.json").read_text()
    for changes, reason in (
        (
            dict(decoding=dataclasses.replace(decoding, sampler=dj.samplers.Threshold(0.9))),
            r"decoding\.sampler was .Confidence.* and would be .Threshold",
        ),
        (
            dict(decoding=dataclasses.replace(decoding, seed=1)),
            r"decoding\.seed was 0 and would be 1; settings\.seed was 0 .*another --out",
        ),
        (
            dict(decoding=dataclasses.replace(decoding, block=Sliding(2))),
            r"decoding\.block was 2 and would be 'Sliding\(block=2, longest=None\)'",
        ),
        (dict(checkpoint=Checkpoint("tiny-dream")), r"model\.identity was"),
        (dict(task="FewShot"), r"settings\.task was"),
        (dict(decoding=dataclasses.replace(decoding, batch=8)), "batch was 2 and would be 8"),
    ):
        with pytest.raises(ValueError, match=reason):
            run(**changes)
    assert (tmp_path / "tasks-Policy.json").read_text() == content
    assert run() == 0
    (tmp_path / "tasks-Policy.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not a result of dllm_jax\.eval.*another --out"):
        run()


def scored(scores: dict[str, list[float]], **changes) -> dict:
    rows = [
        {
            "group": group, "id": str(i), "score": score, "answer": str(score), "error": None,
            "question": "one", "forwards": 4, "computed": 40, "tokens": 3, "seconds": 0.5,
        }
        for group, values in scores.items()
        for i, score in enumerate(values)
    ]  # fmt: skip
    base = {
        "kind": "tasks", "requests": rows, "decoding": {"policy": "Policy()"}, "model": {"name": "m"},
        "settings": {}, "device": {}, "versions": {}, "batch": 8, "bucket": 64, "max_positions": None,
    }  # fmt: skip
    return base | changes


def test_the_interval_is_the_percentile_bootstrap_of_paired_differences():
    rng = np.random.default_rng(1)
    a, b = rng.random(50), rng.random(50)
    found = compare_records(scored({"t": list(a)}), scored({"t": list(b)}), confidence=0.9, draws=4000).scores
    assert len(found) == 1
    resampled = [np.mean(rng.choice(b - a, 50)) for _ in range(4000)]
    assert found[0].difference == pytest.approx(np.mean(b) - np.mean(a))
    assert (found[0].low, found[0].high) == pytest.approx(np.percentile(resampled, (5, 95)), abs=0.01)
    means = bootstrap(np.array([0.0, 1.0]), 1300, np.random.default_rng(0))  # in several chunks
    assert means.shape == (1300,)
    assert set(means) == {0, 0.5, 1}


def test_requests_are_paired_and_tasks_are_averaged():
    """Pairing is narrower than the two means are wide; the average is over tasks, not over requests."""
    a = np.random.default_rng(0).random(60)
    found = compare_records(scored({"t": list(a)}), scored({"t": list(a + 0.1)})).scores[0]
    assert (found.low, found.high) == pytest.approx((0.1, 0.1))
    found = compare_records(scored({"x": [0] * 9, "y": [0]}), scored({"x": [0] * 9, "y": [1]})).scores
    assert [d.group for d in found] == ["x", "y", "average"]
    assert (found[-1].count, found[-1].a, found[-1].b, found[-1].difference) == (10, 0, 0.5, 0.5)
    assert 0.5 == found[-1].low == found[-1].high  # of the tasks' resamples, each of which is certain
    found = compare_records(scored({"t": [1, 1, 1]}), scored({"t": [1, 0], "u": [1]}))
    assert (found.scores[0].count, found.unpaired, found.same) == (2, 2, 0.5)
    lost = scored({"t": [1, 0]})
    lost["requests"][0] |= {"answer": None, "error": "died"}  # in both: no equal answers
    assert compare_records(lost, lost).same == 0.5


def test_requests_of_equal_name_but_another_question_have_no_partner():
    other = scored({"t": [1, 0, 1]}, settings={"seed": 1})
    for row in other["requests"][1:]:
        row["question"] = "another"
    found = compare_records(scored({"t": [1, 1, 1]}), other)
    assert (found.scores[0].count, found.unpaired) == (1, 4)
    other["requests"][0]["question"] = "another"
    with pytest.raises(
        ValueError, match=r"different questions: .* all 3 requests .* of t 0; settings\.seed: 0 and 1"
    ):
        compare_records(scored({"t": [1, 1, 1]}, settings={"seed": 0}), other)


def test_differing_settings_are_named():
    other = scored({"t": [1]}, decoding={"policy": "DualCache()"}, batch=2)
    found = compare_records(scored({"t": [1]}), other)
    assert found.settings == {"decoding.policy": ("Policy()", "DualCache()"), "batch": (8, 2)}
    assert found.costs["forwards"] == (4, 4)
    for other, options, reason in (
        (scored({"t": [1]}, kind="needle"), {}, "A is a result of tasks, B of needle"),
        (scored({"u": [1]}), {}, "no request in common"),
        (scored({"t": [1]}), {"confidence": 1.0}, "confidence=1"),
    ):
        with pytest.raises(ValueError, match=reason):
            compare_records(scored({"t": [1]}), other, **options)
    console = rich.console.Console(record=True, width=120)
    for table in show.compared_tables(found, ("a[1].json", "b.json"), 0.95):
        console.print(table)
    assert "DualCache()" in (text := console.export_text())
    assert "a[1].json" in text


def test_a_malformed_record_is_refused_with_what_it_lacks(tmp_path):
    path = tmp_path / "tasks-Policy.json"
    options = cli.EvalOptions(decoding=Decoding(length=4, block=2), out=tmp_path)
    assert cli.run_tasks(options, "FewShot", (5,), 1) == 0
    with pytest.raises(ValueError, match="have images, which are not supported here"):
        cli.run_tasks(dataclasses.replace(options, out=tmp_path / "images"), "ReadNumbers", (2,), 1)
    whole = read(path)
    assert (whole["decoding"]["policy"], whole["model"]["dtype"]) == ("Policy()", "float32")
    assert "temperature=0.0" in whole["decoding"]["sampler"]
    assert whole["model"]["identity"].startswith("sha256:")
    assert {"jax", "jaxlib", "python", "dllm-jax"} <= set(whole["versions"])
    row = whole["requests"][0]
    for change, reason in (
        ({"requests": [1]}, r"tasks-Policy\.json: requests\[0\] is no object"),
        ({"requests": [{"id": "0"}]}, r"requests\[0\] lacks 'key'"),
        ({"requests": [row | {"score": "x"}]}, r"requests\[0\]: score='x' is no float"),
        ({"requests": [{k: v for k, v in row.items() if k != "widened"}]}, r"requests\[0\] lacks 'widened'"),
        ({"requests": {}}, r"requests=\{\} is no list"),
        ({"decoding": None}, "decoding=None is no dict"),
        ({"format": 1}, "is not a result of dllm_jax.eval, format 4: format=1"),
        ({"lm_eval_version": "0.4.13"}, r"tasks-Policy\.json is a result of lm_eval"),
    ):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(ValueError, match=reason):
            read(path)


TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "how-to" / "evaluation.md").read_text()
BLOCKS = re.findall(r"(\*Runs as printed:\*\n\n)?```bash\n(.*?)```", TEXT, re.DOTALL)
PREFIX = ["python", "-m", "dllm_jax.eval"]


def commands(printed: bool) -> list[list[str]]:
    lines = [line for marked, block in BLOCKS if bool(marked) is printed for line in block.splitlines()]
    split = [shlex.split(line) for line in lines]
    assert all(words[:3] == PREFIX for words in split)
    return [words[3:] for words in split]


def test_commands_that_run_as_printed_run(tmp_path, monkeypatch, capsys, evaluate):
    monkeypatch.chdir(tmp_path)
    assert len(commands(printed=True)) == 4
    for words in commands(printed=True):
        assert evaluate(*words) == 0, words
    text = capsys.readouterr().out
    assert re.search(r"dKV-Cache-Decode .* 28\.13 .* 28\.73 .* dkv-decode ", text)
    assert re.search(r"(100\.0|9\d\.\d|8\d\.\d)% of the answers are the same", text)
    assert record.read(tmp_path / "runs/few-shot/tasks-DualCache.json")["average"] >= 0.8
    assert (tmp_path / "runs/recall/recall-Policy.png").exists()
    found = record.read(tmp_path / "runs/recall/recall-Policy.json")
    assert found["scores"] == {"64 tokens": 1, "128 tokens": 1}


def test_the_others_parse():
    asked = []
    taking = lambda made: functools.wraps(made)(lambda *args, **options: asked.append((args, options)))
    spy = {name: taking(function) for name, function in command.COMMANDS.items()}
    others = [words for words in commands(printed=False) if words[0] != "lm_eval"]
    for words in others:
        tyro.extras.subcommand_cli_from_dict(spy, args=words)
    assert len(asked) == len(others) > 0


def test_settings_go_with_the_sampler_of_the_command(tmp_path, monkeypatch, evaluate):
    """Neither the length nor the schedule would go with the sampler that there is by default."""
    monkeypatch.chdir(tmp_path)
    tasks = ["tasks", "--limit", "2", "--difficulty", "3"]
    growing = [
        "--length",
        "2",
        "--max-length",
        "8",
        "--block",
        "2",
        "--sampler",
        "DAEDAL(expansion=2, checked=2)",
    ]
    assert evaluate(*tasks, *growing, "--out", "grown") == 0
    assert record.read(tmp_path / "grown/tasks-Policy.json")["decoding"]["max_length"] == 8
    rounded = ["--length", "4", "--block", "2", "--steps", "3", "--sampler", "Confidence(schedule='rounded')"]
    assert evaluate(*tasks, *rounded, "--out", "rounded") == 0


def test_errors_of_the_user_are_one_line(tmp_path, monkeypatch, evaluate):
    monkeypatch.chdir(tmp_path)
    grows = ["--sampler", "DAEDAL()", "--length", "4", "--max-length", "8"]
    for words, reason in (
        (["tasks", "--max-length", "8"], "max_length=8 does not go with sampler=Confidence()"),
        (["tune", *grows], "max_length=8 is not supported by tune: answers that grow"),
        (["tasks", "--policy", "NoSuch"], "error: 'NoSuch': NoSuch is not one of"),
        (["tune", "--accuracy-within", "2"], "accuracy_within=2.0 must be"),
        (["tune", "--questions", "none.jsonl"], "none.jsonl does not exist"),
    ):
        assert evaluate(*words, error=reason) == 2


def test_old_names_of_options_work_and_name_the_new_ones(monkeypatch, capsys):
    words = "tasks --sizes 3 --count=2 --batch 2 --part 9/4"
    monkeypatch.setattr("sys.argv", ["dllm_jax.eval", *words.split()])
    with pytest.raises(SystemExit), plain_errors():
        command.main()
    *told, error = capsys.readouterr().err.splitlines()
    new = {"--sizes": "--difficulty", "--count": "--limit", "--batch": "--slots", "--part": "--shard"}
    assert told == [f"{old} is deprecated: use {name}" for old, name in new.items()]
    assert error.startswith("error: shard='9/4' must be like 2/4")


def test_responses_without_a_length_are_as_long_as_the_longest_answer_and_its_end_in_whole_blocks():
    needed = synthetic.response(FewShot(), (3, 5)), synthetic.response(Sorting(), (3, 5)), synthetic.RECALLED
    assert needed == (2, 6, 4)
    of = lambda **options: cli.EvalOptions(decoding=Decoding(**options)).with_length(6).decoding.length
    assert (of(), of(block=4), of(block=Sliding(4)), of(block=4, length=12)) == (6, 8, 8, 12)


def test_writers_of_one_file_have_a_part_each(tmp_path):
    """Threads of a process, too: the file is always one that somebody wrote."""
    path, values = tmp_path / "one.json", [[i] * 2000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            list(pool.map(functools.partial(write_json, path), values))
            assert json.loads(path.read_text()) in values
    assert [each.name for each in tmp_path.iterdir()] == ["one.json"]
