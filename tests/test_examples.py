"""The examples, their notebook and their pages run; what they draw is what a recording says."""

import ast
import dataclasses
import importlib.util
import io
import json
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import unittest.mock
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from PIL import Image

import dllm_jax as dj
from dllm_jax import __main__ as command
from dllm_jax import lora
from dllm_jax.analysis import activations
from dllm_jax.command_line import plain_errors
from dllm_jax.commands import generate as answering
from dllm_jax.decoding.watch import animation as animate
from dllm_jax.decoding.watch.recording import Recording
from dllm_jax.demo import chatting, trains
from dllm_jax.nn.intervention import Place
from examples import dpo, form, grpo, see_inside, sft_lora
from examples.learning import pretrained
from tests import refuses, run_page

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "seeing-inside.md").read_text()


def test_the_examples_of_the_page_run(capsys):
    namespace = run_page("how-to/seeing-inside.md")
    assert namespace["seen"].attention.shape == (3, 2, 1, 4, 28, 28)
    assert namespace["by_layer"].shape == (5, 1, 28)
    assert not np.any(namespace["patched"].tokens == namespace["model"].spec.mask_id)
    assert capsys.readouterr().out


def test_the_page_names_everything_that_there_is():
    for name in (*activations.AXES, *Place.__args__):
        assert f"`{name}`" in PAGE
    assert "(../../examples/figures.py)" in PAGE


@pytest.mark.exhaustive
def test_the_example_runs(tmp_path, capsys):
    see_inside.main(figures=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    answer = lambda start: next(line for line in lines if line.startswith(start)).rpartition(" ")[2]
    one, other = (answer(f"asked {question}") for question in see_inside.QUESTIONS)
    assert one != other
    by_layer = [line.rpartition(": ")[2] for line in lines if line.startswith("with the other")]
    assert len(by_layer) == 5
    assert by_layer[0] == other  # the embeddings are the other prompt's
    assert by_layer[-1] == one  # after the last layer, a prompt's position reaches no other
    assert len(list(tmp_path.glob("*.png"))) == 5


def test_a_form_is_filled_with_digits_and_words(capsys):
    filled = form.main("tiny-llada", form.QUESTION)
    assert filled["T"] == 211
    assert filled["by"] in ("train", "tram", "bus")
    assert json.loads(capsys.readouterr().out) == filled


ASKED_BY, ANSWER = 3, "P>L;"


def panel(computed: list[str]) -> animate.FramePanel:
    """A panel of four steps, which decode the answer from left to right and compute what is marked."""
    steps = np.array([[mark == "x" for mark in row] for row in computed])
    tokens = np.full((5, ASKED_BY + 4), 2)
    for t in range(5):
        tokens[t, :ASKED_BY], tokens[t, ASKED_BY : ASKED_BY + t] = 1, 3
    score, widened = np.zeros(steps.shape), np.zeros((4, 1), bool)
    recording = Recording(tokens, steps, steps, tokens[1:], score, widened, mask_id=2)
    return animate.FramePanel("title", recording, [*"abc", *ANSWER])


EXACT, CACHED = panel(["x" * 7] * 4), panel(["x" * 7, "...xxxx", "....xxx", ".....xx"])


def cells(clock: float) -> np.ndarray:
    """Which cells of the cached panel's map have the color of what is computed, read from the picture."""
    image = np.asarray(animate.frame_picture([EXACT, CACHED], "question", clock))
    left, top = 2 * animate.MARGIN + EXACT.width, animate.MAP
    rows, columns = image[top + animate.ROW // 2 :: animate.ROW], slice(left + 3, None, animate.COLUMN)
    return np.all(rows[:4, columns][:, :7] == animate.NOW, axis=-1)


def test_steps_appear_when_their_positions_are_computed():
    """What a step decodes is dark, not in the color of what is computed."""
    expected = CACHED.recording.computed & ~CACHED.recording.changed
    np.testing.assert_array_equal(CACHED.spent, [0, 7, 11, 14, 16])
    for clock, steps in ((6.9, 0), (7, 1), (13.9, 2), (16, 4), (28, 4)):
        np.testing.assert_array_equal(cells(clock), expected & (np.arange(4) < steps)[:, None])


def test_the_page_animates_a_run_of_ones_own(tmp_path, monkeypatch, capsys):
    """Each policy has a panel; a long answer takes several lines, above its map."""
    page = (ROOT / "docs" / "how-to" / "watching.md").read_text()
    (command,) = re.findall(r"^python (examples/animate.py .*)$", page, re.MULTILINE)
    monkeypatch.setattr(sys, "argv", shlex.split(command.replace("16", "8").replace("runs/", f"{tmp_path}/")))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "animate.py"), run_name="__main__")
    assert ended.value.code == 0
    assert "wrote" in capsys.readouterr().out
    with Image.open(tmp_path / "answer.gif") as made:
        assert made.n_frames > 2
        assert made.width == 2 * animate.LEAST + 3 * animate.MARGIN
    out = dj.generate(dj.load(path := dj.bundled.path("tiny-llada")), [[40, 41]], length=4, trace=True)
    tokenizer, made = dj.load_tokenizer(path), tmp_path / "own" / "run.gif"
    assert dj.animate(out, tokenizer, made, frames=3, question="bc", heading="Mine") == made
    with Image.open(made) as drawn:
        assert (drawn.n_frames, drawn.width) == (3, animate.LEAST + 2 * animate.MARGIN)
    refuses("the output has no trace", dj.animate, {"a": out._replace(trace=None)}, tokenizer, made)
    refuses(r"outputs\['a'\]=3 must be", dj.animate, {"a": 3}, tokenizer, made)
    refuses("outputs are empty", dj.animate, {}, tokenizer, made)
    long = dataclasses.replace(EXACT, labels=["a long token of forty characters or more"] * 7)
    assert [top for _, top, _ in long.boxes] == [i * animate.LINE_OF_TOKENS for i in range(4)]
    assert long.map_top == EXACT.map_top + 3 * animate.LINE_OF_TOKENS


WATCH = Path(__file__).parents[1] / "examples" / "watch.py"
ASKED = "aob=407;T=211;iez=830;T="
OPTIONS = ["--length", "4", "--block", "2"]


@pytest.mark.exhaustive
def test_the_example_streams_prints_and_writes_pages(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(WATCH), "--out", str(tmp_path)])
    runpy.run_path(str(WATCH), run_name="__main__")
    text = capsys.readouterr().out
    assert text.count("step 7, block 3: P>L;L>G;G>M;M>V;V>Z;Z>B;B>W;<|eot_id|>") == 3
    pages = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert pages.keys() == {"answer.html", "policies.html"}
    assert all(
        f'"name":"{name}"' in pages["policies.html"] for name in ("Policy", "DualCache", "ElasticCache")
    )


def chat(monkeypatch, typed: str, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dllm_jax", "chat", *options])
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    with plain_errors():
        return command.main()


def test_a_conversation_without_a_terminal_prints_answers_alone(monkeypatch, capsys):
    assert chat(monkeypatch, f"{ASKED}\n\n{ASKED}\n", "tiny-llada", *OPTIONS, "--policy", "DualCache") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "211"
    assert second


def test_a_line_that_cannot_be_read_is_reported_and_the_others_are_answered(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dllm_jax", "chat", "tiny-llada", *OPTIONS])
    piped = io.BytesIO(f"{ASKED}\nT=1\xe9;\n{ASKED}\n".encode("latin-1"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped, encoding="utf-8"))
    assert command.main() == 1
    told = capsys.readouterr()
    assert told.out.splitlines()[0] == "211"
    assert len(told.out.splitlines()) == 2
    (line,) = [line for line in told.err.splitlines() if line.startswith("error")]
    assert line.startswith(
        "error: message 2: messages[2]['content'] holds the lone surrogate U+DCE9 at position 3"
    )
    with pytest.raises(SystemExit):
        chat(monkeypatch, ASKED, "tiny-llada", "--system", "\udce9")
    assert "--system holds the lone surrogate U+DCE9" in capsys.readouterr().err


def test_a_picture_shows_masks_ends_and_what_has_just_been_decoded():
    conversation = chatting.ChatConversation.open(chatting.ChatArguments("tiny-llada", length=4, block="2"))
    ids = conversation.lm.tokenizer.encode("21", add_special_tokens=False)
    end, mask = conversation.lm.model.spec.eot_id, conversation.lm.model.spec.mask_id
    tokens = np.array([[0, *ids, end, mask]])
    new = np.array([[False, True, False, False, False]])
    snapshot = dj.Snapshot(tokens, new, np.ones(tokens.shape, np.float32), np.array([1]), 0, None)
    picture = conversation._picture(snapshot, 1)
    assert str(picture) == "21∎░"
    assert [str(span.style) for span in picture.spans] == ["bold cyan", "dim", "dim"]
    ended = snapshot._replace(tokens=np.array([[0, *ids, end, end]]))
    assert str(conversation._picture(ended, 1)) == "21∎", "of the ends after it one is shown"
    assert chatting._cost(snapshot, 0.5) == "stopped after 1 steps, 0.5 s"


def test_bad_options_of_a_conversation_are_one_line(monkeypatch, capsys):
    for options, message in (
        (["nowhere/at/all"], "does not exist"),
        (["tiny-llada", "--policy", "DualKash"], "DualKash"),
        (["tiny-llada", "--length", "0"], "length=0 must be"),
    ):
        with pytest.raises(SystemExit) as ended:
            chat(monkeypatch, ASKED, *options)
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error


FEW = {
    "sft": (sft_lora.main, dict(steps=2, batch=4, rank=2, review_every=1, questions=4)),
    "dpo": (dpo.main, dict(steps=2, batch=2, rank=2, review_every=1, questions=4)),
    "grpo": (grpo.main, dict(steps=2, prompts=2, group=2, updates=1, rank=2, review_every=1, questions=4)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "sft")) for name in FEW]
)
def test_an_example_runs_and_writes_its_curve(name, tmp_path, capsys):
    main, options = FEW[name]
    if name == "sft":
        options = options | {"adapter": tmp_path / "adapter"}
    curve = main(**options, out=tmp_path / "results" / "curve.json")
    written = json.loads((tmp_path / "results" / "curve.json").read_text())
    assert [row["step"] for row in written["curve"]] == [0, 1, 2]
    assert written["curve"] == curve.rows
    assert all(0 <= row["accuracy"] <= 1 for row in curve.rows)
    assert {"command", "device", "versions", "date", "options"} <= set(written)
    assert len(capsys.readouterr().out.splitlines()) == 3
    if name == "sft":
        model, _ = pretrained("tiny-llada")
        assert lora.options_of(lora.load(model, tmp_path / "adapter")).rank == 2
    if name == "dpo":
        assert curve.rows[-1]["loss"] > 0


AS_FILES = """
import runpy, sys
from pathlib import Path
import dllm_jax, pallas_kernels
root = Path(sys.argv[1])
others = [path for path in sys.path if not (Path(path) / "examples").is_dir()]
for file in sorted((root / "examples").glob("*.py")):
    if "__main__" in file.read_text():
        sys.path[:] = [str(file.parent), *others]
        runpy.run_path(str(file), run_name="imported")
        for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
            del sys.modules[name]
        print(file.stem)
"""


def test_every_example_begins_as_a_file_in_any_directory(tmp_path):
    """Also those that import one another; the other tests import them as modules."""
    command = [sys.executable, "-c", AS_FILES, str(ROOT)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert {"dpo", "grpo", "see_inside", "sft_lora"} < {*ended.stdout.split()}, ended.stderr


def test_a_file_of_prompts_is_answered_once_line_by_line(tmp_path):
    """A question that occurs twice, a line that a kill has cut, and another run at the same time."""
    questions, answers = tmp_path / "questions.txt", tmp_path / "answers.jsonl"
    questions.write_text("T=211;T=\nT=105;T=\n\nT=211;T=\n", encoding="utf-8-sig")
    files = {"questions": questions, "answers": answers}
    ask = lambda: answering.answer(answering.GenerateArguments(**files, slots=2, length=4, block="2"))
    assert ask() == 0
    whole = answers.read_bytes()
    entries = [json.loads(line) for line in whole.splitlines()[1:]]
    assert sorted(entry["asked"] for entry in entries) == ["T=105;T=", "T=211;T=", "T=211;T="]
    assert all(entry["answer"] and entry["forwards"] for entry in entries)
    answers.write_bytes(whole[:-20])
    with dj.Journal(answers) as other:
        other.claim()
        refuses(f"{answers}: another run is adding answers to it", ask)
    ask()
    assert answers.read_bytes() == whole
    answering.answer(answering.GenerateArguments(**files, rope_factor=2, slots=2, length=4, block="2"))
    assert len(answers.read_bytes().splitlines()) == 7, "other options, other answers"
    growing = dict(length=2, max_length=8, block="2", sampler="DAEDAL(expansion=2, checked=2)")
    grown = tmp_path / "grown.jsonl"
    assert answering.answer(answering.GenerateArguments(questions=questions, answers=grown, **growing)) == 0
    of = lambda path: {e["asked"]: e["answer"] for e in map(json.loads, path.read_text().splitlines()[1:])}
    assert of(grown) == {"T=211;T=": "211", "T=105;T=": "105"}
    questions.write_text("iez=830;T=211;T=")  # tokens after the end of this answer are no part of it
    cut = tmp_path / "cut.jsonl"
    assert (
        answering.answer(answering.GenerateArguments(questions=questions, answers=cut, length=8, block="4"))
        == 0
    )
    assert of(cut) == {"iez=830;T=211;T=": "21"}
    questions.write_bytes(b"T=1\nT=\xe9\n")
    refuses(f"{questions}:2: not UTF-8: byte 0xe9", ask)


NOTEBOOK = Path(__file__).parent.parent / "examples/quickstart.ipynb"


def run_cell(source: str, names: dict):
    """What a notebook shows of a cell: the value of its last expression."""
    *body, last = ast.parse(TransformerManager().transform_cell(source)).body
    shown = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body + [last] * (not shown), []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if shown else None


@pytest.mark.exhaustive
def test_the_notebook_runs_from_top_to_bottom(monkeypatch, capsys):
    book, drawn = nbformat.read(NOTEBOOK, as_version=4), []
    monkeypatch.setattr(plt, "show", lambda: drawn.append(plt.gcf().axes[0].images))
    names: dict = {}
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    shown = [repr(value) for cell in cells if (value := run_cell(cell.source, names)) is not None]
    kept = [output for cell in cells for output in cell.outputs]
    assert shown == [output.data["text/plain"] for output in kept if output.output_type == "execute_result"]
    printed = capsys.readouterr().out
    assert trains.ANSWER in printed, "it answers"
    assert any(drawn), "the picture is drawn"
    assert printed == "".join(o.text for o in kept if o.output_type == "stream")
    plt.close("all")


def test_the_notebook_is_kept_with_the_outputs_of_one_run_and_no_error():
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells[1:])
    assert {o.output_type for c in cells for o in c.outputs} == {"stream", "display_data", "execute_result"}


@pytest.mark.parametrize(("gpu", "wanted"), [(None, ""), ("/usr/bin/nvidia-smi", " jax[cuda13]")])
def test_the_first_cell_installs_what_is_missing_and_what_a_gpu_needs(monkeypatch, gpu, wanted):
    """Where the package is there, as in the other test, it does nothing."""
    first = next(cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: gpu)
    shell = unittest.mock.Mock()
    namespace = {"get_ipython": lambda: shell}
    exec(TransformerManager().transform_cell(first.source), namespace)
    installs = [call.args for call in shell.run_line_magic.call_args_list]
    assert installs == [("pip", f"install --quiet {what}") for what in ("{wanted}", "matplotlib")]
    assert namespace["wanted"] == f"git+https://github.com/dllm-jax/dllm_jax{wanted}"
