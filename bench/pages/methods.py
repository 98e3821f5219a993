"""Pages of methods: policies of one paper share a page.

docs/hooks.py adds them when the site is built.
"""

import re

from bench.pages.policy import POLICIES, citation, page_of
from dllm_jax.policies import BLOCK_CAUSAL, Policy

SHARED = {  # pages of methods that have several policies
    "Fast-dLLM": ("PrefixCache", "DualCache", "SubBlockCache"),
    "dKV-Cache": ("DKVDecode", "DKVGreedy", "DKVPrefill", "DKVPD"),
    "MaskKV": ("MaskKV", "EvictPrompt"),
    "FOCUS": ("DelayedCache", "FOCUS"),
}


def name_of(policy: Policy) -> str:
    """The name of a policy's class."""
    return type(policy).__name__


def methods() -> dict[str, list[Policy]]:
    """Pages by name: policies of one method share one, the others have their own."""
    pages: dict[str, list[Policy]] = {}
    for policy in POLICIES:
        name = name_of(policy)
        page = next((method for method, names in SHARED.items() if name in names), name)
        pages.setdefault(page, []).append(policy)
    return pages


def page_of_method(name: str, policies: list[Policy]) -> str:
    """Makes the page of a method: that of its policy, or a section for each of them and one citation."""
    if len(policies) == 1:
        return page_of(policies[0])
    sections = [
        re.sub(r"^## Cite\n.*?(?=^## )", "", page_of(policy), flags=re.M | re.S) for policy in policies
    ]
    deeper = [re.sub(r"^(?=#+ [A-Z])", "#", section, flags=re.MULTILINE) for section in sections]
    title, cite = f"# {name}: {', '.join(map(name_of, policies))}\n", f"## Cite\n\n{citation(*policies)}\n"
    return _once("\n".join([title, *deeper, cite]))


def _once(text: str) -> str:
    """A page whose tables stand once: later copies are replaced by "As above."."""
    found: set[str] = set()
    shown = []
    for part in text.split("\n\n"):
        shown.append("As above." if part in found and part.startswith("|") else part)
        found.add(part)
    return "\n\n".join(shown)


def source(name: str) -> str:
    """The path of a method's page under docs/."""
    return f"policies/{name}.md"


def address(kind: str) -> str:
    """The page and heading of a policy, in docs/policies."""
    page = next(name for name, policies in methods().items() if kind in map(name_of, policies))
    return f"{page}.md" if page not in SHARED else f"{page}.md#{kind.lower()}"


def by_kind() -> dict[str, list[str]]:
    """Pages by what a step does: it selects tokens, changes its layers, or is for models with blocks."""
    lines: dict[str, list[str]] = {}
    for name, (policy, *_) in methods().items():
        sets = "Sets of tokens" if policy.only_sets else "Layers of their own"
        kind = "For models with blocks" if policy in BLOCK_CAUSAL else sets
        lines.setdefault(kind, []).append(name)
    return lines
