"""Folders of results: not replaced by others; parts of several hosts, put together, are those of one."""

import dataclasses
import json

import pytest

from dllm_jax.eval import __main__ as command
from dllm_jax.eval import cli
from dllm_jax.eval.cli.options import part_of
from dllm_jax.eval.results.record import paths
from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.checkpoint import Checkpoint
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.settings import Decoding

COUNT = 7


def evaluate(out, part: str = "1/1") -> int:
    options = cli.Options(decoding=Decoding(length=4, block=2, batch=2), out=out, part=part)
    return cli.run_tasks(options, "FewShot(kinds=3)", (5,), COUNT)


def test_parts_are_merged_without_loss(tmp_path, capsys, monkeypatch):
    assert evaluate(tmp_path / "whole") == 0
    folders = [tmp_path / f"part{i}" for i in range(3)]
    for number, folder in enumerate(folders, start=1):
        assert evaluate(folder, f"{number}/3") == 0
        assert [file.name for file in folder.iterdir()] == ["journal.jsonl"]  # no result of a part
    held = [len(Journal(folder / "journal.jsonl").entries) for folder in folders]
    assert sum(held) == COUNT
    assert min(held) > 0

    monkeypatch.setattr("sys.argv", ["dllm_jax.eval", "merge", str(tmp_path / "all"), *map(str, folders)])
    assert command.main() == 0
    assert f"{COUNT} answers added" in capsys.readouterr().out
    merged = (tmp_path / "all" / "journal.jsonl").read_text()
    assert evaluate(tmp_path / "all") == 0
    assert (tmp_path / "all" / "journal.jsonl").read_text() == merged, "answers were computed again"
    read = lambda folder: json.loads((tmp_path / folder / "tasks-Policy.json").read_text())["requests"]
    rows = [
        [(r["id"], r["answer"], r["score"], r["computed"]) for r in read(name)] for name in ("whole", "all")
    ]
    assert rows[0] == rows[1]


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
        assert Journal(target).merge([tmp_path / "b"]) == 0  # what is answered stays so
    with pytest.raises(FileNotFoundError, match="no part was evaluated there"):
        Journal(tmp_path / "into").merge([tmp_path / "c"])


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "a/b", "1/0", "-1/2", "1/2/3", ""])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(ValueError, match="must be like 2/4"):
        part_of(text)


def test_a_result_is_replaced_by_the_same_run_only(tmp_path):
    decoding = Decoding(length=4, block=2, batch=2)
    options = cli.Options(decoding=decoding, out=tmp_path)
    run = lambda task="FewShot(kinds=3)", **changes: cli.run_tasks(
        dataclasses.replace(options, **changes), task, (5,), 1
    )
    assert run() == 0
    content = (tmp_path / "tasks-Policy.json").read_text()
    for changes, reason in (
        (dict(sampler="Threshold(0.9)"), r"decoding\.sampler was .Confidence.* and would be .Threshold"),
        (
            dict(decoding=dataclasses.replace(decoding, seed=1)),
            r"decoding\.seed was 0 and would be 1; settings\.seed was 0 .*another --out",
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


def test_policies_of_one_file_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'DualCache\(\)' and another .*tasks-DualCache\.json"):
        paths(tmp_path, "tasks", ("DualCache", "Policy", "DualCache()"))
