"""What the site says without pages written by hand: policies, drawn from a run; links to the repository.

`mkdocs build` calls these; the pages are made of docstrings, annotations and published settings when it does.
"""

import dataclasses
import functools
import importlib
import inspect
import posixpath
import re
import sys
import textwrap
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:  # a test reads the pages where mkdocs is not at hand
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import dllm_jax as dj  # noqa: E402
from bench import peer_bonsai  # noqa: E402
from bench.policies import every, grid, orderings, summary  # noqa: E402
from dllm_jax.decoding.watch.recording import Recording  # noqa: E402
from dllm_jax.eval.run.files import read_json  # noqa: E402
from dllm_jax.options import hints  # noqa: E402
from dllm_jax.options.rules import rule_of  # noqa: E402
from dllm_jax.published.expressions import call  # noqa: E402

POLICIES = (*dj.policies.ALL, *dj.policies.BLOCK_CAUSAL)
PAPER = r"arXiv:(\d{4}\.\d{5})"
CELL = 9  # of a picture, in pixels
COMPUTED, STALEST = "#3f6fd1", 16  # steps of age from which on colours do not change
# For a short canvas, where the defaults of papers would never come to a refresh or drop anything.
DRAWN = {
    "DLLMCache": dict(prompt_every=8, response_every=4),
    "SPACache": dict(prompt_every=8, response_every=4),
    "MaskKV": dict(prompt_every=8, response_every=4, budget=8),
    "EvictPrompt": dict(budget=8),
    "ElasticCache": dict(window=4),
    "D2Cache": dict(k=4),
    "SlidingCache": dict(window=2),
    "SuffixDropout": dict(keep=dj.policies.NearAndLast(near=2, last=1)),
    "WindowDiffusion": dict(window=6, active=2, refresh_every=5),
    "MAGE": dict(keep=4),
}
EXAMPLE = """\
import dllm_jax as dj

model = dj.load(dj.bundled.path("{model}"))
policy = {policy}
prompt = [list(range(40, 60))]
options = dict(length=16, block=8, policy=policy{sampler})
out = dj.generate(model, prompt, trace=True, **options)
"""
RANDOM = ", sampler=dj.samplers.RandomOrder(), key=jax.random.key(0)"  # of the one policy that needs it
RESPONSE = 16  # of the example
PAGE = """\
# {name}

{description}

Paper: {paper}. Source: [`{module}`](../../{module}).

## Example

```python
{example}print(out.tokens, out.stats.nfe)
```

## Options

{fields}

## What a run looks like

![computed and cached tokens by step](../figures/steps-{name}.svg)

*The example above. Columns are positions, with the response after the line; rows are steps. Blue: recomputed.
Yellow to red: reused KV pairs, redder with age. Blank: not attended to. A dot: unmasked.{besides}*

## Accuracy and cost

{measured}

*Exact match on 128 held-out chain questions: 32 tokens, block length 4 unless stated otherwise. computed:
computed tokens relative to exact decoding. K/V pairs: cached per layer and head, on `tiny-llada`. CPU,
float32. [All results](../background/results.md).*

## Memory

The cache of {large} takes {cache} in bfloat16 for one sequence (prompt 1024, response 256, block 32, default
options); a dense KV cache takes {dense}. {memory}

## Limits

{limits}

## When it equals exact decoding

{exact}

## Differences from the reference implementation

{differences}

## Published settings

{settings}

## Signature

::: {package}.{name}
    options:
      members: false
      show_root_heading: false
      show_root_toc_entry: false
      show_docstring_description: false
      show_docstring_attributes: false
"""
IN_BLOCKS = "policies_block_causal_cpu"  # measured on models that attend within blocks
OF_BLOCKS = """\
## Accuracy and cost

{measured}

*Exact match of `tiny-sdar` (then `tiny-sdar-moe`) on 64 held-out questions, block length 4; in brackets the
KV pairs per layer and head that a later step attends to, on average. computed: computed tokens relative to
exact decoding. CPU, float32. [All policies](index.md#long-prompts-on-block-causal-models).*

"""
EVERY_SETTING = "<!-- every setting -->"
BESIDES = " Tokens that single layers skip or evict are not drawn."
LABELS = {  # paragraphs of docstrings
    "exact": "Equals exact decoding when",
    "differences": "Differences",
    "memory": "Memory",
    "limits": "Limits",
    "attributes": "Attributes",
}
TABLES = {  # as in `<!-- table: policies -->`
    "policies": lambda: summary.table(measured(), dj.bundled.TEXT),
    "fewer steps": lambda: summary.fewer_steps(measured(), dj.bundled.TEXT),
    "later": lambda: summary.later(measured(), dj.bundled.TEXT),
    "blocks": lambda: summary.in_blocks(measured() | measured("policies_blocks_cpu"), dj.bundled.TEXT),
    "claims": lambda: orderings.short(measured()),
    "other implementations": peer_bonsai.table,
    "block-causal": lambda: summary.block_causal(measured(IN_BLOCKS), dj.bundled.BLOCK_CAUSAL),
    "pictures": lambda: summary.pictured(measured("policies_pictures_cpu"), *dj.bundled.PICTURED),
}


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """The pages of policies stand in the navigation behind those that are written by hand."""
    for section in config.nav or []:
        section.get("Policies", []).extend(_source(policy) for policy in POLICIES)
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds a page and a picture for each policy."""
    from mkdocs.structure.files import File

    for policy in POLICIES:
        files.append(File.generated(config, _source(policy), content=page_of(policy)))
        files.append(File.generated(config, f"figures/steps-{_name(policy)}.svg", content=picture(policy)))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Puts tables in their places, and lets links that leave the site lead to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def repository(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        inside = target.startswith("docs/") and not target.startswith("docs/dev/")
        if inside or not (ROOT / target).exists():  # what is nowhere stays as it is, and fails the build
            return link[0]
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{target}{link[2] or ''})"

    written = lambda found: directive(found[1])
    markdown = markdown.replace("<!-- table of policies -->", table())
    markdown = markdown.replace("<!-- names of other libraries -->", hints.table())
    if EVERY_SETTING in markdown:
        markdown = markdown.replace(EVERY_SETTING, every.tables(measured()))
    markdown = re.sub(r"<!-- table: (.*?) -->", lambda found: TABLES[found[1]](), markdown)
    markdown = re.sub(r"^::: (\S+)$(?!\n +options)", written, markdown, flags=re.MULTILINE)
    return re.sub(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)]*)?\)", repository, markdown)


def directive(name: str) -> str:
    """The directive of mkdocstrings; a package's with the names that it exports (`import x as x`)."""
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError:  # a class
        return f"::: {name}"
    here = lambda value: getattr(value, "__module__", "") == name
    own = [key for key, value in vars(package).items() if here(value) and not key.startswith("_")]
    return f"::: {name}\n    options: {{members: [{', '.join(getattr(package, '__all__', own))}]}}"


@functools.cache
def measured(name: str = "policies_cpu") -> dict[str, Any]:
    """Reads what `bench.policies` measured."""
    return read_json(ROOT / "bench" / "results" / f"{name}.json")["models"]


def table() -> str:
    """Makes a row for each policy: summary, setting that equals exact decoding, paper."""
    lines = []
    for policy in POLICIES:
        found = parts(type(policy))
        idea = found["description"].split("\n")[0]
        cells = f"[`{_name(policy)}`]({_name(policy)}.md)", idea, found.get("exact", "Always."), paper(policy)
        lines.append(f"| {' | '.join(cells)} |")
    return _table("policy | what it does | equals exact decoding when | paper", lines)


def page_of(policy: dj.policies.Policy) -> str:
    """Makes a policy's page, in Markdown with a directive of mkdocstrings."""
    name, kind = _name(policy), type(policy)
    found, blocks = parts(kind), policy in dj.policies.BLOCK_CAUSAL
    page, rows = PAGE, summary.of_policy(measured(), kind)
    if blocks:  # of which those of one model alone are not measured
        own = kind in {type(setting.policy) for setting in grid.BLOCK_CAUSAL}
        page = re.sub(r"## Accuracy and cost.*?(?=## Memory)", OF_BLOCKS * own, PAGE, flags=re.DOTALL)
        rows = summary.block_causal(measured(IN_BLOCKS), dj.bundled.BLOCK_CAUSAL, kind) if own else ""
    return page.format(
        name=name,
        description=found["description"],
        paper=paper(policy),
        module=Path(inspect.getfile(kind)).relative_to(ROOT).as_posix(),
        package=kind.__module__,
        example=example(policy),
        besides="" if policy.only_sets else BESIDES,
        fields=_table("option | meaning | values | default | published", fields(policy)) or "None.",
        settings=_table("setting | for | source", published(kind)) or "None.",
        measured=rows,
        large="SDAR-8B (with blocks of 32)" if blocks else "LLaDA-8B",
        cache=cache_size(policy, blocks),
        dense=cache_size(dj.policies.DualCache(), blocks),
        memory=found.get("memory", ""),
        limits=f"{found.get('limits', '')}\n\n{compatible(name)}".strip(),
        exact=found.get("exact") or "Always.",
        differences=differences(policy, found.get("differences", "")),
    )


def parts(kind: type) -> dict[str, str]:
    """Splits the docstring of a policy into its description and the paragraphs of `LABELS`."""
    labels = {label: name for name, label in LABELS.items()}
    pattern = rf"^({'|'.join(labels)}):"
    text, *pieces = re.split(pattern, inspect.getdoc(kind) or "", flags=re.MULTILINE)
    found = {labels[label]: body.strip("\n") for label, body in zip(*[iter(pieces)] * 2, strict=True)}
    options = found.pop("attributes", "")
    told = {name: _sentence(" ".join(body.split())) for name, body in found.items()}
    return told | {"description": text.strip(), "attributes": options}


def meanings(kind: type) -> dict[str, str]:
    """Reads the meaning of each option from the docstrings of a policy and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        text = textwrap.dedent(parts(base)["attributes"])
        for names, meaning in re.findall(r"^([\w, ]+): (.*(?:\n +.*)*)", text, re.MULTILINE):
            found |= {name: " ".join(meaning.split()) for name in re.split(", *", names)}
    return found


def example(policy: dj.policies.Policy) -> str:
    """Writes a small generation under the policy; `recording` runs it."""
    made = re.sub(r"\b([A-Z]\w*)\(", lambda kind: f"dj.policies.{kind[1]}(", call(_drawn(policy)))
    random = _name(policy) == "DKVGreedy"
    small = "tiny-sdar" if policy in dj.policies.BLOCK_CAUSAL else "tiny-llada"
    text = EXAMPLE.format(model=small, policy=made, sampler=RANDOM if random else "")
    text = text.replace("block=8", "block=4") if small == "tiny-sdar" else text
    return f"import jax\n{text}" if random else text


def cache_size(policy: dj.policies.Policy, blocks: bool = False) -> str:
    """Computes the bytes of the cache that a policy allocates; of SDAR-8B with `blocks`, else LLaDA-8B."""
    spec, layout = dj.presets.model_spec("llada-8b"), dj.Layout(1024, 256, 32, 256)
    if blocks:
        spec = dataclasses.replace(dj.presets.model_spec("sdar-8b"), block_size=32)
    made = jax.eval_shape(lambda: policy.init(spec, layout, 1, "bfloat16"))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
    return f"{size / 1e9:.2f} GB"


def compatible(name: str) -> str:
    """Copies the row of a policy from the page on compatibility."""
    lines = (ROOT / "docs" / "compatibility.md").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| policy "))
    row = next(line for line in lines if line.startswith(f"| `{name}` |"))
    note = "Numbers refer to the reasons on [compatibility](../compatibility.md)."
    return "\n".join([*lines[begin : begin + 2], row, "", note])


def differences(policy: dj.policies.Policy, text: str) -> str:
    """Collects the differences that the docstring and docs/differences.md name."""
    method = re.split(r"[:,' ]| \(", inspect.getdoc(inspect.getmodule(type(policy))) or "")[0]
    head, line, *rows = (
        line for line in (ROOT / "docs" / "differences.md").read_text().splitlines() if line.startswith("|")
    )
    rows = [row for row in rows if row.startswith(f"| {method}") and policy.reuses]
    shown = "\n".join([head, line, *rows]) if rows else ""
    return f"{text}\n\n{shown}".strip() or "None."


def fields(policy: dj.policies.Policy) -> list[str]:
    """Makes a row for each option: meaning, allowed values, default and published values."""
    kind = type(policy)
    hints = typing.get_type_hints(kind, include_extras=True)
    told, lines = meanings(kind), []
    others = [preset.policy for preset in presets().values() if type(preset.policy) is kind]
    for field in dataclasses.fields(policy):
        name = field.name
        rule = rule_of(hints[name], "")
        values = sorted({f"`{getattr(other, name)!r}`" for other in others})
        used = ", ".join(values) if len(values) <= 4 else "several"
        words, default = rule.words if rule else "", repr(getattr(policy, name))
        lines.append(f"| `{name}` | {told.get(name, '')} | {words} | `{default}` | {used} |")
    return lines


@functools.cache
def presets() -> dict[str, Any]:
    """All published settings, each of which is read from a file."""
    return dict(dj.presets)


def published(kind: type) -> list[str]:
    """A line for each published setting of a policy, with the checkpoints and tasks that it is for."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, preset in presets().items():
        if type(preset.policy) is kind:
            found.setdefault((call(preset.policy), preset.source), []).append(name)
    lines = []
    for (setting, source), names in found.items():
        checkpoints = sorted({"/".join(name.split("/")[:2]) for name in names})
        tasks = sorted({name.split("/")[2] for name in names})
        lines.append(f"| `{setting}` | `{'`, `'.join(checkpoints)}`: {', '.join(tasks)} | {source} |")
    return lines


def paper(policy: dj.policies.Policy) -> str:
    """A link to the paper that the policy's file names."""
    found = re.search(PAPER, inspect.getdoc(inspect.getmodule(type(policy))) or "")
    return f"[{found[1]}](https://arxiv.org/abs/{found[1]})" if found else "none"


def picture(policy: dj.policies.Policy) -> str:
    """An SVG of the positions that each step of a small generation computes and reads."""
    run = recording(policy)
    cells = []
    for step, position in np.ndindex(run.computed.shape):
        x, y, age = CELL * position, CELL * step, run.age[step, position]
        if age == 0 or (age > 0 and policy.reuses and run.read[step, position]):
            side = f'width="{CELL - 1}" height="{CELL - 1}"'
            cells.append(f'<rect x="{x}" y="{y}" {side} fill="{colour(age)}"/>')
        if run.changed[step, position]:
            cells.append(f'<circle cx="{x + CELL // 2}" cy="{y + CELL // 2}" r="2" fill="#fff"/>')
    height, width = (CELL * extent for extent in run.computed.shape)
    begin = width - CELL * RESPONSE - 0.5
    cells.append(f'<path d="M{begin} 0V{height}" stroke="#888" stroke-width="1.5"/>')
    size = f'width="{2 * width}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(cells)}</svg>\n'


def colour(age: int) -> str:
    """Blue where a position is computed, else from yellow to red by the age of what is read."""
    return COMPUTED if age == 0 else f"hsl({48 - 48 * min(age, STALEST) / STALEST:.0f} 85% 60%)"


@functools.cache
def model(name: str) -> dj.Model:
    """A model that is watched; its programs run once, so they are compiled in a hurry."""
    jax.config.update("jax_disable_most_optimizations", True)
    return dj.load(dj.bundled.path(name))


def recording(policy: dj.policies.Policy) -> Recording:
    """Runs the example of a policy; one width holds every step, as it is compiled faster."""
    code = example(policy).replace("trace=True", "trace=True, widths=(1024,)")
    names: dict[str, Any] = {}
    small = "tiny-sdar" if policy in dj.policies.BLOCK_CAUSAL else "tiny-llada"
    exec(re.sub(r"^model = .*$", "", code, flags=re.MULTILINE), names | {"model": model(small)}, names)
    return Recording.of(names["out"].trace, 0)


def _drawn(policy: dj.policies.Policy) -> dj.policies.Policy:
    return dataclasses.replace(policy, **DRAWN.get(_name(policy), {}))


def _table(head: str, lines: list[str]) -> str:
    if not lines:
        return ""
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *lines])


def _sentence(text: str) -> str:
    """Begins with a capital, unless with an option; sets options such as `keep=1` as code."""
    text = re.sub(r"(?<![`\w(])(\w+=(?:\w+\([^)]*\)|\w+))", r"`\1`", text)
    return text if text.startswith("`") else text[:1].upper() + text[1:]


def _name(policy: dj.policies.Policy) -> str:
    return type(policy).__name__


def _source(policy: dj.policies.Policy) -> str:
    return f"policies/{_name(policy)}.md"
