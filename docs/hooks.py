"""Adds to the site: a page and a picture of every policy, old addresses, and links to the repository.

`mkdocs build` calls these functions; bench/pages writes the texts.
"""

import importlib
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:  # a test reads the pages where mkdocs is not at hand
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.pages import pictures  # noqa: E402
from bench.pages.methods import (  # noqa: E402
    SHARED,
    address,
    by_kind,
    methods,
    page_of_method,
    source,
)
from bench.pages.policy import POLICIES  # noqa: E402

MOVED = {  # old pages of the site, and the pages that hold their content now
    "background/benchmarks": "background/results/",
    "concepts": "background/design/",
    "guarantees": "background/design/#guarantees",
    "how-to/chat-with-llada": "quickstart/#llada-8b",
    "how-to/constraining": "how-to/generating/#regular-expressions-and-json-schemas",
    "how-to/likelihoods": "how-to/seeing-inside/#log-likelihoods",
    "installation": "quickstart/",
    "policies/overview": "policies/#all-policies",
    "policies/published-settings": "how-to/evaluation/#published-settings",
    "reference/evaluation": "reference/models/#evaluation-tasks-and-roofline",
    "reference/eviction": "reference/policies/#eviction",
    "reference/inside": "reference/generation/#likelihoods-and-activations",
    "reference/samplers": "policies/samplers/#reference",
    "reference/testing": "reference/policies/#checks-of-your-own-policies-and-samplers",
    "reference/training": "reference/models/#training-and-lora",
}
MOVED |= {  # policies that share a page
    f"policies/{kind}": f"policies/{name}/#{kind.lower()}"
    for name, kinds in SHARED.items()
    for kind in kinds
    if kind not in SHARED
}
FORWARD = """\
<!doctype html><meta charset="utf-8"><title>Moved</title>
<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">This page has moved.</a>
"""


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Lists the pages of policies in the navigation, by what they save."""
    for section in config.nav or []:
        for entry in section.get("Policies and samplers", []):
            if "Policies" in entry:
                entry["Policies"] = [
                    {kind: [{name: source(name)} for name in found]} for kind, found in by_kind().items()
                ]
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds a page for each method, and a picture for each policy."""
    from mkdocs.structure.files import File

    jax.config.update("jax_disable_most_optimizations", True)  # programs of pictures run once
    for name, policies in methods().items():
        files.append(File.generated(config, source(name), content=page_of_method(name, policies)))
    for policy in POLICIES:
        drawn = f"figures/steps-{type(policy).__name__}.svg"
        files.append(File.generated(config, drawn, content=pictures.picture(policy)))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Writes directives of packages, and lets links that leave the site lead to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def repository(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        inside = target.startswith("docs/") and not target.startswith("docs/dev/")
        if inside or not (ROOT / target).exists():  # what is nowhere stays as it is, and fails the build
            return link[0]
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{target}{link[2] or ''})"

    own = "|".join(type(policy).__name__ for policy in POLICIES)
    if folder == "policies":  # a clone has no pages of policies
        page_link = lambda link: f"{link[1]}{address(link[2])}"
        markdown = re.sub(rf"(\[`({own})`\]\()\.\./\.\./dllm_jax/policies/\w+\.py", page_link, markdown)
    written = lambda found: directive(found[1])
    markdown = re.sub(r"^::: (\S+)$(?!\n +options)", written, markdown, flags=re.MULTILINE)
    return re.sub(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)]*)?\)", repository, markdown)


def on_page_content(html: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Lets the cells of tables break after the name of a policy, rather than within its options."""
    return re.sub(r"(<td[^>]*>(?:<a[^>]*>)?<code>\w+\()", r"\1<wbr>", html)


def on_post_build(config: "MkDocsConfig"):
    """Writes a page at each old address that leads to the new one."""
    for old, new in MOVED.items():
        place = Path(config.site_dir) / old
        place.mkdir(parents=True)
        target = posixpath.join(*[".."] * (old.count("/") + 1), new)
        (place / "index.html").write_text(FORWARD.format(target=target))


def directive(name: str) -> str:
    """The directive of mkdocstrings; a package's with the names that it exports (`import x as x`)."""
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError:  # a class
        return f"::: {name}"
    here = lambda value: getattr(value, "__module__", "") == name
    own = [key for key, value in vars(package).items() if here(value) and not key.startswith("_")]
    return f"::: {name}\n    options: {{members: [{', '.join(getattr(package, '__all__', own))}]}}"
