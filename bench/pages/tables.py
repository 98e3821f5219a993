"""Tables of README and docs, which stand in the Markdown files between two comments.

<!-- table: NAME -->
...
<!-- end of table -->
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dllm_jax as dj
from bench import asked
from bench.pages import checkpoints, programs, recorded, sources, speed
from bench.pages import measured as results
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
from dllm_jax.expressions import call
from dllm_jax.options import hints
from dllm_jax.policies import BLOCK_CAUSAL, Policy
from dllm_jax.samplers import Sampler

MARK = re.compile(r"(<!-- table: ([^>]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def pages() -> Iterator[Path]:
    """README and the pages under docs/."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def written(page: Path) -> str:
    """The text of a page with its tables and numbers as they are made today.

    Raises:
      KeyError: a table has no entry in `TABLES`.
    """
    made = lambda found: f"{found[1]}\n{_table(found[2], page)}\n\n{found[3]}"
    return sources.renewed(MARK.sub(made, page.read_text()))


def _table(name: str, page: Path) -> str:
    make, *files = TABLES[name] if isinstance(TABLES[name], tuple) else (TABLES[name],)
    return make().strip() + (f"\n\n{sources.about(page, *files)}" if files else "")


def stale() -> list[Path]:
    """Pages with a table or a number that differs from what `written` makes."""
    return [page for page in pages() if written(page) != page.read_text()]


GROUPS = {  # policies by mechanism
    "Exact": ("Policy",),
    "Recompute some tokens": (
        *("PrefixCache", "DualCache", "SlidingCache", "DKVDecode", "DKVGreedy", "DKVPrefill", "DKVPD"),
        "SubBlockCache",
    ),
    "Update some tokens in each layer": (
        "DLLMCache",
        "SPACache",
        "DyLLM",
        "ESDLLM",
        "ElasticCache",
        "D2Cache",
    ),
    "Evict KV pairs": ("SparseDLLM", "MaskKV", "EvictPrompt"),
    "Limit attention": ("WindowDiffusion", "SuffixDropout"),
    "Models with blocks only": ("MAGE", "DelayedCache", "FOCUS"),
}


def _grouped(cells: Callable[[Policy], tuple[str, ...]]) -> list[str]:
    """A row of cells for each policy, below a row that names its group."""
    by_name, lines = {type(policy).__name__: policy for policy in POLICIES}, []
    for group, names in GROUPS.items():
        rows = [cells(by_name.pop(name)) for name in names]
        lines += [f"| *{group}* {'| ' * len(rows[0])}".strip(), *(f"| {' | '.join(row)} |" for row in rows)]
    if by_name:
        raise LookupError(f"{', '.join(by_name)} must be in a group of policies")
    return lines


def policies_by_use() -> str:
    """Makes a row for each policy: idea, cache, default options, and whose code its recordings are from."""

    def cells(policy: Policy) -> tuple[str, ...]:
        name, blocks = type(policy).__name__, policy in BLOCK_CAUSAL
        size = cache_size(policy, blocks).removesuffix(" GB") + (" (SDAR-8B)" if blocks else "")
        # docs/hooks.py turns the link to the source into one to the policy's page, where there is a site.
        link = f"[`{name}`](../../{module(type(policy))})"
        told = f"{idea(policy)}.<br>{defaults(policy)}".removesuffix(".<br>")
        return link, told, size, paper(policy), recorded.of(name)

    heads = "policy | what it does, and default options | cache, GB | paper | recorded from"
    return markdown_table(heads, _grouped(cells))


def policies_in_brief() -> str:
    """Makes the README's row for each policy."""
    cells = lambda policy: (f"`{type(policy).__name__}()`", idea(policy))
    return markdown_table("policy | what it does", _grouped(cells))


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
        if isinstance(kind, type) and issubclass(kind, Sampler) and not inspect.isabstract(kind):
            doc = inspect.getdoc(kind) or ""
            rule = re.sub(r" \([^)]*\)\.$|\.$", "", doc.split("\n")[0])
            own = [field for field in dataclasses.fields(kind) if field.name not in base]
            shown = ", ".join(f"`{field.name}{_default(field)}`" for field in own)
            found = re.findall(PAPER, f"{inspect.getdoc(inspect.getmodule(kind))} {doc}")
            papers = ", ".join(f"[{one}](https://arxiv.org/abs/{one})" for one in dict.fromkeys(found))
            told = f"{rule}.<br>{shown}" if shown else rule
            lines.append(f"| `{name}` | {told} | {papers} | {recorded.of(name)} |")
    return markdown_table("sampler | rule, options and defaults | papers | recorded from", lines)


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    return f"={call(field.default)}"


GPU = "generate_h200.json", "check_h100_speed.json"
CHAINS = "policies_cpu.json"
TABLES: dict[str, Any] = {  # what makes a table, and the files that it is from
    "samplers": samplers_by_rule,
    "speed": (speed.table, *GPU),
    "speed in brief": (speed.brief, "generate_h200.json"),
    "speed and prediction": (speed.costs, *GPU),
    "predicted speed": (speed.predicted, speed.PREDICTED),
    "policies by use": policies_by_use,
    "policies in brief": policies_in_brief,
    "policies": (lambda: summary.table(measured(), dj.bundled.TEXT), CHAINS),
    "fewer steps": (lambda: summary.fewer_steps(measured(), dj.bundled.TEXT), CHAINS),
    "later": (lambda: summary.later(measured(), dj.bundled.TEXT), CHAINS),
    "blocks": (
        lambda: summary.in_blocks(measured() | measured("policies_blocks_cpu"), dj.bundled.TEXT),
        *("policies_blocks_cpu.json", CHAINS),
    ),
    "claims": (lambda: orderings.refuted(measured()), CHAINS),
    "CPU speed": (results.cpu_speed, "generate_cpu.json"),
    "other implementations": (results.peers, *results.PEERS),
    "block-causal peers": (results.block_peers, *results.BLOCK_PEERS),
    "other DiffusionGemmas": (results.gemma_peers, "peer_gemma_cpu.json"),
    "memory per chip": (results.fits, "compiled_fits.json"),
    "compiled programs": (programs.overview, *programs.PICKED),
    "launches": (programs.launches, programs.SHIPPED),
    "versions of jax": (programs.newest, programs.NEWEST),
    "compiled blocks": (programs.blocks, programs.BLOCKS),
    "long prompts": (programs.long_prompts, programs.LONG),
    "several chips": (programs.several_chips, programs.CHIPS),
    "FreeDave": (results.free_dave, "free_dave_cpu.json"),
    "learning": (results.learning, *(f"learning_{file}_cpu.json" for file in results.LEARNT.values())),
    "recordings": (results.recordings, "replay_cpu.json"),
    "block-causal": (
        lambda: summary.block_causal(measured(IN_BLOCKS), dj.bundled.BLOCK_CAUSAL),
        f"{IN_BLOCKS}.json",
    ),
    "canvases": (
        lambda: summary.in_canvases(measured("policies_blocks_cpu"), *dj.bundled.NOISE),
        "policies_blocks_cpu.json",
    ),
    "pictures": (
        lambda: summary.pictured(measured("policies_pictures_cpu"), *dj.bundled.PICTURED),
        "policies_pictures_cpu.json",
    ),
    "what bundled models can be asked": (asked.table, "asked_cpu.json"),
    "names of other libraries": hints.names_table,
    "published checkpoints": checkpoints.table,
}
