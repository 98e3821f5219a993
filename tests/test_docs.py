"""The examples of the pages under docs/ run as printed, and those of policies obey the rules."""

import ast
import dataclasses
import inspect
import json
import pathlib
import re
import runpy
import textwrap
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.testing.checks import SEVERAL_AT_ONCE
from dllm_jax.testing.runs import assert_same_run, finite, of_sequence, partial_steps
from tests.checkpoints import tiny as tiny_spec
from tests.checkpoints import write_hf
from tests.models import FAMILIES, prompts, tiny

DOCS = pathlib.Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "writing-a-policy.md").read_text()


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


LIMITS = {
    "WindowedDualCache": (dict(window=3), dict(refresh_every=1), dict(block=4)),
    "SlidingWindow": (dict(window=1), dict(window=8), dict(block=2, steps=4)),
    "ValueNorm": (dict(keep=3), dict(keep=3), dict(block=2, steps=4)),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LIMITS)
def test_the_examples_are_exact_in_their_limits(printed, name, family):
    """And not outside of them."""
    (settings, limit, layout), model, policy = LIMITS[name], tiny(family), printed[name]
    prompt, mask = prompts(model, (9, 5))
    run = lambda policy, **layout: dj.generate(
        model, prompt, prompt_mask=mask, length=8, policy=policy, trace=True, **layout
    )
    assert_same_run(run(policy(**limit), **layout).trace, run(dj.policies.Policy(), **layout).trace)
    ours, exact = run(policy(**settings), block=4), run(dj.policies.Policy(), block=4)
    assert np.abs(finite(ours.trace.score) - finite(exact.trace.score)).max() > 1e-4


@pytest.mark.diagonal
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LIMITS)
def test_sequences_of_a_batch_equal_them_alone_in_the_examples(printed, name, family):
    model, policy = tiny(family), printed[name](**LIMITS[name][0])
    prompt, mask = prompts(model, (9, 5))
    options = dict(length=8, block=4, policy=policy, sampler=SEVERAL_AT_ONCE, trace=True)
    batch = dj.generate(model, prompt, prompt_mask=mask, **options)
    assert partial_steps(batch)
    for row, width in enumerate(mask.sum(axis=1)):
        alone = dj.generate(model, prompt[row : row + 1, -width:], **options)
        assert_same_run(of_sequence(batch.trace, row, width + 8), alone.trace, computed=True)


def test_the_default_layer_is_printed_in_full():
    source = inspect.getsource(dj.policies.Policy.layer)
    (ours,) = ast.parse(textwrap.dedent(source)).body
    printed = (part for block in examples(TEXT) for part in ast.parse(block).body)
    (theirs,) = (part for part in printed if getattr(part, "name", None) == "layer")
    assert list(map(ast.dump, ours.body[1:])) == list(map(ast.dump, theirs.body))


def test_the_printed_check_passes(printed):
    printed["test_windowed_dual_cache"]()


def test_an_eviction_that_keeps_everything_is_dual_cache(printed):
    model = tiny("llada")
    prompt, mask = prompts(model, (9, 5))
    run = lambda policy: dj.generate(
        model, prompt, prompt_mask=mask, length=8, block=4, policy=policy, trace=True
    )
    assert_same_run(run(printed["ValueNorm"](keep=99)).trace, run(dj.policies.DualCache()).trace)


def test_every_member_of_a_policy_and_of_the_canvas_is_described():
    members = {name for name in vars(dj.policies.Policy) if not name.startswith("_")} - {
        "reuses",
        "only_sets",
        "readable",
    }
    assert "scored" in members
    for name in members:
        assert f"| `{name}` |" in TEXT
    fields = {field.name for field in dataclasses.fields(dj.state.Canvas)}
    for name in fields | {name for name in vars(dj.state.Canvas) if not name.startswith("_")}:
        assert re.search(rf"`{name}(\(.*?\))?`", TEXT), name


def test_the_example_of_an_abstract_model_runs(capsys):
    exec(examples((DOCS / "background" / "compiled.md").read_text())[0], {})
    assert capsys.readouterr().out.startswith("Model(llada, 8,015,581,184 parameters, bfloat16)")


def test_the_example_of_the_ladder_runs_and_returns_no_padding(capsys):
    exec(examples((DOCS / "background" / "performance.md").read_text())[0], {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["16", "24"]
    assert lines[2:] == [str((1, prompt + 4)) for prompt in (9, 21)]


def test_the_examples_of_watching_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in examples((DOCS / "how-to" / "watching.md").read_text()):
        exec(block, namespace)
    streamed, out = namespace["out"], namespace["runs"]["DualCache()"]
    np.testing.assert_array_equal(streamed.trace.tokens, out.trace.tokens)
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "4 1 211<|eot_id|>"
    assert lines[-1].split() == ["4", "2", "1", "1", "∎"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["answer.html", "policies.html"]


def test_the_example_of_the_published_settings_runs(capsys):
    exec(examples((DOCS / "policies" / "published-settings.md").read_text())[0], {})
    preset, listing = capsys.readouterr().out.splitlines()
    assert preset.startswith("SparseDLLM(")
    assert "sparse-dllm/llada-8b-instruct/gpqa" in listing


@pytest.mark.parametrize("page", ["index.md", "loading.md", "generating.md", "likelihoods.md"])
def test_pages_on_an_embedded_model_run_as_printed(page, tmp_path, monkeypatch):
    """Top to bottom, as a reader does."""
    monkeypatch.chdir(tmp_path)
    (file,) = (path for path in DOCS.rglob(page) if path.parent.name in ("docs", "how-to"))
    namespace: dict = {}
    for block in examples(file.read_text()):
        exec(block, namespace)


def test_the_site_has_every_setting_that_was_measured():
    written = runpy.run_path(str(DOCS / "hooks.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="background/benchmarks.md"))
    shown = written((DOCS / page.file.src_uri).read_text(), page, SimpleNamespace(repo_url=""), None)
    measured = json.loads((DOCS.parent / "bench" / "results" / "policies_cpu.json").read_text())["models"]
    assert shown.count("\n| `") == sum(len(workload["rows"]) for workload in measured.values())


def test_the_site_has_a_page_for_every_policy_with_its_limit_and_fields():
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    for policy in dj.policies.ALL:
        page = hooks["page_of"](policy)
        assert re.search(r"^Exact limit: \S", page, re.MULTILINE), policy
        for field in dataclasses.fields(policy):
            assert re.search(rf"^\| `{field.name}` \| [^|]+ \| `.+` \|$", page, re.MULTILINE), field
    assert "`dllm-cache-by-d2cache/llada-8b-base`" in hooks["page_of"](dj.policies.DLLMCache())


def as_printed(page: str, **changes: str) -> list[str]:
    """The examples of a page with a small model, and other words of them replaced; each must be there."""
    blocks = examples((DOCS / "how-to" / page).read_text())
    text = "\x00".join(blocks)
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text.split("\x00")


def test_the_example_of_training_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    prompts, answers = (jnp.asarray(rng.integers(1, 20, (4, 2, width)), jnp.int32) for width in (6, 4))
    path = write_hf(tmp_path / "hf", tiny_spec())
    (block,) = as_printed("training.md", **{'"GSAI-ML/LLaDA-8B-Base"': repr(str(path)), "=1000": "=4"})
    namespace = {"prompts": prompts, "answers": answers}
    exec(block, namespace)
    assert (tmp_path / "runs" / "a").is_dir()
    assert namespace["run"].model.dtype == jnp.bfloat16
    assert namespace["run"].log[-1]["step"] == 4


def test_the_example_of_several_devices_runs(tmp_path):
    path = write_hf(tmp_path / "hf", tiny_spec(mask_id=60))
    changes = {
        '"GSAI-ML/LLaDA-8B-Instruct"': repr(str(path)),
        "length=256": "length=4",
        "block=32": "block=2",
    }
    block, _ = as_printed("scaling.md", **changes)
    namespace = {"prompts": np.arange(12).reshape(4, 3)}
    exec(block, namespace)
    assert namespace["out"].tokens.sharding.spec[0] == "dp"
