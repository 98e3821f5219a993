"""Tables of README and docs, which stand in the Markdown files between two comments.

<!-- table: NAME -->
...
<!-- end of table -->
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import dllm_jax as dj
from bench import asked, peer_bonsai
from bench.pages import checkpoints, speed
from bench.pages.policy import (
    IN_BLOCKS,
    PAPER,
    POLICIES,
    ROOT,
    cache_size,
    markdown_table,
    measured,
    module,
    paper,
    parts,
)
from bench.policies import orderings, summary
from dllm_jax import samplers
from dllm_jax.options import hints
from dllm_jax.policies import BLOCK_CAUSAL, Policy
from dllm_jax.published.expressions import call
from dllm_jax.samplers import Sampler

MARK = re.compile(r"(<!-- table: ([^>]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def pages() -> Iterator[Path]:
    """README and the pages under docs/."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def written(text: str) -> str:
    """A page with its tables as they are made today.

    Raises:
      KeyError: a table has no entry in `TABLES`.
    """
    return MARK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]().strip()}\n\n{found[3]}", text)


def stale() -> list[Path]:
    """Pages with a table that differs from what `written` makes."""
    return [page for page in pages() if written(page.read_text()) != page.read_text()]


def policies_by_use() -> str:
    """Makes a row for each policy: idea, measured speed, cache, default options, paper."""
    speeds, lines = speed.tokens_per_s(), []
    for policy in POLICIES:
        name, blocks = type(policy).__name__, policy in BLOCK_CAUSAL
        size = cache_size(policy, blocks).removesuffix(" GB") + (" (SDAR-8B)" if blocks else "")
        link = (
            f"[`{name}`](../../{module(type(policy))})"  # docs/hooks.py: to its page, where there is a site
        )
        told = f"{idea(policy)}. {defaults(policy)}".removesuffix(". ")
        cells = link, told, speeds.get(name, "-"), size
        lines.append(f"| {' | '.join(cells)} |")
    return markdown_table("policy | what it does, and default options | tokens/s | cache, GB", lines)


def policies_in_brief() -> str:
    """Makes the README's row for each policy: idea, measured speed, paper."""
    speeds, lines = speed.tokens_per_s(), []
    for policy in POLICIES:
        name = type(policy).__name__
        lines.append(f"| `{name}()` | {idea(policy)} | {speeds.get(name, '-')} | {paper(policy)} |")
    return markdown_table("policy | what it does | tokens/s | paper", lines)


def idea(policy: Policy) -> str:
    """The first line of a policy's docstring, without the method's name."""
    line = parts(type(policy))["description"].split("\n")[0]
    return re.sub(r" \([^)]*\)\.$|\.$", "", line)


def defaults(policy: Policy) -> str:
    """The options of a policy that are numbers or names, with their defaults."""
    fields = (field.name for field in dataclasses.fields(policy))
    given = {name: getattr(policy, name) for name in fields}
    shown = (
        f"`{name}={call(value)}`" for name, value in given.items() if not dataclasses.is_dataclass(value)
    )
    return ", ".join(shown)


def samplers_by_rule() -> str:
    """Makes a row for each sampler: rule, options of its own with their defaults, papers."""
    base = {field.name for field in dataclasses.fields(Sampler)}
    lines = []
    for name, kind in sorted(vars(samplers).items()):
        if isinstance(kind, type) and issubclass(kind, Sampler) and kind not in (Sampler, samplers.UntilDone):
            doc = inspect.getdoc(kind) or ""
            rule = re.sub(r" \([^)]*\)\.$|\.$", "", doc.split("\n")[0])
            own = [field for field in dataclasses.fields(kind) if field.name not in base]
            shown = ", ".join(f"`{field.name}{_default(field)}`" for field in own)
            found = re.findall(PAPER, f"{inspect.getdoc(inspect.getmodule(kind))} {doc}")
            papers = ", ".join(f"[{one}](https://arxiv.org/abs/{one})" for one in dict.fromkeys(found))
            lines.append(f"| `{name}` | {rule} | {shown} | {papers} |")
    return markdown_table("sampler | rule | options and defaults | papers", lines)


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    return f"={call(field.default)}"


TABLES = {
    "samplers": samplers_by_rule,
    "speed": speed.table,
    "speed and prediction": speed.costs,
    "policies by use": policies_by_use,
    "policies in brief": policies_in_brief,
    "README accuracy": lambda: summary.brief(measured(), speed.tokens_per_s()),
    "policies": lambda: summary.table(measured(), dj.bundled.TEXT),
    "fewer steps": lambda: summary.fewer_steps(measured(), dj.bundled.TEXT),
    "later": lambda: summary.later(measured(), dj.bundled.TEXT),
    "blocks": lambda: summary.in_blocks(measured() | measured("policies_blocks_cpu"), dj.bundled.TEXT),
    "claims": lambda: orderings.short(measured()),
    "other implementations": peer_bonsai.table,
    "block-causal": lambda: summary.block_causal(measured(IN_BLOCKS), dj.bundled.BLOCK_CAUSAL),
    "pictures": lambda: summary.pictured(measured("policies_pictures_cpu"), *dj.bundled.PICTURED),
    "what bundled models can be asked": asked.table,
    "names of other libraries": hints.table,
    "published checkpoints": checkpoints.table,
}
