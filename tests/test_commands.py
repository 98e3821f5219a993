"""Files of prompts, options of other libraries, classes of one's own and versions on command lines."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import dllm_jax as dj
from dllm_jax import __main__ as command
from dllm_jax import command_line, expressions
from dllm_jax.command_line import VERSION, plain_errors, run
from dllm_jax.commands import generate as answering
from dllm_jax.eval.run.settings import Checkpoint
from tests import refuses

SHORT = dict(length=4, block="2", slots=2)
TALK = [{"role": "user", "content": "T=211;T="}]


@pytest.fixture
def asked(tmp_path):
    """Writes a file of prompts; returns the arguments that answer it."""

    def write(text: str, name: str = "asked.jsonl", **options):
        file = tmp_path / name
        file.write_text(text)
        return answering.GenerateArguments(
            questions=file, answers=tmp_path / "answers.jsonl", **(SHORT | options)
        )

    return write


def entries(arguments: answering.GenerateArguments) -> list[dict]:
    return [json.loads(line) for line in arguments.answers.read_text().splitlines()[1:]]


def test_prompts_and_conversations_of_a_jsonl_file_are_answered_by_line(asked, capsys):
    """Other settings are other answers; a finished file says so."""
    lines = [{"prompt": "T=211;T=", "answer": "211"}, {"messages": TALK}, {"prompt": "b=407;b="}]
    text = "\n\n".join(map(json.dumps, lines))
    arguments = asked(text)
    assert answering.answer(arguments) == 0
    found = {entry["line"]: entry for entry in entries(arguments)}
    assert sorted(found) == [1, 3, 5]
    assert found[1]["answer"] == found[3]["answer"]
    assert found[1]["settings"].items() >= {"length": 4, "block": "2", "checkpoint": "tiny-llada"}.items()
    assert answering.answer(arguments) == 0
    assert f"{arguments.answers} has an answer to each of 3 prompts" in capsys.readouterr().err
    assert len(entries(arguments)) == 3
    for number, options in enumerate((dict(stop=("1",)), dict(system="T=999;"), dict(steps=4)), start=2):
        assert answering.answer(asked(text, **options)) == 0
        assert len(entries(arguments)) == 3 * number, options
    stopped = [entry for entry in entries(arguments) if "stop" in entry["settings"]]
    assert not any("1" in entry["answer"] for entry in stopped)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "x"}', "must have \"prompt\".* it has 'question'"),
        ('{"prompt": "x", "messages": []}', "it has both"),
        ('{"prompt": 3}', "3: the object must have"),
        ('{"messages": "x"}', "'x': the object must have"),
        ("T=211;T=", "Expecting value"),
        ("[1]", "expected an object"),
    ],
)
def test_lines_without_a_prompt_are_refused_with_their_number(asked, line, message):
    refuses(rf"asked\.jsonl:2.*{message}", answering.answer, asked(f'{{"prompt": "T="}}\n{line}\n'))


def test_a_line_that_the_template_refuses_and_json_in_a_text_file_are_named(asked):
    wrong = json.dumps({"messages": [{"role": "user"}]})
    refuses(r"asked\.jsonl:1: messages hold", answering.answer, asked(wrong))
    refuses(r"asked\.jsonl holds no prompts", answering.answer, asked("\n"))
    line = json.dumps({"prompt": "T=211;T="})
    refuses(
        r"asked\.txt:1 is a JSON object .* Name the file asked\.jsonl",
        answering.answer,
        asked(line, "asked.txt"),
    )


def test_draws_have_a_seed_and_repeat_whichever_prompts_are_left(asked):
    options = dict(sampler="Confidence(temperature=9.0)", length=8)
    text = "T=211;T=\nb=407;b=\n"
    arguments = asked(text, "a.txt", **options)
    assert answering.answer(arguments) == 0
    first = {entry["asked"]: entry["answer"] for entry in entries(arguments)}
    kept = arguments.answers.read_text().splitlines()
    arguments.answers.write_text("\n".join(kept[:2]) + "\n")
    assert answering.answer(arguments) == 0
    assert {entry["asked"]: entry["answer"] for entry in entries(arguments)} == first
    answering.answer(asked(text, "a.txt", seed=1, **options))
    *_, other, another = entries(arguments)
    assert [entry["settings"]["seed"] for entry in entries(arguments)] == [0, 0, 1, 1]
    assert {other["answer"], another["answer"]} != set(first.values())


def test_failures_are_said_with_their_number_and_the_first_reason(asked, capsys):
    arguments = asked("T=211;T=\nb=407;b=\n", "a.txt", sampler="DAEDAL", max_length=4095)
    assert answering.main(arguments) == 1
    told = capsys.readouterr().err
    assert "2 of 2 prompts failed, the first in line 1: ValueError: max_length=4095 must be at most" in told
    assert [entry["line"] for entry in entries(arguments)] == [1, 2]


def test_answers_are_those_of_a_checkpoints_content(asked, tmp_path):
    """Of weights, chat template and tokenizer at the same path."""
    folder = tmp_path / "model"
    shutil.copytree(dj.bundled.path("tiny-llada"), folder)
    arguments = asked('{"prompt": "T=211;T="}', model=str(folder))
    count = lambda: (answering.answer(arguments), len(entries(arguments)))[1]
    assert (count(), count()) == (1, 1)
    model = dj.load(folder)
    changed = jax.tree.map(lambda leaf: leaf * 1.01, model.params)
    dj.save_hf(dj.Model(changed, model.spec), folder, like=dj.bundled.path("tiny-llada"), overwrite=True)
    assert count() == 2
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("| trim", ""))
    assert count() == 3
    identity = lambda **options: Checkpoint(**options).open().identity
    assert identity(tokenizer=str(folder)) != identity()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["generate", "a", "b", "--max_new_tokens", "32"],
            "--max_new_tokens is not .* Did you mean --length 32?",
        ),
        (
            ["chat", "m", "--gen-length=8"],
            "--gen_length is not an option of dllm-jax chat. Did you mean --length 8?",
        ),
        (["generate", "a", "b", "--temperature", "0.7"], "--sampler 'Confidence(temperature=0.7)'"),
        (["generate", "a", "b", "--batch_size", "3"], "Did you mean --slots 3?"),
        (["convert", "a", "b", "--load_in_8bit"], "Did you mean --weights int8?"),
        (["eval", "tasks", "--block_length", "4"], "Did you mean --block 4?"),
        (["chat", "tiny-lada"], "Did you mean tiny-llada?"),
        (
            ["generate", "a.jsonl", "tiny-llada"],
            "must be a file such as answers.jsonl. .* --model tiny-llada",
        ),
        (["check", "--trust_remote_code"], "no code of the checkpoint is executed"),
    ],
)
def test_options_of_other_libraries_say_what_to_write(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dllm-jax", *words])
    with pytest.raises(SystemExit) as ended, plain_errors():
        command.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert all(part in told for part in message.split(" .* ")), told


def test_python_says_what_a_bundled_name_could_mean():
    with pytest.raises(FileNotFoundError, match=r"Did you mean tiny-llada\? Its path is dj.bundled.path"):
        dj.load("tiny-lada")


OWN = """
import dataclasses
from dllm_jax.policies import DualCache
from dllm_jax.samplers import Threshold

@dataclasses.dataclass(frozen=True)
class Mine(DualCache):
    every: int = 3

@dataclasses.dataclass(frozen=True)
class Bold(Threshold):
    threshold: float = 0.5
"""


def test_classes_of_ones_own_are_named_by_their_module(asked, tmp_path, monkeypatch):
    """A file of others, such as a checkpoint's settings, imports none."""
    (tmp_path / "mine_of_this_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    own = "mine_of_this_test"
    made = expressions.typed_policy(f"{own}:Mine(every=2)")
    assert (type(made).__name__, made.every) == ("Mine", 2)
    assert expressions.described_call(made).startswith(f"{own}:Mine(every=2) sha256:")
    options = dict(policy=f"{own}:Mine", sampler=f"{own}:Bold(threshold=0.4)")
    arguments = asked('{"prompt": "T=211;T="}', **options)
    assert answering.answer(arguments) == 0
    assert entries(arguments)[0]["settings"]["sampler"].startswith(f"{own}:Bold(threshold=0.4)")
    for text, message in (
        (f"{own}:Bold", "Bold of the module mine_of_this_test is no Policy"),
        (f"{own}:None", "is no Policy"),
        ("no_such_module:Mine", "the module no_such_module cannot be imported"),
        (f"{own}:Mine(every=open('x'))", "open is not one of"),
    ):
        refuses(message, expressions.typed_policy, text)
    refuses("is not a constructor call", expressions.policy, f"{own}:Mine()")


@pytest.mark.parametrize("words", [[], ["chat"], ["eval", "tasks"]])
def test_every_command_line_tells_its_version(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dllm-jax", *words, VERSION])
    with pytest.raises(SystemExit) as ended:
        run(command.main)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"dllm_jax {dj.__version__} (jax {jax.__version__}, Python 3.")


def test_the_cache_of_programs_heals(tmp_path, monkeypatch):
    """A kill between the two files of an entry leaves one without the other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        where = command_line.keep_programs()
        where.mkdir(parents=True)
        for name in ("whole-cache", "whole-atime", "half-cache", "stray-atime"):
            (where / name).write_bytes(time.time_ns().to_bytes(8, "little"))
        jax.config.update("jax_compilation_cache_dir", None)
        command_line.keep_programs()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_compilation_cache_max_size", -1)
    assert {path.name for path in where.glob("*-cache")} == {"whole-cache"}


WITHOUT = """
import os, sys, warnings
sys.modules["fcntl"] = None
del os.sched_getaffinity
warnings.simplefilter("ignore")
import dllm_jax as dj
from pathlib import Path
from dllm_jax.checkpoint.conversion import convert
from dllm_jax.provenance import measured_on
from dllm_jax.testing import tiny
from dllm_jax.training import Batches, TrainConfig, train
from dllm_jax.tasks import encode_batch
path, out = dj.bundled.path("tiny-llada"), Path(sys.argv[1])
model, tokenizer = dj.load(path), dj.load_tokenizer(path)
print(measured_on("float32")["cores"] == os.cpu_count())
convert(path, out / "converted")
print(dj.chat(model, tokenizer, [{"role": "user", "content": "aob=407;T=211;iez=830;T="}], length=4))
batch = encode_batch(tokenizer, [("T=211;T=", "211")], length=4, spec=model.spec)
config = TrainConfig(steps=1, warmup=0)
print(len(train(model, Batches(lambda step: batch), config, directory=out / "run", progress=False).log))
with dj.Journal(out / "answers.jsonl") as journal:
    journal.claim()
    try:
        dj.Journal(out / "answers.jsonl").claim()
    except ValueError as error:
        print("another run is adding" in str(error))
dj.Journal(out / "answers.jsonl").claim()
"""


def test_nothing_needs_what_windows_and_macos_lack(tmp_path):
    """Locks hold, too, and are given back."""
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    (tmp_path / "out").mkdir()
    words = [sys.executable, "-c", WITHOUT, str(tmp_path / "out")]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ended.stdout.split() == ["True", "211", "1", "True"], ended.stderr
