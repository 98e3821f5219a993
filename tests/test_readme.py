"""The README's examples run as printed."""

import json
import pathlib
import re

import numpy as np

import dllm_jax as dj
from bench.pages import checkpoints
from dllm_jax.demo import trains
from tests import examples, run_blocks
from tests.checkpoints import tiny as small
from tests.checkpoints import write_hf
from tests.models import tiny
from tests.test_prose import without_tables

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_eight_lines_print_what_the_text_says(capsys):
    """And their question and answer are the demonstration's, which the picture at the head shows."""
    lines = [line for line in BLOCKS[0].splitlines() if line]
    assert len(lines) <= 8
    exec(BLOCKS[0], {})
    assert f'"{trains.QUESTION}"' in BLOCKS[0]
    assert capsys.readouterr().out.strip() == trains.ANSWER
    assert f"`{trains.ANSWER}`: {', '.join(trains.STOPS[1:8])}." in TEXT


def test_home_page_quickstart_and_notebook_begin_with_the_same_example():
    found = [examples(page)[0] for page in ("index.md", "quickstart.md")]
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    found += ["".join(cell["source"]) + "\n" for cell in cells if "chat(" in "".join(cell["source"])][:1]
    assert found == BLOCKS[:1] * 3
    assert f"It prints `{trains.ANSWER}`" in (ROOT / "docs" / "quickstart.md").read_text()


def test_the_example_with_a_checkpoint_runs(tmp_path):
    """With tiny weights in its place, and for a shorter answer."""
    path = write_hf(tmp_path / "hf", small(mask_id=60, vocab=64), tokenizer=True)
    words = {'"dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1"': repr(str(path)), "64, block=32": "8, block=4"}
    namespace = run_blocks([b for b in BLOCKS if "dllm-hub" in b], words, {})
    assert isinstance(namespace["answer"], str)


def test_ci_runs_the_two_commands():
    """Setting up with an answer, and the tests, each a line of its own with minutes."""
    block = re.search(r"## Installation\n.*?```bash\n(.*?)```", TEXT, re.DOTALL)
    lines = [re.split(" +# ", line) for line in (block[1] if block else "").splitlines()[1:]]
    assert [command for command, _ in lines] == ['pip install -e ".[test]" && dllm-jax', "pytest"]
    assert all("minutes" in comment for _, comment in lines)
    ran = (ROOT / ".ci/run").read_text()
    for part in ("command_of 'pip install -e \"'", "command_of pytest", 'eval "$setup"', "$tests --full"):
        assert part in ran


def test_every_page_with_an_example_is_run_by_a_test():
    """Blocks that no test runs say why in a comment: they configure the process, or need several."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for page in (ROOT / "docs").rglob("*.md"):
        if "```python" in page.read_text():
            assert f'{page.name}"' in tests, f"no test reads {page.name}"


def test_a_policy_of_your_own_runs_and_is_exact_when_it_always_refreshes():
    recent = run_blocks([block for block in BLOCKS if "class Recent" in block])["Recent"]
    model = tiny("dream")
    prompt = np.arange(10)[None]
    run = lambda policy: dj.generate(model, prompt, length=8, block=4, policy=policy, trace=True)
    exact, always = run(dj.policies.Policy()), run(recent(refresh=1))
    np.testing.assert_array_equal(exact.trace.tokens, always.trace.tokens)
    assert run(recent()).stats.computed_tokens[0] < exact.stats.computed_tokens[0]


def test_every_policy_and_sampler_is_named():
    for policy in dj.policies.ALL:
        assert f"| `{type(policy).__name__}()` |" in TEXT
    kinds = [kind for kind in vars(dj.samplers).values() if isinstance(kind, type)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, dj.samplers.Sampler)} - {"Sampler"}
    assert {"Confidence", "Threshold"} < names
    for name in names - {"UntilDone", "GrowingAnswers"}:  # bases of others
        assert f"`{name}`" in TEXT


def test_every_family_that_was_recorded_is_named():
    plain = lambda text: re.sub(r"[-_ ]", "", text.lower())
    named = plain(TEXT.split("## Supported models")[1].split("\n## ")[0])
    families = [what for _, what in checkpoints.READ if "recorded[" in what]
    names = [re.match(r"loads as ([^;,]+)", what)[1] for what in families]
    assert len(names) > 10
    assert [name for name in names if plain(name) not in named] == []


def test_it_is_short_and_links_to_files_that_exist():
    assert len(without_tables(TEXT).split()) <= 850
    counted = re.sub(r"<!--.*?-->", "", TEXT, flags=re.DOTALL).split()
    assert sum(bool(re.search("[A-Za-z]", word)) for word in counted) <= 1200
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing
    assert (ROOT / "docs/figures/side-by-side.gif").stat().st_size < 500_000
