"""examples/watch.py as a user runs it, and `python -m dllm_jax chat`."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import __main__ as command
from dllm_jax.demo import chatting

EXAMPLE = Path(__file__).parents[1] / "examples" / "watch.py"
ASKED = "aob=407;T=211;iez=830;T="
OPTIONS = ["--length", "4", "--block", "2"]


def test_the_example_streams_prints_and_writes_pages(tmp_path, capsys):
    namespace = {"__name__": "example"}
    exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec"), namespace)
    namespace["main"](tmp_path)
    text = capsys.readouterr().out
    assert text.count("step 4, block 1: 211<|eot_id|>") == 3
    pages = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert pages.keys() == {"answer.html", "policies.html"}
    assert "DKVDecode(refresh_every=8" in pages["policies.html"]


def chat(monkeypatch, typed: str, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dllm_jax", "chat", *options])
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return command.main()


def test_a_conversation_without_a_terminal_prints_answers_alone(monkeypatch, capsys):
    assert chat(monkeypatch, f"{ASKED}\n\n{ASKED}\n", "tiny-llada", *OPTIONS, "--policy", "DualCache") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "211"
    assert second


def test_a_picture_shows_masks_ends_and_what_has_just_been_decoded():
    conversation = chatting.Conversation.open(chatting.Arguments("tiny-llada", length=4, block=2))
    ids = conversation.tokenizer.encode("21", add_special_tokens=False)
    end, mask = conversation.model.spec.eot_id, conversation.model.spec.mask_id
    tokens = np.array([[0, *ids, end, mask]])
    new = np.array([[False, True, False, False, False]])
    snapshot = dj.Snapshot(tokens, new, np.ones(tokens.shape, np.float32), 1, 0, None)
    picture = conversation._picture(snapshot, 1)
    assert str(picture) == "21∎░"
    assert [str(span.style) for span in picture.spans] == ["bold cyan", "dim", "dim"]
    assert chatting._cost(snapshot, 0.5) == "stopped after 1 steps, 0.5 s"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere/at/all"], "does not exist"),
        (["tiny-llada", "--policy", "DualKash"], "DualKash"),
        (["tiny-llada", "--length", "0"], "length=0 must be"),
    ],
)
def test_bad_options_of_a_conversation_are_one_line(monkeypatch, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        chat(monkeypatch, ASKED, *options)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
