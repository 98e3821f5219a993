"""The commands of docs/how-to/evaluation.md: those said to run as printed do, the others parse."""

import functools
import pathlib
import re
import shlex

import pytest
import tyro

from dllm_jax.eval import __main__ as command
from dllm_jax.eval import cli
from dllm_jax.eval.benchmarks import synthetic
from dllm_jax.eval.results import record
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.tasks import FewShot, Sorting

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "how-to" / "evaluation.md").read_text()
BLOCKS = re.findall(r"(\*Runs as printed:\*\n\n)?```bash\n(.*?)```", TEXT, re.DOTALL)
PREFIX = ["python", "-m", "dllm_jax.eval"]


def commands(printed: bool) -> list[list[str]]:
    lines = [line for marked, block in BLOCKS if bool(marked) is printed for line in block.splitlines()]
    split = [shlex.split(line) for line in lines]
    assert all(words[:3] == PREFIX for words in split)
    return [words[3:] for words in split]


def test_what_runs_as_printed_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(commands(printed=True)) == 3
    for words in commands(printed=True):
        monkeypatch.setattr("sys.argv", ["dllm_jax.eval", *words])
        assert command.main() == 0, words
    text = capsys.readouterr().out
    assert re.search(r"(100\.0|9\d\.\d|8\d\.\d)% of the answers are the same", text)
    assert record.read(tmp_path / "runs/few-shot/tasks-DualCache.json")["average"] >= 0.8
    assert (tmp_path / "runs/recall/recall-Policy.png").exists()
    found = record.read(tmp_path / "runs/recall/recall-Policy.json")
    assert found["scores"] == {"64 tokens": 1, "128 tokens": 1}


@pytest.mark.parametrize("words", [w for w in commands(printed=False) if w[0] != "lm_eval"], ids=" ".join)
def test_the_others_parse(words):
    asked = []
    taking = lambda function: functools.wraps(function)(
        lambda *args, **options: asked.append((args, options))
    )
    spy = {name: taking(function) for name, function in command.COMMANDS.items()}
    tyro.extras.subcommand_cli_from_dict(spy, args=words)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["tasks", "--policy", "NoSuch"], "error: 'NoSuch': NoSuch is not one of"),
        (["tasks", "--policy", "DKVDecode({[]: 1})"], "error: 'DKVDecode({[]: 1})': {[]: 1} is no literal"),
        (["tune", "--policy", "Nope"], "Nope is not one of"),
        (["tune", "--accuracy-within", "2"], "accuracy_within=2.0 must be"),
        (["tune", "--objective", "speed"], "objective='speed' must be one of 'time', 'bytes'"),
        (["tune", "--accelerator", "b9000"], "accelerator='b9000' must be one of h100"),
        (["tune", "--questions", "none.jsonl"], "none.jsonl does not exist"),
    ],
)
def test_errors_of_the_user_are_one_line(words, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["dllm_jax.eval", *words])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_responses_without_a_length_are_as_long_as_the_longest_answer_and_its_end_in_whole_blocks():
    needed = synthetic.response(FewShot(), (3, 5)), synthetic.response(Sorting(), (3, 5)), synthetic.RECALLED
    assert needed == (2, 6, 4)
    of = lambda **options: cli.Options(decoding=Decoding(**options)).with_length(6).decoding.length
    assert (of(), of(block=4), of(block=4, length=12)) == (6, 8, 12)
