"""The page on seeing inside and its example run; patching moves answers of the models that ship."""

import pathlib
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

import dllm_jax as dj
from dllm_jax.analysis import activations
from dllm_jax.nn.intervention import Place
from dllm_jax.tasks import Recall, prompt_arrays
from dllm_jax.tasks import examples as drawn_examples
from examples import see_inside

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "seeing-inside.md").read_text()


def test_the_examples_of_the_page_run(capsys):
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, namespace)
    assert namespace["seen"].attention.shape == (3, 2, 1, 4, 28, 28)
    assert namespace["by_layer"].shape == (5, 1, 28)
    assert not np.any(namespace["patched"].tokens == namespace["model"].spec.mask_id)
    assert capsys.readouterr().out


def test_the_page_names_everything_that_there_is():
    for name in (*activations.AXES, *Place.__args__):
        assert f"`{name}`" in PAGE
    figures = (ROOT / "examples" / "figures.py").read_text()
    for name in re.findall(r"^def ([a-z]\w+)\(", figures, re.MULTILINE):
        assert f"| `{name}(" in PAGE, name


def test_the_example_runs(tmp_path, capsys):
    see_inside.main(figures=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    answer = lambda start: next(line for line in lines if line.startswith(start)).rpartition(" ")[2]
    one, other = (answer(f"asked {question}") for question in see_inside.QUESTIONS)
    assert one != other
    by_layer = [line.rpartition(": ")[2] for line in lines if line.startswith("with the other")]
    assert len(by_layer) == 5
    assert by_layer[0] == other  # the embeddings are the other prompt's
    assert by_layer[-1] == one  # behind the last layer, a prompt's position reaches no other
    assert len(list(tmp_path.glob("*.png"))) == 5


@pytest.mark.parametrize("policy", [dj.policies.Policy(), dj.policies.DualCache()], ids=["exact", "dual"])
def test_patching_a_needles_value_moves_the_answer(policy):
    """The stream of another prompt there: into the first layer it decides, behind the last it does not."""
    path = dj.embedded.path("tiny-llada")
    model, tokenizer = dj.load(path), AutoTokenizer.from_pretrained(path)
    drawn = drawn_examples(Recall(), 17, 5, 12, "held_out")
    clean, mask = prompt_arrays(tokenizer, drawn, model.spec.eos_id)
    assert mask.all()

    # The same prompts with another value of what is asked for: its digits are exchanged for others.
    text = lambda ids: [tokenizer.convert_ids_to_tokens(i) for i in ids.tolist()]
    at = []
    for example, row in zip(drawn, clean, strict=True):
        shown = "".join(piece if len(piece) == 1 else " " for piece in text(row))
        at.append(shown.index(example.prompt[-2] + "=" + example.answer) + 2 + np.arange(3))
    at, sequence = np.stack(at), np.arange(len(clean))[:, None]
    digits = np.asarray(tokenizer.convert_tokens_to_ids(list("0123456789")))
    other = clean.copy()
    other[sequence, at] = digits[(np.searchsorted(digits, clean[sequence, at]) + 5) % 10]
    run = lambda prompt, some=(): np.asarray(
        dj.generate(model, prompt, length=4, block=2, policy=policy, interventions=some).tokens
    )[:, clean.shape[1] :]
    one, moved = run(clean), run(other)
    assert (one != moved).any(axis=1).mean() > 0.5  # else the model does not look at its needles

    masks = np.full((len(clean), 4), model.spec.mask_id, np.int32)
    source = dj.capture(model, np.concatenate([other, masks], axis=1), ("residual",), positions=at)
    patch = lambda layer: dj.Intervention.patch(
        "residual", source.residual[0, layer : layer + 1], layers=layer, positions=at
    )
    np.testing.assert_array_equal(run(clean, [patch(0)]), moved)
    np.testing.assert_array_equal(run(clean, [patch(model.spec.layers)]), one)
