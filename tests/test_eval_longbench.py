"""LongBench: data, prompts, truncation, metrics, and a run on a folder in the published form.

The recorded scores of the authors' code are in tests/goldens.
"""

import functools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dllm_jax as dj
from dllm_jax.eval.benchmarks import needle
from dllm_jax.eval.benchmarks.longbench import (
    TASKS,
    LongBenchPrompts,
    Sample,
    longbench_requests,
    metrics,
    samples_in,
    truncate,
)
from dllm_jax.eval.cli import commands as cli
from dllm_jax.eval.cli.tune import read_jsonl
from dllm_jax.eval.results import record
from dllm_jax.eval.run.runner import Runner
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.eviction.layers import load_profile
from dllm_jax.published import preset

TEMPLATES = {"hotpotqa": "{context}{input}", "trec": "{context}{input}", "gov_report": "Sum: {context}\nNow:"}
ROW = {"context": "b=w;t=m;", "input": "t=", "answers": ["m"], "all_classes": None, "_id": "1", "length": 3}


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def prompts(tmp_path) -> LongBenchPrompts:
    return LongBenchPrompts.read(write(tmp_path / "dataset2prompt.json", TEMPLATES))


def test_samples_are_read(tmp_path):
    unnamed = {name: value for name, value in ROW.items() if name != "_id"}
    path = write(tmp_path / "trec.jsonl", ROW, "", {**unnamed, "all_classes": ["m", "w"]})
    assert samples_in(path) == [
        Sample("1", "b=w;t=m;", "t=", ("m",), (), f"{path}:1"),
        Sample("line 3", "b=w;t=m;", "t=", ("m",), ("m", "w"), f"{path}:3"),
    ]


def test_bad_data_names_file_and_line(tmp_path):
    for row, reason in (
        ('{"context": "', "not JSON: .* at column 13"),
        ('{"context": ' + "[" * 100_000, "not JSON: nested too deeply"),
        ("[1]", "expected an object, found list"),
        ({n: v for n, v in ROW.items() if n != "context"}, "context=None must be a str"),
        ({**ROW, "answers": "m"}, "answers='m' must be 1 or more values, each a str"),
        ({**ROW, "answers": []}, r"answers=\[\] must be 1 or more values, each a str"),
        ({**ROW, "answers": ["m", " "]}, "hold an empty reference"),
        ({**ROW, "all_classes": [1]}, r"classes=\[1\] must be"),
        (ROW, "id '1' is that of .*trec.jsonl:1 too"),
    ):
        path = write(tmp_path / "trec.jsonl", ROW, row)
        with pytest.raises(ValueError, match=rf"trec\.jsonl:2: .*{reason}"):
            samples_in(path)


def test_files_that_cannot_be_read_are_named(tmp_path):
    path = write(tmp_path / "trec.jsonl", ROW)
    path.write_bytes(path.read_bytes() + b'{"context": "\xe9"}\n')
    for reader in (samples_in, LongBenchPrompts.read, needle.read_needle, needle.haystack, record.read):
        with pytest.raises(ValueError, match=r"trec\.jsonl:2: not UTF-8: byte 0xe9"):
            reader(path)
    for reader, name in ((samples_in, "lcc.jsonl"), (LongBenchPrompts.read, "dataset2prompt.json")):
        with pytest.raises(FileNotFoundError, match=rf"{name} does not exist"):
            reader(tmp_path / name)
    for reader, name, content, reason in (
        (samples_in, "lcc.jsonl", "", "holds no samples"),
        (LongBenchPrompts.read, "dataset2prompt.json", "{", r"dataset2prompt\.json:2: not JSON"),
        (LongBenchPrompts.read, "dataset2prompt.json", {"trec": "{input}"}, r"'trec' has no \{context\}"),
    ):
        with pytest.raises(ValueError, match=reason):
            reader(write(tmp_path / name, content))


def test_byte_order_marks_are_no_text(tmp_path):
    """As Excel, Notepad and PowerShell write them; in the midst where files were joined."""
    rows, mark = [json.dumps(ROW | {"_id": str(i)}) for i in range(3)], "\ufeff"
    fields = {"text": "*", "question": "?", "keyword": "*", "template": "{context}"}
    asked = [json.dumps({"prompt": "a", "answer": "b"})] * 2
    for reader, content in (
        (samples_in, "\n".join(rows)),
        (lambda path: LongBenchPrompts.read(path).templates, json.dumps(TEMPLATES)),
        (needle.read_needle, json.dumps(fields)),
        (needle.haystack, "Call me Ishmael."),
        (read_jsonl, "\n".join(asked)),
        (preset.read_preset, (dj.presets.folder() / "policies" / "elastic-cache.toml").read_text()),
        (load_profile, '{"importance": [0.25, 0.75]}'),
    ):
        path = tmp_path / "dataset2prompt.json"
        path.write_text(content)
        wanted = reader(path)
        joined = content.replace("\n", f"\n{mark}") if reader in (samples_in, read_jsonl) else content
        path.write_text(mark + joined)
        assert reader(path) == wanted, reader


def test_the_middle_is_cut_out(tokenizer):
    text = "".join(chr(97 + i % 26) for i in range(40))
    assert truncate(text, tokenizer, 40) == text
    assert truncate(text, tokenizer, 11) == text[:5] + text[-5:]
    with pytest.raises(ValueError, match="truncate_to=1"):
        truncate(text, tokenizer, 1)


def test_templates_are_filled_once_and_few_shot_prompts_are_not_wrapped(tmp_path, lm):
    sample = Sample("1", "a {input} b", "t=", ("m",), (), "here")
    text = lambda name: lm.tokenizer.decode(prompts(tmp_path).ids(TASKS[name], sample, lm, None))
    assert text("trec") == "a {input} bt="
    assert text("gov_report").startswith("<|startoftext|><|start_header_id|>user")
    assert "Sum: a {input} b\nNow:<|eot_id|>" in text("gov_report")
    with pytest.raises(ValueError, match="no template for 'lcc'"):
        text("lcc")


def test_a_run_scores_each_task_and_resumes(tmp_path, capsys):
    write(tmp_path / "dataset2prompt.json", TEMPLATES)
    row = {**ROW, "context": "b=407;T=211;z=830;k=566;", "input": "T=", "answers": ["211"]}
    other = {**row, "_id": "2", "context": "ab=407;T=211;iz=830;", "input": "ab=", "answers": ["q", "407."]}
    write(tmp_path / "hotpotqa.jsonl", row, other, {**row, "_id": "3", "context": "b=407;" * 99})
    write(tmp_path / "trec.jsonl", {**row, "all_classes": ["211", "407"]})
    decoding = Decoding(block=2, max_positions=200)
    options = cli.EvalOptions(decoding=decoding, out=tmp_path / "out")
    asked = dict(tasks=("hotpotqa", "trec"), answer_length=4)
    run = lambda **other: cli.run_longbench(tmp_path, options, **asked, **other)
    assert run() == 1  # a failed request
    text = capsys.readouterr().out
    assert "hotpotqa 3 failed: ValueError: prompt and response take" in text
    found = record.read(tmp_path / "out" / "longbench-Policy.json")
    assert [row["score"] for row in found["requests"][:3]] == [1, 1, 0]
    assert found["scores"]["hotpotqa"] == pytest.approx(2 / 3)
    assert found["average"] == pytest.approx((2 / 3 + found["scores"]["trec"]) / 2)
    assert found["totals"]["failed"] == 1
    assert found["settings"]["prompts_sha256"]
    lines = (tmp_path / "out" / "journal.jsonl").read_text().splitlines()
    (tmp_path / "out" / "longbench-Policy.json").unlink()
    assert run(truncate_to=50) == 0  # what failed is now short enough; the rest is not decoded again
    assert len((tmp_path / "out" / "journal.jsonl").read_text().splitlines()) == len(lines) + 1
    assert cli.run_compare(*[tmp_path / "out" / "longbench-Policy.json"] * 2) == 0
    assert "100.0% of the answers are the same" in capsys.readouterr().out


def test_steps_are_literal_and_refused_where_they_do_not_fit(tmp_path):
    write(tmp_path / "dataset2prompt.json", TEMPLATES)
    write(tmp_path / "trec.jsonl", {**ROW, "all_classes": ["m", "w"]})
    shared = lambda out="out", **of: cli.EvalOptions(decoding=Decoding(block=2, **of), out=tmp_path / out)
    run = lambda options, **other: cli.run_longbench(tmp_path, options, tasks=("trec",), **other)
    assert run(shared(steps=4), answer_length=4) == 0
    found = record.read(tmp_path / "out" / "longbench-Policy.json")
    assert (found["decoding"]["length"], found["decoding"]["steps"]) == (4, 4)
    for wrong, other, reason in (
        (dict(steps=12), {}, "trec, answers of 64 positions: steps=12 must be a multiple of"),
        (dict(steps=96), {}, "steps=96 must be at most length=64"),
        (dict(length=512), {}, "--length 512: answers have the task's length; --answer-length 512 sets"),
        (dict(length=512), dict(answer_length=16), "--length 512 and --answer-length 16: give one"),
    ):
        with pytest.raises(ValueError, match=reason):
            run(shared("other", **wrong), **other)


def test_samples_that_could_not_be_scored_are_refused_before_decoding(tmp_path):
    write(tmp_path / "dataset2prompt.json", TEMPLATES)
    write(tmp_path / "trec.jsonl", {**ROW, "_id": "0", "all_classes": ["m"]}, "", ROW)
    write(tmp_path / "passage_retrieval_en.jsonl", ROW)
    for task, reason in (
        ("trec", r"trec\.jsonl:3: sample '1': it lacks all_classes"),
        ("passage_retrieval_en", r"en\.jsonl:1: sample '1': reference 'm' does not name a paragraph"),
        ("qasper_zh", "'qasper_zh' is not among"),
    ):
        with pytest.raises(ValueError, match=reason):
            cli.run_longbench(tmp_path, cli.EvalOptions(out=tmp_path / "out"), tasks=(task,))
    for limit in (0, -1):  # of which the latter would leave the last sample out
        with pytest.raises(ValueError, match=f"limit={limit} must be"):
            cli.run_longbench(tmp_path, cli.EvalOptions(out=tmp_path / "out"), limit=limit)


def test_answers_of_samsum_may_begin_with_a_newline(tmp_path, lm):
    """The authors decode no newline first, and the first line counts that is not empty."""
    templates = LongBenchPrompts({"samsum": "{context}{input}"}, "")
    write(tmp_path / "samsum.jsonl", {**ROW, "answers": ["a b"]})
    runner = Runner(lm, Decoding(block=4))
    (request,) = longbench_requests(runner, tmp_path, templates, [TASKS["samsum"]])
    ids = lm.tokenizer.encode("\na b\nDialogue:", add_special_tokens=False)
    assert request.score(runner._text(request, np.asarray([ids]))) == pytest.approx(1)


def test_sixteen_tasks_with_their_published_lengths():
    assert len(TASKS) == 16
    plain = {task.name for task in TASKS.values() if not task.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    by_length = lambda n: {t.name for t in TASKS.values() if t.length == n}
    assert by_length(512) == {"gov_report", "qmsum", "multi_news"}
    assert by_length(128) == {"narrativeqa", "qasper", "samsum"}
    assert by_length(64) == {"multifieldqa_en", "trec", "lcc", "repobench-p"}


@given(st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_indel_similarity_is_that_of_the_longest_common_subsequence(a, b):
    @functools.cache
    def common(i, j):
        if i == len(a) or j == len(b):
            return 0
        return common(i + 1, j + 1) + 1 if a[i] == b[j] else max(common(i + 1, j), common(i, j + 1))

    wanted = 2 * common(0, 0) / (len(a) + len(b)) if a or b else 1
    assert metrics.edit_similarity(a, b, "indel") == round(100 * wanted) / 100


def test_oddities_are_those_published():
    """Beside what the recorded scores of the authors' code hold."""
    assert metrics.f1("The Cat, sat!", "a cat sat") == 1
    assert metrics.f1("cat dog", "cat") == pytest.approx(2 / 3)
    assert metrics.f1("", "") == 0
    long = " ".join(f"w{i}" for i in range(1100))
    assert metrics.rouge_l(long, long) == 0  # a sentence that overflows its recursion
    assert metrics.edit_similarity("a", "a" + 78 * "b", "indel") == 0.02  # 2.5 %: halves round to even
    assert metrics.edit_similarity("\n# why\n```\nx = 1\nfoo", "x = 1") == 1  # the first line of code
    assert metrics.edit_similarity("# only a comment", "") == 1
    assert metrics.classification("number of other", "number", ("number", "other")) == 0.5
    assert metrics.classification("a b c abc", "abc", ("a", "b", "c", "abc")) == 0.5  # "b" is skipped
    assert metrics.classification("a abc", "abc", ("a", "abc")) == 1
    assert metrics.classification("nothing", "abc", ("abc",)) == 0
    assert metrics.retrieval("It is 7 or 8", "Paragraph 7") == 0.5
    with pytest.raises(ValueError, match="'7' does not name a paragraph"):
        metrics.retrieval("7", "7")
    assert TASKS["triviaqa"].score("\nParis\nLondon", ["Rome", "Paris"]) == 1  # the first line, the best one
    assert TASKS["hotpotqa"].score("\nParis\nLondon", ["Rome", "Paris"]) < 1
