"""The quick suite leaves out what tests/quick.py names, and keeps one of each kind."""

import inspect
import re
from pathlib import Path

import pytest

import dllm_jax as dj
from tests import quick
from tests.conftest import COLLECTED
from tests.models import FAMILIES
from tests.policy_cases import EXHAUSTIVE

HERE = Path(__file__).parent
SAME_METHOD = {  # recordings that may be left out, since these others, or these tests of the method, are kept
    "fast-dllm-v2-forward": "fast-dllm-v2-generate", "llada-moe-forward": "llada-moe-generate",
    "s2d2-fast-dllm-v2": "fast-dllm-v2-generate",
    "llada-v-generate": "llada-v-vision", "llada2-forward": "llada2-generate", "maskkv-scores": "maskkv",
    "sdar-forward": "sdar-generate", "diffusion-gemma-generate": "diffusion-gemma-forward",
    "illada-var-generate": "illada-generate", "dkv-prefill": "dkv-decode", "dkv-pd": "dkv-decode",
    "daedal": "test_growth.py", "dreamon": "test_growth.py", "freedave-llada": "test_samplers_free_dave.py",
    "freedave-sdar": "test_samplers_free_dave.py", "mage": "test_prefix.py",
}  # fmt: skip


@pytest.fixture
def collected(pytestconfig) -> list[pytest.Item]:
    """All tests, in a run of all files."""
    items = pytestconfig.stash[COLLECTED]
    if {item.path.name for item in items} < {path.name for path in HERE.glob("test_*.py")}:
        pytest.skip("looks at a run of all files")
    return items


@pytest.fixture
def kept(collected) -> list[pytest.Item]:
    return [item for item in collected if not item.get_closest_marker("full")]


@pytest.mark.skipif(EXHAUSTIVE, reason="names of cases are others")
def test_every_line_names_a_test(collected):
    tests = [quick.name_of(item) for item in collected]
    unused = [line for line in quick.reasons() if not any(quick.matches(line, test) for test in tests)]
    assert not unused, "tests/quick.py names what is not there"


def test_no_refusal_is_left_out(collected, kept):
    names = lambda items: {quick.name_of(item).partition("[")[0] for item in items}
    assert not [test for test in names(collected) - names(kept) if "refuse" in test]


def cases(kept: list[pytest.Item], *tests: str) -> set[str]:
    """The words in the ids of tests' cases."""
    ids = [item.callspec.id for item in kept if item.originalname in tests]
    return {word for case in ids for word in re.split("[-/]", case)}


def test_every_policy_sampler_family_and_recorded_method_is_kept(collected, kept):
    assert {type(policy).__name__ for policy in dj.policies.ALL} <= cases(kept, "test_policy")
    kinds = [kind for kind in vars(dj.samplers).values() if isinstance(kind, type)]
    samplers = {kind.__name__ for kind in kinds if issubclass(kind, dj.samplers.Sampler)}
    # Bases, and those of test_causal_context.py, _growth, _diffusion_gemma, test_samplers_wino.py, _free_dave
    # and _s2d2.
    of_their_own = {"Sampler", "UntilDone", "WINO", "FreeDave", "S2D2", "Autoregressive", "SelfSpeculation"}
    of_their_own |= {"DAEDAL", "DreamOn", "EntropyNoise", "GrowingAnswers"}
    assert samplers - of_their_own <= cases(kept, "test_sampler")
    assert "test_wino_keeps_the_rules_of_every_sampler" in {item.originalname for item in kept}, "WINO"
    methods = lambda items: {
        i.callspec.id.partition("/")[0] for i in items if i.originalname == "test_conforms"
    }
    assert methods(kept) | SAME_METHOD.keys() == methods(collected)
    assert set(SAME_METHOD.values()) <= methods(kept) | {item.path.name for item in kept}
    # Further families have recordings of their own, such as llada-moe-generate.
    assert set(FAMILIES) <= cases(kept, "test_policy")


def test_every_public_function_is_called_by_a_test_that_is_kept(kept):
    texts = [(HERE.parent / "README.md").read_text()]  # test_readme.py runs its examples
    for module in {item.module for item in kept}:
        names, text = {item.originalname for item in kept if item.module is module}, inspect.getsource(module)
        tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
        for name in tests.keys() - names:
            text = text.replace(inspect.getsource(tests[name]), "")
        texts.append(text)
    functions = [name for name in dj.__all__ if inspect.isfunction(getattr(dj, name))]
    assert not [name for name in functions if not re.search(rf"\b{name}\(", "".join(texts))]
