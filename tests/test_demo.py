"""`python -m dllm_jax` as a user runs it."""

import io
import json
import os
import platform
import re
import subprocess
import sys
from itertools import pairwise

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import command_line
from dllm_jax.__main__ import COMMANDS, command
from dllm_jax.command_line import keep_programs, kept_programs
from dllm_jax.demo import trains
from dllm_jax.demo.command import Arguments
from dllm_jax.demo.command import main as demonstrate
from dllm_jax.encoding import encodable
from dllm_jax.eval import __main__ as evaluations
from dllm_jax.policies import DualCache, Policy
from dllm_jax.samplers import S2D2, Autoregressive, Threshold
from dllm_jax.tasks import Chain, Example
from tests.models import tiny


def test_the_demonstration_answers_and_measures(tmp_path):
    report = tmp_path / "table.json"
    command = [sys.executable, "-m", "dllm_jax", "--models", "tiny-dream", "--limit", "4"]
    wide = os.environ | {"COLUMNS": "100", "PYTHONIOENCODING": "ascii"}  # as a console may be
    run = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, env=wide)
    assert run.returncode == 0, run.stderr
    assert " > ".join(trains.STOPS[:8]) in run.stdout
    assert ". masked   # end of text" in run.stdout
    (table,) = json.loads(report.read_text())["tables"]
    exact, dual, threshold = table["rows"]
    assert (table["model"], exact["policy"], exact["sampler"]) == ("tiny-dream", "Policy()", "Confidence()")
    assert exact["speed_up"] == 1.0
    assert exact["forwards"] == table["length"] > threshold["forwards"]
    assert exact["computed"] > dual["computed"] >= threshold["computed"]
    assert exact["accuracy"] >= 0.75
    assert run.stdout.count(f" {dual['computed']:.0f} ") >= 1, "the table is printed"


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "gbk", "ascii", "utf-16"])
def test_any_encoding_takes_what_commands_and_show_print(encoding, monkeypatch):
    """Similar characters stand in for missing ones, one for one; bytes of file names stay."""
    model, file = tiny("llada"), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding))
    out = dj.generate(model, [[11, 12]], length=4, trace=True, allow=[[0], None, [1], None])
    dj.show(out)
    with pytest.raises(SystemExit) as ended:
        command_line.run(lambda: print("a → b ∎ ☃ \ud83d", "f\udce9" if encoding == "ascii" else ""))
    assert not ended.value.code
    shown = file.getvalue().decode(encoding, "replace")
    assert ("·" if "·".encode(encoding, "ignore") else ".") in shown
    printed = {"utf-8": "a → b ∎ ☃ ?", "utf-16": "a → b ∎ ☃ ?", "gbk": "a → b # ? ?"}
    assert printed.get(encoding, "a > b # ? ?") in shown
    assert encodable("a → b ∎", "ascii") == "a > b #"


def test_help_lists_every_command_and_a_typing_error_gets_the_name_that_is_meant(monkeypatch, capsys):
    """And each answers `--help`; `bench` names its programs."""

    def ended(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dllm-jax", *words])
        with pytest.raises(SystemExit) as end:
            command()
        told = capsys.readouterr()
        return end.value.code or 0, told.out, told.err

    code, out, _ = ended("--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert max(map(len, out.splitlines())) <= 80
    for name in ("demo", "chat", "generate", "check", "convert", "export", "verify", "eval"):
        code, out, _ = ended(name, "--help")
        assert code == 0
        assert f"usage: dllm-jax {name}" in out
        assert max(map(len, out.splitlines())) <= 80
        assert not re.search(r"STR|\{None|INT \[", out), "an option whose value has no name"
    assert all(f"\n  {name} " in out for name in (*evaluations.COMMANDS, "lm_eval"))  # of eval, the last one
    texts = "".join(ended("eval", name, "--help")[1] for name in ("tasks", "images", "tune"))
    assert all(f"{new} " in texts for new in evaluations.RENAMED.values())
    assert not any(f"{old} " in texts for old in evaluations.RENAMED)
    assert ended("chekc")[::2] == (
        2,
        "error: command='chekc' is not a command of dllm-jax. Did you mean check?\n",
    )
    assert ended("eval", "taks")[2].endswith("is not a command of dllm-jax eval. Did you mean tasks?\n")
    needs = "error: dllm-jax eval needs a command. Commands: tasks, longbench, "
    assert ended("eval")[2].startswith(needs)
    code, out, _ = ended("bench", "--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in ("asked", "card", "compiled", "generate"))
    for words in (("--version",), ("bench", "--version")):
        code, out, _ = ended(*words)
        assert (code, out.startswith(f"dllm_jax {dj.__version__} (jax ")) == (0, True)
    code, _, error = ended("bench", "nothing")
    assert (code, error.startswith("error: bench needs one of asked, card, compiled")) == (2, True)


def test_closed_streams_end_in_a_line(monkeypatch, capsys):
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr(sys, "argv", ["dllm_jax", "chat", "tiny-llada"])
    with pytest.raises(SystemExit) as ended:
        command()
    sys.stdout.close()  # the replacement, which discards text
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: standard input is closed")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("width", "shown"), [(60, False), (80, True)])
def test_a_narrow_demonstration_explains_what_it_shows_alone(width, shown, monkeypatch, capsys):
    """Words about numbers that a terminal of 60 columns has no room for are left out."""
    monkeypatch.setenv("COLUMNS", str(width))
    demonstrate(Arguments(prompts=2))
    told = capsys.readouterr().out
    assert "accuracy" in told
    for word in ("Speedup:", "speedup", "right: unmasked"):
        assert (word in told) == shown, word
    assert max(map(len, told.splitlines())) <= max(width, 72)  # of the route and the next commands


def test_commands_keep_programs_where_the_user_says_or_in_a_cache_of_the_machine(tmp_path, monkeypatch):
    chosen = jax.config.values["jax_compilation_cache_dir"]
    try:
        assert kept_programs(keep_programs()).startswith(f"Compiled programs are kept in {chosen}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        jax.config.update("jax_compilation_cache_dir", None)
        assert f"{tmp_path / 'dllm_jax' / platform.node()} (0 MB)" in kept_programs(keep_programs())
    finally:
        jax.config.update("jax_compilation_cache_dir", chosen)
        jax.config.update("jax_compilation_cache_max_size", -1)


def test_the_question_is_of_a_ring_of_stops_and_was_not_trained_on():
    links = re.findall(r"(\w)>(\w);", trains.QUESTION)
    initials = [stop[0] for stop in trains.STOPS]
    assert sorted(links) == sorted(zip(initials, [*initials[1:], initials[0]], strict=True))
    assert "".join(f"{a}>{b};" for a, b in pairwise(initials[:8])) == trains.ANSWER
    assert trains.train_route(trains.ANSWER) == list(trains.STOPS[:8])
    assert trains.train_route("P>Q;nonsense") == ["Paris", "Q"]
    assert trains.train_route("") == []
    assert Chain().split_of(Example(trains.QUESTION, trains.ANSWER)) == "held_out"


def test_policies_are_compared_in_one_table():
    """What `generate` gives under each, beside what it costs; what differs may be more than the policy."""
    model, prompt = tiny("llada"), [[11, 12, 13, 14, 15], [21, 22]]
    fast = {"policy": DualCache(), "sampler": Threshold(0.1)}
    found = dj.compare(model, prompt, [Policy(), DualCache(), fast], repeats=2, length=8, block=4)
    exact, dual, threshold = found.rows
    for row, options in ((exact, {}), (dual, {"policy": DualCache()}), (threshold, fast)):
        out = dj.generate(model, prompt, length=8, block=4, **options)
        np.testing.assert_array_equal(row.output.tokens, out.tokens)
        assert row.nfe == np.mean(out.stats.nfe)
        assert row.computed == np.mean(out.stats.computed_tokens)
        assert min(row.seconds, row.compile_seconds, row.memory) > 0
    assert exact.equal == exact.speed_up == 1.0
    same = np.asarray(dual.output.tokens == exact.output.tokens).all(axis=1)
    assert dual.equal == same.mean()
    assert threshold.nfe < dual.nfe
    lines = str(found).splitlines()
    names = ["Policy()", "DualCache()", "DualCache(), Threshold(threshold=0.1)"]
    assert [line.split("  ")[0] for line in lines[1:]] == names
    named = dj.compare(model, prompt, {"as published": fast}, repeats=1, length=8, block=4)
    assert named.rows[0].name == "as published"
    for wrong in ([], "DualCache", 3, [3]):
        with pytest.raises(ValueError, match="polic"):
            dj.compare(model, prompt, wrong, length=8)
    with pytest.raises(TypeError, match=r"compare.* progress"):
        dj.compare(model, prompt, [{"policy": DualCache(), "progress": True}], length=8)


def test_equal_answers_are_equal_on_canvases_of_other_lengths():
    """Of a draft the last block is completed beyond the answer; one token after the other has no such end."""
    ways = [{"sampler": Autoregressive()}, {"sampler": S2D2(on=None)}]
    found = dj.compare(tiny("sdar"), [[11, 12, 13]], ways, repeats=1, length=7)
    np.testing.assert_array_equal(*(row.output.tokens for row in found.rows))
    assert found.rows[1].equal == 1.0


def test_checkpoints_that_read_no_text_are_left_out():
    assert Arguments().models == ("tiny-llada",)
    with pytest.raises(ValueError, match="prompts=0 must be a whole number of at least 1"):
        Arguments(prompts=0)
    known = "tiny-llada, tiny-dream, tiny-sdar, tiny-sdar-moe"
    with pytest.raises(ValueError, match=f"models='tiny-llada-v' must be of {known}"):
        Arguments(models=("tiny-dream", "tiny-llada-v"))
