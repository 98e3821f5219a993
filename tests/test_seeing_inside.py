"""The page on seeing inside and its example run; patching moves answers of the models that ship."""

import pathlib
import re

import numpy as np

from dllm_jax.analysis import activations
from dllm_jax.nn.intervention import Place
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
