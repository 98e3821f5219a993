"""Needle in a haystack: geometry, both scorings, recall by depth, the picture."""

import dataclasses
import json
import pathlib
import sys

import pytest

from dllm_jax.command_line import plain_errors
from dllm_jax.eval.benchmarks import needle, synthetic
from dllm_jax.eval.benchmarks.needle import DUO_ATTENTION, Needle
from dllm_jax.eval.cli import commands as cli
from dllm_jax.eval.results import record
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.tasks import Recall, asked_pair

HAYSTACK = pathlib.Path(__file__).parent / "data" / "haystack"
SHORT = Decoding(length=4, block=2)
STAR = Needle("*", "Where?", "star", "<{context}> {question}", buffer=4)


def test_the_needle_lies_at_its_depth_and_the_prompt_has_the_length_asked_for(tokenizer):
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    for depth, text in ((0, "*abcabc"), (50, "abc*abc"), (84, "abcab*c"), (100, "abcabc*")):
        assert STAR.prompt(encode("abc"), 11, depth, tokenizer) == f"<{text}> Where?"  # the haystack twice
    text = DUO_ATTENTION.prompt(encode(needle.haystack(HAYSTACK)), 1000, 33, tokenizer)
    assert len(encode(text.split("<book> ")[1].split(" </book>")[0])) == 800
    assert text.endswith("Answer: The best thing to do in San Francisco is")
    for make, reason in (
        (lambda: STAR.prompt([40], 5, 0, tokenizer), "length=5 leaves 0 tokens"),
        (lambda: STAR.prompt([], 50, 0, tokenizer), "of 0; at least one"),
        (lambda: STAR.prompt([40], 50, 101, tokenizer), "depth=101"),
        (lambda: Needle("*", "?", "star", "{question}"), r"no \{context\}"),
    ):
        with pytest.raises(ValueError, match=reason):
            make()


def test_scores():
    exact = Needle("the star is red", "?", "red", "{context}", scoring="keyword")
    assert exact.score("It is red.") == 1
    assert exact.score("the star\n is re") == pytest.approx(0.2 * (1 - 1 / 12))
    assert exact.score("thestxrisrde") == pytest.approx(0.2 * (1 - 3 / 12))  # substitutions count once
    assert exact.score("") == 0
    assert Needle("the stars are red", "?", "red", "{context}").score("Star, red") == pytest.approx(2 / 3)


def test_texts_and_needles_from_files(tmp_path):
    assert needle.haystack(HAYSTACK).startswith("Call me Ishmael.")
    assert needle.haystack(HAYSTACK / "2_two_cities.txt").startswith("It was the best")
    with pytest.raises(FileNotFoundError, match=r"no folder of \.txt"):
        needle.haystack(tmp_path)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        needle.haystack(tmp_path)
    fields = {"text": "*", "question": "?", "keyword": "*", "template": "{context}"}
    (tmp_path / "needle.json").write_text(json.dumps(fields))
    assert needle.read_needle(tmp_path / "needle.json").keyword == "*"
    (tmp_path / "needle.json").write_text(json.dumps({**fields, "depth": 1}))
    with pytest.raises(ValueError, match=r"needle\.json: expected an object with exactly"):
        needle.read_needle(tmp_path / "needle.json")


def test_recall_asks_for_the_pair_at_the_depth():
    cells = synthetic.recall_grid((64, 130), (0, 50, 100), 2, seed=0)
    assert len(cells) == 12
    for length, depth, example in cells:
        pairs = length // 8
        assert len(example.prompt) + 10 == length
        assert example.prompt.count(";") == pairs
        assert asked_pair(example) == {0: 0, 50: round((pairs - 1) / 2), 100: pairs - 1}[depth]
        assert Recall().split_of(example) == "held_out"
    assert cells == synthetic.recall_grid((64, 130), (0, 50, 100), 2, seed=0)
    alone = synthetic.recall_grid(
        (64,), (50.0,), 2, seed=0
    )  # a cell's questions do not depend on the other cells
    assert [example for *_, example in alone] == [e for n, d, e in cells if (n, d) == (64, 50)]
    for cell, reason in (
        (((64,), (120,)), "depths="),
        (((), (0,)), "nothing to evaluate"),
        (((20,), (0,)), "tokens=20 must be at least 42"),
    ):
        with pytest.raises(ValueError, match=reason):
            synthetic.recall_grid(*cell, 1, 0)


def test_a_haystack_of_text(tmp_path, monkeypatch, capsys):
    fields = {"text": "T=211;", "question": "T=", "keyword": "211", "template": "{context}{question}"}
    (tmp_path / "needle.json").write_text(json.dumps(fields))
    options = cli.EvalOptions(decoding=SHORT, out=tmp_path)
    grid = dict(lengths=(40,), depths=(0.0, 100.0), buffer=4, needle_file=tmp_path / "needle.json", chat=True)
    assert cli.run_needle(HAYSTACK, options, scoring="keyword", **grid) == 0
    with pytest.raises(ValueError, match="nothing to evaluate"):
        cli.run_needle(HAYSTACK, dataclasses.replace(options, out=tmp_path / "other"), depths=())
    found = record.read(tmp_path / "needle-Policy.json")
    assert [row["id"] for row in found["requests"]] == ["40 at 0 %", "40 at 100 %"]
    assert all(0 <= row["score"] <= 1 for row in found["requests"])
    assert (found["settings"]["scoring"], found["settings"]["keyword"]) == ("keyword", "211")
    assert (tmp_path / "needle-Policy.png").exists()

    # Without matplotlib the picture alone is left out; what scores is asked for before anything is decoded.
    (tmp_path / "needle-Policy.png").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    capsys.readouterr()
    assert cli.run_needle(HAYSTACK, options, scoring="keyword", **grid) == 0
    printed = capsys.readouterr().out
    assert "needle-Policy.png is left out: it needs matplotlib" in printed
    assert "tokens/s" in printed
    assert not (tmp_path / "needle-Policy.png").exists()
    monkeypatch.setattr("dllm_jax.generate_many", None)
    for scoring, package in (("rouge", "rouge_score.rouge_scorer"), ("keyword", "rapidfuzz.distance")):
        monkeypatch.setitem(sys.modules, package, None)
        own = dataclasses.replace(options, out=tmp_path / scoring)
        with pytest.raises(ImportError, match=f"scores of length 40 need {package.partition('.')[0]}: pip"):
            cli.run_needle(HAYSTACK, own, scoring=scoring, **grid)
    with pytest.raises(SystemExit), plain_errors():
        cli.run_needle(HAYSTACK, own, scoring=scoring, **grid)
    assert capsys.readouterr().err.startswith("error: scores of length 40 need rapidfuzz")
