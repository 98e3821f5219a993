"""The commands of docs/how-to/evaluation.md: those said to run as printed do, the others parse."""

import pathlib
import re
import shlex

import pytest
import tyro

from dllm_jax.eval import __main__ as command
from dllm_jax.eval.results import record

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
    spy = {name: _taking(function, asked) for name, function in command.COMMANDS.items()}
    tyro.extras.subcommand_cli_from_dict(spy, args=words)
    assert len(asked) == 1


def _taking(function, asked: list):
    import functools

    @functools.wraps(function)
    def called(*args, **options):
        asked.append((args, options))

    return called


@pytest.mark.parametrize(
    ("option", "text", "reason"),
    [
        ("--policy", "NoSuch", "NoSuch is not one of"),
        ("--policy", "DKVDecode({[]: 1})", "{[]: 1} is no literal"),
    ],
)
def test_errors_of_the_user_are_one_line(option, text, reason, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dllm_jax.eval", "tasks", option, text])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {text!r}: {reason}")


def test_the_defaults_suit_the_default_model(tmp_path, monkeypatch):
    for words in (["tasks", "--count", "32"], ["recall", "--lengths", "64", "--repeats", "1"]):
        monkeypatch.setattr("sys.argv", ["dllm_jax.eval", *words, "--block", "2", "--out", str(tmp_path)])
        assert command.main() == 0
    few_shot, needle = (record.read(tmp_path / f"{kind}-Policy.json") for kind in ("tasks", "recall"))
    assert few_shot["average"] >= 0.8
    assert (few_shot["decoding"]["length"], needle["decoding"]["length"]) == (2, 4)
    assert needle["average"] == 1
