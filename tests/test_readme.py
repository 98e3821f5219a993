"""The README's examples run as printed."""

import pathlib
import re

import numpy as np

import dllm_jax as dj
from dllm_jax.decoding.request import prepare
from tests.checkpoints import tiny as small
from tests.checkpoints import write_hf
from tests.models import tiny

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_first_example_runs(capsys):
    namespace = {}
    exec(BLOCKS[0], namespace)
    out = namespace["out"]
    assert not np.any(np.asarray(out.tokens) == namespace["model"].spec.mask_id)
    assert capsys.readouterr().out.splitlines()[0] == "211"


def test_the_example_with_weights_runs_on_a_mesh(tmp_path):
    """With a tiny checkpoint, fewer devices and a shorter answer; its presets are prepared, not run."""
    block = next(block for block in BLOCKS if "make_mesh" in block)
    for old, new in {
        '"GSAI-ML/LLaDA-8B-Instruct"': repr(str(write_hf(tmp_path / "hf", small(mask_id=60, vocab=64)))),
        "(8,)": "(2,)",
        "length=256, block=32, steps=256": "length=4, block=2, steps=4",
        "dj.generate(model, prompt_ids, **": "prepare(model, prompt_ids, **",
    }.items():
        assert old in block, old
        block = block.replace(old, new)
    namespace = {"prepare": prepare}
    exec(block, namespace)
    assert namespace["out"].plan.layout.length == 3 + 256
    assert namespace["model"].dtype == np.dtype("bfloat16")


def test_every_page_with_an_example_is_run_by_a_test():
    """Blocks that no test runs say why in a comment: they configure the process, or need several."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for page in (ROOT / "docs").rglob("*.md"):
        if "```python" in page.read_text():
            assert f'"{page.name}"' in tests, f"no test reads {page.name}"


def test_a_policy_of_your_own_runs_and_is_exact_when_it_always_refreshes():
    namespace = {}
    exec(next(block for block in BLOCKS if "class Recent" in block), namespace)
    recent = namespace["Recent"]
    model = tiny("dream")
    prompt = np.arange(10)[None]
    run = lambda policy: dj.generate(model, prompt, length=8, block=4, policy=policy, trace=True)
    exact, always = run(dj.policies.Policy()), run(recent(refresh=1))
    np.testing.assert_array_equal(exact.trace.tokens, always.trace.tokens)
    assert run(recent()).stats.computed[0] < exact.stats.computed[0]


def test_every_policy_and_sampler_has_its_row():
    for policy in dj.policies.ALL:
        assert f"| `{type(policy).__name__}(" in TEXT
    kinds = [kind for kind in vars(dj.samplers).values() if isinstance(kind, type)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, dj.samplers.Sampler)} - {"Sampler"}
    assert {"Confidence", "Threshold"} < names
    for name in names:
        assert f"| `{name}(" in TEXT


def test_the_named_functions_exist():
    for name in ("load", "generate", "infill", "log_likelihood", "chat", "forward", "hidden_states"):
        assert callable(getattr(dj, name))
