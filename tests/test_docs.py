"""The examples of docs/policies.md and docs/performance.md run as printed; the policy obeys the rules."""

import inspect
import pathlib
import re

import numpy as np
import pytest

import dllm_jax as dj
from tests.models import FAMILIES, tiny
from tests.test_policies import prompts

DOCS = pathlib.Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "policies.md").read_text()


def examples(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def printed() -> dict:
    namespace = {}
    for block in examples(TEXT):
        exec(block, namespace)
    return namespace


def test_the_example_saves_work(printed):
    assert printed["ours"].stats.computed[0] < printed["exact"].stats.computed[0] / 2
    assert not np.any(np.asarray(printed["ours"].tokens) == printed["model"].spec.mask_id)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_example_is_exact_in_its_limit_and_a_row_equals_the_row_alone(printed, family):
    model, policy = tiny(family), printed["Promising"]
    prompt, mask = prompts(model, (9, 5))
    run = lambda p: dj.generate(model, prompt, prompt_mask=mask, length=8, block=4, policy=p, trace=True)
    np.testing.assert_array_equal(run(policy(refresh=1)).trace.tokens, run(dj.policies.Policy()).trace.tokens)
    alone = dj.generate(model, prompt[1:, 4:], length=8, block=4, policy=policy(keep=2))
    np.testing.assert_array_equal(run(policy(keep=2)).tokens[1, -8:], alone.tokens[0, -8:])


def test_every_method_of_a_policy_is_described():
    methods = {name for name, value in vars(dj.policies.Policy).items() if inspect.isfunction(value)}
    assert "select" in methods
    for name in (name for name in methods if not name.startswith("_")):
        assert f"| `{name}` |" in TEXT


def test_the_example_of_the_ladder_runs_and_returns_no_padding(capsys):
    exec(examples((DOCS / "performance.md").read_text())[0], {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["16", "24"]
    assert lines[2:] == [str((1, prompt + 4)) for prompt in (9, 21)]


def test_the_example_of_the_published_settings_runs(capsys):
    exec(examples((DOCS / "published-settings.md").read_text())[0], {})
    preset, listing = capsys.readouterr().out.splitlines()
    assert preset.startswith("SparseDLLM(")
    assert "sparse-dllm/llada-8b-instruct/gpqa" in listing
