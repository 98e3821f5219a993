"""The examples of the pages under docs/ run as printed, and those of policies obey the rules."""

import ast
import dataclasses
import doctest
import functools
import inspect
import io
import json
import re
import runpy
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from bench.pages import methods, pictures, sources, speed, tables
from bench.pages import policy as policy_pages
from dllm_jax import checkpoint, testing
from dllm_jax.options.hints import Renamed
from dllm_jax.testing import checks
from pallas_kernels import evidence
from tests import DOCS, examples, refuses, run_blocks, run_page
from tests.checkpoints import tiny as tiny_spec
from tests.checkpoints import weights, write_hf
from tests.models import FAMILIES
from tests.policy_cases import EXHAUSTIVE, matrix
from tests.test_prose import pages, sentences

TEXT = (DOCS / "reference/policy-interface.md").read_text()


@pytest.fixture(scope="module")
def printed() -> dict:
    return run_page("writing-a-policy.md")


LIMITS = {  # settings, those of the exact limit, and its layout; the page's own check has the third example
    "SlidingWindow": (dict(window=1), dict(window=8), dict(length=8, block=2, steps=4)),
    "ValueNorm": (dict(keep=3), dict(keep=3), dict(length=8, block=2, steps=4)),
}


@matrix("name, family", LIMITS, FAMILIES, today=[("SlidingWindow", "dream"), ("ValueNorm", "llada")])
def test_the_examples_are_exact_in_their_limits_and_their_sequences_as_alone(printed, name, family):
    (settings, limit, layout), policy = LIMITS[name], printed[name]
    asked = checks.exact_limit, checks.batch_mates_change_nothing, checks.alone_as_in_a_batch
    limits = dict(limit=policy(**limit), limit_options=layout)
    testing.check_policy(policy(**settings), **limits, families=(family,), checks=asked)


def test_the_printed_check_passes_and_the_default_layer_is_printed_in_full(printed, monkeypatch):
    if not EXHAUSTIVE:
        limit = functools.partial(testing.check_policy, checks=(checks.exact_limit,))
        monkeypatch.setitem(printed, "check_policy", limit)
    printed["test_windowed_dual_cache"]()
    assert printed["ours"].stats.computed_tokens[0] < printed["exact"].stats.computed_tokens[0] / 2
    assert not np.any(np.asarray(printed["ours"].tokens) == printed["model"].spec.mask_id)
    source = inspect.getsource(dj.policies.Policy.layer)
    (ours,) = ast.parse(textwrap.dedent(source)).body
    parts = (part for block in examples("writing-a-policy.md") for part in ast.parse(block).body)
    (theirs,) = (part for part in parts if getattr(part, "name", None) == "layer")
    assert list(map(ast.dump, ours.body[1:])) == list(map(ast.dump, theirs.body))


def test_the_samplers_of_the_page_decode_as_it_says_and_pass_its_check(monkeypatch, capsys):
    printed = run_page("writing-a-sampler.md")
    assert int(capsys.readouterr().out.splitlines()[0].strip("[]")) < 32
    assert printed["out"].stats.nfe.tolist() == [8]
    assert printed["out"].stats.idle.tolist() == [0]
    said = np.asarray(printed["never"].tokens)[0, -9:]
    assert np.all(said[1:] != said[:-1])
    assert printed["model"].spec.mask_id not in said
    assert 1 < printed["settled"].stats.nfe[0] < 32
    if not EXHAUSTIVE:
        asked = functools.partial(testing.check_sampler, checks=(checks.only_scored_masks_are_decoded,))
        monkeypatch.setitem(printed, "check_sampler", asked)
    printed["test_close"]()


def test_the_printed_policy_skips_its_layers_in_partial_steps_alone():
    printed = run_page("reference/policy-interface.md")
    policy, skipped = printed["SkipLayers"], printed["skipped"]
    steps, layers = 32 - 2, printed["model"].spec.layers  # two are full
    assert skipped.stats.widened_tokens[0] == -steps * 16 / layers
    limit = dict(limit=policy(), limit_options=dict(length=8, block=2, steps=4))
    testing.check_policy(policy(1, 2), **limit, checks=(checks.exact_limit,))
    with pytest.raises(ValueError, match="SkipLayers does not support models with blocks"):
        dj.generate(testing.tiny("sdar"), [[1, 2]], length=4, policy=policy())


def test_links_and_pictures_lead_somewhere_in_a_clone():
    """The site is built with --strict; on GitHub there are no pages or pictures that it makes."""
    root, broken = DOCS.parent, []
    pages = (
        *root.glob("*.md"),
        *DOCS.rglob("*.md"),
        *root.glob("bench/**/*.md"),
        *root.glob("examples/*.ipynb"),
    )
    for page in pages:
        prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        targets = re.findall(r"\]\((?![a-z]+:)([^)#\s]+)", prose)
        broken += [f"{page.name}: {target}" for target in targets if not (page.parent / target).exists()]
    assert broken == []


def test_every_member_of_a_policy_and_of_the_canvas_is_described():
    members = {name for name in vars(dj.policies.Policy) if not name.startswith("_")}
    members -= {"reuses", "stores", "only_sets", "readable", "promises"}
    assert "scored" in members
    for name in members:
        assert f"| `{name}` |" in TEXT
    fields = {field.name for field in dataclasses.fields(dj.state.Canvas)}
    renamed = {name for name, value in vars(dj.state.Canvas).items() if isinstance(value, Renamed)}
    for name in fields | {name for name in vars(dj.state.Canvas) if not name.startswith("_")} - renamed:
        assert re.search(rf"`{name}(\(.*?\))?`", TEXT), name


def test_the_examples_of_background_pages_run(capsys):
    """Bucket lengths, whose padding is not returned; published settings."""
    exec(examples("how-to/many-prompts.md")[0], {})
    exec(examples("how-to/evaluation.md")[0], {})
    *ladder, preset, listing = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in ladder[:2]] == ["16", "24"]
    assert ladder[2:] == [str((1, prompt + 4)) for prompt in (9, 21)]
    assert preset.startswith("SparseDLLM(")
    assert "sparse-dllm/llada-8b-instruct/gpqa" in listing


def test_the_journal_of_the_page_resumes(tmp_path, monkeypatch, capsys):
    """Every question has an answer of its own, and the second run asks nothing."""
    monkeypatch.chdir(tmp_path)
    names, blocks = {}, examples("how-to/many-prompts.md")
    run_blocks([blocks[0], blocks[2], blocks[2]], names=names)
    first, again = capsys.readouterr().out.splitlines()[-2:]
    assert first == again
    assert len(eval(first)) == len(names["questions"])
    assert names["left"] == []


def test_costs_of_a_model_are_printed_as_the_page_says(capsys):
    """And the example of the package's docstring runs."""
    exec(examples("background/performance.md")[0], {})
    assert f"```text\n{capsys.readouterr().out}```" in (DOCS / "background/performance.md").read_text()
    exec("\n".join(re.findall(r"^ {4}(\S.*)$", dj.roofline.__doc__, re.MULTILINE)), {})
    assert capsys.readouterr().out.endswith(" True\n")


def test_the_examples_of_watching_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = run_page("how-to/watching.md")
    streamed, out = namespace["out"], namespace["runs"]["DualCache()"]
    np.testing.assert_array_equal(streamed.trace.tokens, out.trace.tokens)
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "4 1 211<|eot_id|>"
    assert lines[-1].split() == ["4", "2", "1", "1", "∎"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "answer.html",
        "policies.gif",
        "policies.html",
    ]


def test_a_family_from_outside_reads_and_writes_checkpoints(tmp_path, monkeypatch):
    path = DOCS.parent / "tests" / "goldens" / "models" / "a2d-qwen3-tiny"
    monkeypatch.chdir(tmp_path)
    found = run_page("adding-a-family.md", names={"PATH": path})
    model, mine = found["model"], found["mine"]
    assert weights(tmp_path / "back") == weights(path)
    assert dj.load(tmp_path / "converted", family=mine).spec == model.spec
    dj.save_hf(model.replace_spec(mask_id=7), "saved", family=mine)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["mask_token_id"] == 7
    for of, given, message in (
        ("converted", None, "family='my-a2d' is not one of .*pass the family that the model was read with"),
        ("converted", checkpoint.FAMILIES["sdar"], "family='sdar' must be the model's own, 'my-a2d'"),
        ("back", checkpoint.FAMILIES["dream"], "model_type='a2d-qwen3' is not supported; supported: .Dream"),
        ("back", "sdar", "family='sdar' must be a Family, such as"),
    ):
        refuses(message, dj.load, of, family=given)
    refuses("pass the family that the model was read with", dj.save_hf, model, "more")
    again = dataclasses.replace(mine, name="sdar")
    refuses("family='sdar' must have a name of its own", dj.load, path, family=again)
    rows = re.findall(r"^\| (.*`.*)", (DOCS / "adding-a-family.md").read_text(), re.MULTILINE)[1:]
    named = set(re.findall(r"`([a-z_]+)`", " ".join(rows)))
    assert {"adjusted", "template"} <= named <= {field.name for field in dataclasses.fields(type(mine))}


@pytest.mark.parametrize("page", ["models.md", "how-to/loading.md", "how-to/generating.md"])
def test_pages_on_a_bundled_model_run_as_printed(page, tmp_path, monkeypatch, capsys):
    """Without the block that test_constraints.py runs; test_readme.py runs those of index.md."""
    monkeypatch.chdir(tmp_path)
    run_blocks([block for block in examples(page) if "Regex.of" not in block])
    if page == "how-to/generating.md":
        answers, grown, *_ = capsys.readouterr().out.splitlines()
        assert answers == "['211', '105', '211', '105']"
        assert grown.startswith("[34] P>L;L>G;G>M;")
        assert f"It prints `{answers}`" in (DOCS / page).read_text()


def test_no_table_of_a_page_is_stale():
    """Else run `python -m bench.pages`."""
    assert [page.name for page in tables.stale()] == []


def numbered() -> dict[str, str]:
    """Texts whose numbers need a source: README, docs and the top of the changelog."""
    root = DOCS.parent
    found = {page.relative_to(root).as_posix(): page.read_text() for page in tables.pages()}
    del found["docs/dev/compiled.md"]  # tests/test_compiled.py compares its rows with their files
    top = re.split(r"^## ", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    return found | {"CHANGELOG.md": top}


def test_every_number_of_a_page_has_a_source():
    """Or is a version, a date, an arXiv id, a place in a publication, an item, or a setting of an example."""
    assert (
        len(sources.bare("It takes 3.5 s, 7 % of all; of 32 tokens 12% in 2026, 4.5<!-- code: 4.5 -->x")) == 3
    )
    found = {page: numbers for page, text in numbered().items() if (numbers := sources.bare(text))}
    assert found == {}
    for page, text in numbered().items():  # and no source has lost its number
        given = re.findall(r"<!-- (?:\S+\.json|code|paper): |<!-- tests/", text)
        assert len(given) == len(list(sources.sources(text))), page


def test_sources_that_are_tests_hold_their_number():
    for page, text in numbered().items():
        for one in sources.sources(text):
            if one.kind.startswith("tests/"):
                assert one.number in source_of(one.kind, one.text), (page, one)


def source_of(file: str, name: str) -> str:
    """The text of a test.

    Raises:
      LookupError: there is no such test, or every run skips it.
    """
    text = (DOCS.parent / file).read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            if not any(re.match(r"pytest\.mark\.skip\(", mark) for mark in marks):
                return ast.get_source_segment(text, node) or ""
    raise LookupError(f"{file}::{name} is no test that runs")


def test_guarantees_name_tests_that_run():
    never = (DOCS.parent / ".ci/never_run.txt").read_text()
    named = [
        found
        for page in ("guarantees.md", "design.md")
        for found in re.findall(r"`(test_\w+\.py)::(test_\w+)`", (DOCS / "dev" / page).read_text())
    ]
    assert len(named) > 70
    for file, name in named:
        assert source_of(f"tests/{file}", name)
        assert f"tests.{file.removesuffix('.py')}::{name}  " not in never
    with pytest.raises(LookupError, match="is no test"):
        source_of("tests/test_docs.py", "test_that_is_not_there")


def test_kernels_that_are_said_to_be_right_on_a_gpu_were_compared_there():
    """And numbers of evidence for a kernel stand on the page that it names."""
    page = (DOCS / "dev/compiled.md").read_text()
    said = re.findall(r"^\| `(\w+)`[^|]*\| right on an H100 ", page, re.MULTILINE)
    quick = json.loads((sources.RESULTS / "check_h100_quick.json").read_text())
    compared = {one["data"]["operation"] for one in quick["parts"]["operations"]}
    parts = {"attention_and_lse": "attention", "merge": "attention"}  # what its kernels give and are made of
    assert len(said) > 4
    assert {parts.get(name, name) for name in said} <= compared
    for entry in evidence.SHIPPED:
        name, _, claim = entry.report.partition(": ")
        if name.endswith(".md"):
            stands = set(re.findall(r"\d+", re.sub("<!--.*?-->", "", (DOCS.parent / name).read_text())))
            assert set(re.findall(r"\b\d+", claim)) <= stands, entry.report


def test_the_way_in_names_what_its_files_hold():
    text = (DOCS / "dev/way-in.md").read_text()
    steps = re.findall(r"= (?:\w+\.)?(\w+)\(.*\).* # ([\w/]+\.py)", text)
    named = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", text)
    assert len(steps) > 6
    assert named
    for name, file in [*steps, *((n, file) for file, names in named for n in re.findall(r"\w+", names))]:
        code = (DOCS.parent / "dllm_jax" / file).read_text()
        assert re.search(rf"^ *(def|class) {name}\b", code, re.MULTILINE), (name, file)


def test_results_say_version_commit_device_and_date_and_are_read():
    """By a page, a test, the code or a note, other than the list of benches."""
    root = DOCS.parent
    folders = "README.md", "docs/**/*.md", "tests/*.py", "tests/data/*.json", "bench/**/*.py", "examples/*.py"
    text = "".join(path.read_text() for folder in folders for path in root.glob(folder))
    read = set(re.findall(r'\w+\.json|"\w+"', text))
    files = sorted(sources.RESULTS.glob("*.json"))
    assert len(files) <= 55
    for file in files:
        document = json.loads(file.read_text())
        assert {"dllm_jax", "commit", "device", "date"} <= document.keys(), file.name
        names = {file.name, f'"{file.stem}"', f'"{file.stem.removeprefix("compiled_")}"'}
        assert names & read, f"nothing reads {file.name}"
    for part in "\n\n".join(page.read_text() for page in DOCS.rglob("*.md")).split("\n\n"):
        found = "".join(
            (sources.RESULTS / name).read_text() for name in re.findall(r"results/(\w+\.json)", part)
        )
        for day in re.findall(r"(\d+) November", part) if found else ():
            assert f"2026-11-{int(day):02}" in found, part


def test_numbers_next_to_a_link_to_data_are_from_these_data():
    linked = 0
    for page, text in numbered().items():
        for part in re.split(r"\n(?=\s*\n|- )", sources.MADE.sub("", text)):
            links = set(re.findall(r"\]\(\S*bench/results/(\w+\.json)\)", part))
            files = {one.kind for one in sources.sources(part) if one.kind.endswith(".json")}
            assert not links or files <= links, (page, files - links)
            linked += bool(links & files)
    assert linked > 10


def test_sentences_with_old_numbers_name_the_version():
    """In their section, which names no version that its files lack; under made tables stands what is old."""
    for page, text in numbered().items():
        for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
            files = {one.kind for one in sources.sources(section) if one.kind.endswith(".json")}
            read = [(sources.RESULTS / file).read_text() for file in files]
            made = {json.loads(file)["dllm_jax"] for file in read}
            named = set(re.findall(r"[Vv]ersion (\d+\.\d+\.\d+)", section))
            assert {one for one in made if sources.age(one) >= sources.OLD} <= named, (page, files)
            assert not files or all(f'"{version}"' in "".join(read) for version in named), (page, files)


def test_sentences_name_the_card_that_their_numbers_are_of():
    card = 'roofline.HARDWARE["h100"].flops'
    assert sources.foreign(f"It takes 9<!-- code: {card} --> tokens.")
    assert sources.foreign("On an H100 it is 1.1<!-- generate_h200.json: row() --> s.")
    assert not sources.foreign(
        f"On an H100 9<!-- code: {card} -->, in all. It is 1.1<!-- generate_h200.json: x -->."
    )
    assert {page: wrong for page, text in numbered().items() if (wrong := sources.foreign(text))} == {}


def results() -> list[tuple[str, str, str]]:
    """Platform, policy and date of every row in bench/results that holds seconds."""
    found = []
    for path in speed.RESULTS.glob("*.json"):
        document = json.loads(path.read_text())
        rows = document.get("rows", []) if isinstance(document, dict) else []
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict) and {"seconds", "ms", "partial_ms", "whole_ms"} & row.keys():
                date = row.get("date", document.get("date", ""))
                found.append((document.get("platform", ""), str(row.get("policy", "")).split("(")[0], date))
    return found


def denied(sentence: str, measured: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Measurements that a sentence denies: of a platform, of a policy on GPUs, or since a date."""
    sentence = re.sub(r"(dash|`-`): not measured", "", sentence)  # legends of tables
    if not re.search(r"\bnot (been )?(measured|timed|run)|Nothing (was timed|has run)", sentence):
        return []
    platforms = {"gpu": r"GPU|H100|H200", "tpu": "TPU"}
    asked = {name for name, word in platforms.items() if re.search(word, sentence)}
    policies = set(re.findall(r"`(\w+)[`(]", sentence)) & {policy for _, policy, _ in measured}
    if "again" in sentence:
        return [one for one in measured if one[1] in policies and one[0] == "gpu" and one[2] > LAST]
    return [one for one in measured if (one[1] in policies and one[0] == "gpu") or one[0] in asked]


LAST = "2026-11-28"  # until then `MAGE` and others were measured; pages say "not measured again" since


def test_no_page_denies_what_was_measured():
    measured = results()
    assert ("gpu", "MAGE", "2026-11-27T19:31:11+00:00") in measured
    assert not [one for one in measured if one[0] == "tpu"]
    assert denied("`DualCache` is not measured.", measured)
    assert denied("Speed on GPUs and TPUs is predicted, not measured.", measured)
    assert not denied("Nothing has run on a TPU.", measured)
    for page in pages():
        for sentence in sentences(page.read_text().replace("`", "\x00")):
            assert denied(sentence.replace("\x00", "`"), measured) == [], f"{page.name}: {sentence}"


def test_the_caches_of_a_canvas_are_those_that_work_with_its_model():
    page = (DOCS / "reference/diffusion-gemma.md").read_text().partition("## Caches inside of a canvas")[2]
    rows = re.findall(r"^\| (`.*?) \|", page.partition("\n\nIn `ESDLLM`")[0], flags=re.MULTILINE)
    works = re.findall(
        r"^\| `(\w+)` \| (?:.*, )?DiffusionGemma(?:,.*?)? \|",
        (DOCS / "compatibility.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(re.findall(r"`(\w+)\(", " ".join(rows))) == sorted(works)


def test_every_old_address_leads_to_a_page_and_heading_of_today():
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    made = {
        f"policies/{name}/": methods.page_of_method(name, methods.methods()[name]) for name in methods.SHARED
    }
    for old, new in hooks["MOVED"].items():
        page, _, anchor = new.partition("#")
        files = [DOCS / f"{page.rstrip('/')}.md", DOCS / page / "index.md"]
        (text,) = [file.read_text() for file in files if file.exists()] or [made[page]]
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") for heading in headings}
        assert not anchor or anchor in anchors, new
        assert not (DOCS / f"{old}.md").exists()


@pytest.mark.parametrize(("page", "row"), [
    ("background/results.md", "| `EvictPrompt(budget=16)` | 100% | 0% (64) | 0% (64) | 51% | 0% (64) |"),
    ("background/results.md", "| votes of the last masks over the first (MaskKV, Table 8) | 0 | 0 | 6 | 6 |"),
    ("background/performance.md", "| torch | Xeon | small | 128 | 1.27 | 1.71 | 1.60 |"),
    ("background/performance.md", "| H200 | `DualCache` | 165 | 30.7 | 5.3 | 1.55 |"),
    ("background/performance.md", "| H200 | `DualCache` | 1.11 | 1.4 | 20 | 16.9 |"),
    ("policies/index.md", "| 100%, 98% (46) | 100%, 100% (52) | 98%, 98% (99) | 39%, 36% (12) |"),
    ("how-to/vision.md", "| `EvictPrompt(budget=4)` | 51% | 6 | 98.4% (94-100) | 94.5% (89-97) |"),
])  # fmt: skip
def test_pages_have_the_tables_of_what_was_measured(page, row):
    assert row in (DOCS / page).read_text()


def test_the_site_has_a_page_for_every_policy_with_its_limit_and_options():
    chains = policy_pages.measured()["tiny-llada chain"]
    for policy in dj.policies.ALL:
        page = policy_pages.page_of(policy)
        assert re.search(r"^## When it equals exact decoding\n\n[A-Z`]", page, re.MULTILINE), policy
        for field in dataclasses.fields(policy):
            row = rf"^\| `{field.name}` \| [^|]+ \| [^|]+ \| `.+` \| .*\|$"
            assert re.search(row, page, re.MULTILINE), (policy, field.name)
        assert ("```bibtex" in page) == ("Paper: [" in page), f"docs/references.bib lacks a paper of {policy}"
        measured = page.partition("## Accuracy and cost")[2].partition("## Memory")[0]
        assert "| `DualCache()` |" in measured
        known = any(row["policy"].startswith(type(policy).__name__) for row in chains["rows"])
        assert (f"| `{type(policy).__name__}(" in measured) == known, policy
    for policy in dj.policies.BLOCK_CAUSAL:
        page = policy_pages.page_of(policy)
        assert "tiny-sdar" in page
        assert "The cache of SDAR-8B" in page
        measured = page.partition("## Accuracy and cost")[2].partition("## Memory")[0]
        named = f"| `{type(policy).__name__}(" in measured
        assert named != isinstance(policy, dj.policies.SubBlockCache), "which is not measured"
        assert ("```bibtex" in page) == ("Paper: [" in page), f"docs/references.bib lacks a paper of {policy}"
    assert "`dllm-cache-by-d2cache/llada-8b-base`" in policy_pages.page_of(dj.policies.DLLMCache())


def test_the_site_has_few_pages_and_each_policy_a_heading_on_one():
    """And a method's page cites its paper once."""
    found = methods.methods()
    assert sum(map(len, found.values())) == len(policy_pages.POLICIES)
    written = [page for page in pages() if page.name != "README.md"]
    assert len(written) + len(found) <= 46
    for name in methods.SHARED:
        text = methods.page_of_method(name, found[name])
        assert text.count("```bibtex") == text.count("\n## Cite\n") == 1
        for policy in found[name]:
            assert f"\n## {type(policy).__name__}\n" in text
            assert methods.address(type(policy).__name__) == f"{name}.md#{type(policy).__name__.lower()}"
    assert methods.address("D2Cache") == "D2Cache.md"


def test_pictures_show_what_each_layer_updates_and_retains():
    """Of dLLM-Cache a quarter of the response, all of it in the first layer; of MaskKV the budget."""
    run, layers = pictures.recording(dj.policies.DLLMCache())
    prompt, whole = run.to_fill[0], layers.whole
    refreshed = np.isin(np.arange(run.steps), (0, 4, 8, 12))
    assert np.all(whole[:, 0, prompt:])
    assert np.all(layers.updated[..., prompt:])
    assert np.all(np.sum(whole[:, 1:, prompt:], axis=2) == np.where(refreshed, 16, 16 * 0.25)[:, None])
    np.testing.assert_array_equal(np.flatnonzero(whole[:, 3, 0]), [0, 8])
    assert [name for name, *_ in pictures.merged(layers)] == ["layer 0", "layers 1 to 3"]
    _, layers = pictures.recording(dj.policies.MaskKV())
    partial = ~layers.whole[:, :, 0]
    assert np.sum(layers.attended[..., :prompt], axis=2)[partial].mean() == pytest.approx(8)
    assert np.ptp(layers.attended[1, :, :prompt], axis=0).max() > 0, "layers retain different pairs"


PUBLIC = [name for name in dj.__all__ if ">>>" in (inspect.getdoc(getattr(dj, name)) or "")]
PUBLIC.remove("EMBEDS_PLACEHOLDER")  # has the docstring of int


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_in_docstrings_print_what_they_say(name):
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(dj, name), name, globs={"dj": dj})
    report = io.StringIO()
    ran = doctest.DocTestRunner().run(found, out=report.write)
    assert ran.attempted >= 2
    assert ran.failed == 0, report.getvalue()


def test_the_examples_of_fine_tuning_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    ids = lambda *shape: jnp.asarray(rng.integers(1, 20, shape), jnp.int32)
    path = write_hf(tmp_path / "hf", tiny_spec())
    words = {'"GSAI-ML/LLaDA-8B-Base"': repr(str(path)), "=1000": "=4", "steps=20": "steps=2"}
    words |= {'dj.load("GSAI-ML/LLaDA-8B-Instruct")': f"dj.load({str(path)!r})"}
    names = {"prompts": ids(4, 2, 6), "answers": ids(4, 2, 4), "prompt": ids(2, 6), "answer": ids(2, 4)}
    namespace = run_page("how-to/training.md", words, names)
    assert (tmp_path / "runs" / "a").is_dir()
    assert namespace["run"].log[-1]["step"] == 4
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert namespace["policy"].shape == namespace["counted"].shape == (2, 4)


def test_the_example_of_llada_runs(tmp_path, capsys):
    """With a tiny checkpoint in the place of LLaDA-8B."""
    path = write_hf(tmp_path / "hf", tiny_spec(mask_id=60, vocab=64), tokenizer=True)
    words = {'"GSAI-ML/LLaDA-8B-Instruct"': repr(str(path)), "=256": "=4"}
    assert isinstance(
        run_blocks([b for b in examples("quickstart.md") if "GSAI-ML" in b], words)["answer"], str
    )


def test_the_example_of_several_devices_runs(tmp_path):
    path = write_hf(tmp_path / "hf", tiny_spec(mask_id=60))
    words = {'"GSAI-ML/LLaDA-8B-Instruct"': repr(str(path)), "=256": "=4", "=32": "=2"}
    names = {"prompts": np.arange(12).reshape(4, 3)}
    namespace = run_blocks(examples("how-to/scaling.md")[:1], words, names)
    assert namespace["out"].tokens.sharding.spec[0] == "dp"
