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
from bench.policies import every  # noqa: E402
from dllm_jax.decoding.watch.recording import Recording  # noqa: E402
from dllm_jax.eval.run.files import read_json  # noqa: E402
from dllm_jax.options import hints  # noqa: E402
from dllm_jax.options.rules import rule_of  # noqa: E402

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
}
LAYOUT = dict(length=16, block=8)
PAGE = """\
# {name}

Paper: {paper}. Source: [{module}](../../{module}).

Exact limit: {limit}

![computed and stored positions by step](../figures/steps-{name}.svg)

`{drawn}` on `tiny-llada`, 16 tokens in blocks of 8. Positions across, the response behind the line; steps
down. Blue is computed in the step, yellow to red is read as it was stored, the redder the older, blank is
left out; a dot is decoded.{besides}

{fields}

{settings}

::: {package}.{name}
    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}
"""
EVERY_SETTING = "<!-- every setting -->"
BESIDES = " What layers skip or evict besides is not drawn: it differs by layer and head."


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """The pages of policies stand in the navigation behind those that are written by hand."""
    for section in config.nav or []:
        section.get("Policies", []).extend(_source(policy) for policy in dj.policies.ALL)
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds a page and a picture for each policy."""
    from mkdocs.structure.files import File

    for policy in dj.policies.ALL:
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
        measured = read_json(ROOT / "bench" / "results" / "policies_cpu.json")["models"]
        markdown = markdown.replace(EVERY_SETTING, every.tables(measured))
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


def table() -> str:
    """A line for each policy: what it does, its exact limit, its paper."""
    lines = []
    for policy in dj.policies.ALL:
        idea = (inspect.getdoc(type(policy)) or "").split("\n")[0]
        cells = f"[`{_name(policy)}`]({_name(policy)}.md)", idea, exact_limit(policy), paper(policy)
        lines.append(f"| {' | '.join(cells)} |")
    return _table("policy | idea | exact limit | paper", lines)


def page_of(policy: dj.policies.Policy) -> str:
    """A policy's page, in Markdown with a directive of mkdocstrings."""
    name, kind = _name(policy), type(policy)
    return PAGE.format(
        name=name,
        paper=paper(policy),
        module=Path(inspect.getfile(kind)).relative_to(ROOT).as_posix(),
        package=kind.__module__,
        limit=exact_limit(policy) or "it is the exact decoder.",
        drawn=_drawn(policy),
        besides="" if policy.only_sets else BESIDES,
        fields=_table("field | values | default", fields(policy)),
        settings=_table("published setting | for | source", published(kind)),
    )


def fields(policy: dj.policies.Policy) -> list[str]:
    """A line for each field: its name, the values that its annotation allows, its default."""
    hints = typing.get_type_hints(type(policy), include_extras=True)
    rules = {field.name: rule_of(hints[field.name], "") for field in dataclasses.fields(policy)}
    return [
        f"| `{name}` | {rule.words if rule else ''} | `{getattr(policy, name)!r}` |"
        for name, rule in rules.items()
    ]


@functools.cache
def presets() -> dict[str, Any]:
    """All published settings, each of which is read from a file."""
    return dict(dj.presets)


def published(kind: type) -> list[str]:
    """A line for each published setting of a policy, with the checkpoints and tasks that it is for."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, preset in presets().items():
        if type(preset.policy) is kind:
            found.setdefault((str(preset.policy), preset.source), []).append(name)
    lines = []
    for (setting, source), names in found.items():
        checkpoints = sorted({"/".join(name.split("/")[:2]) for name in names})
        tasks = sorted({name.split("/")[2] for name in names})
        lines.append(f"| `{setting}` | `{'`, `'.join(checkpoints)}`: {', '.join(tasks)} | {source} |")
    return lines


def exact_limit(policy: dj.policies.Policy) -> str:
    """What the docstring says behind "Exact limit:"."""
    found = re.search(
        r"Exact limit: (.*?)(\n[A-Z]\w+:|\n\n|$)", inspect.getdoc(type(policy)) or "", re.DOTALL
    )
    return " ".join(found[1].split()) if found else ""


def paper(policy: dj.policies.Policy) -> str:
    """A link to the paper that the policy's file names."""
    found = re.search(PAPER, inspect.getdoc(inspect.getmodule(type(policy))) or "")
    return f"[{found[1]}](https://arxiv.org/abs/{found[1]})" if found else "none"


def picture(policy: dj.policies.Policy) -> str:
    """An SVG of the positions that each step of a small generation computes and reads."""
    run = recording(_drawn(policy))
    cells = []
    for step, position in np.ndindex(run.computed.shape):
        x, y, age = CELL * position, CELL * step, run.age[step, position]
        if age == 0 or (age > 0 and policy.reuses and run.read[step, position]):
            side = f'width="{CELL - 1}" height="{CELL - 1}"'
            cells.append(f'<rect x="{x}" y="{y}" {side} fill="{colour(age)}"/>')
        if run.changed[step, position]:
            cells.append(f'<circle cx="{x + CELL // 2}" cy="{y + CELL // 2}" r="2" fill="#fff"/>')
    height, width = (CELL * extent for extent in run.computed.shape)
    begin = width - CELL * LAYOUT["length"] - 0.5
    cells.append(f'<path d="M{begin} 0V{height}" stroke="#888" stroke-width="1.5"/>')
    size = f'width="{2 * width}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(cells)}</svg>\n'


def colour(age: int) -> str:
    """Blue where a position is computed, else from yellow to red by the age of what is read."""
    return COMPUTED if age == 0 else f"hsl({48 - 48 * min(age, STALEST) / STALEST:.0f} 85% 60%)"


@functools.cache
def model() -> dj.Model:
    """The model that is watched; its programs run once, so they are compiled in a hurry."""
    jax.config.update("jax_disable_most_optimizations", True)
    return dj.load(dj.bundled.path("tiny-llada"))


def recording(policy: dj.policies.Policy) -> Recording:
    """A generation; one width holds every step, as it is compiled faster."""
    order = dj.samplers.RandomOrder() if _name(policy) == "DKVGreedy" else dj.samplers.Confidence()
    prompt, options = np.arange(40, 60)[None], dict(policy=policy, sampler=order, key=jax.random.key(0))
    out = dj.generate(model(), prompt, trace=True, widths=(1024,), **options, **LAYOUT)
    return Recording.of(out.trace, 0)


def _drawn(policy: dj.policies.Policy) -> dj.policies.Policy:
    return dataclasses.replace(policy, **DRAWN.get(_name(policy), {}))


def _table(head: str, lines: list[str]) -> str:
    if not lines:
        return ""
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *lines])


def _name(policy: dj.policies.Policy) -> str:
    return type(policy).__name__


def _source(policy: dj.policies.Policy) -> str:
    return f"policies/{_name(policy)}.md"
