"""The examples of docs/policies.md run as printed, and the policy they print obeys the rules."""

import pathlib
import re

import numpy as np
import pytest

import dllm_jax as dj
from tests.models import FAMILIES, tiny
from tests.test_policies import prompts

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "policies.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def printed() -> dict:
    namespace = {}
    for block in BLOCKS:
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
    for name in ("select", "layer", "observe", "init", "eligible", "most_eligible", "widths"):
        assert re.search(rf"^\|[^|]*`{name}`[^|]*\|", TEXT, re.MULTILINE)
