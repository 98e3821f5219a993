"""A policy's page: docstring, annotations, published settings, what was measured, and a picture of a run.

docs/hooks.py calls it when the site is built, by bench/pages/methods.py.
"""

import dataclasses
import functools
import inspect
import re
import textwrap
import typing
from pathlib import Path
from typing import Any

import jax

import dllm_jax as dj
from bench.pages import recorded, sources, speed
from bench.pages.pictures import example
from bench.policies import grid, summary
from dllm_jax.eval.run.files import read_json
from dllm_jax.expressions import call
from dllm_jax.options.rules import rule_of

ROOT = Path(__file__).parents[2]
POLICIES = (*dj.policies.ALL, *dj.policies.BLOCK_CAUSAL)
PAPER = r"arXiv:(\d{4}\.\d{5})"
PAGE = """\
# {name}

{description}

Paper: {paper}. Source: [`{module}`](../../{module}). Recorded from: {origin}.

## Example

```python
{example}print(out.tokens, out.stats.nfe)
```

## Options

{fields}

## What a run looks like

![computed and cached tokens by step](../figures/steps-{name}.svg)

*{besides}The example above. Columns are positions, with the response after the line; rows are steps. Blue:
recomputed. Yellow to red: reused KV pairs, redder with age. Blank: not attended to. A dot: unmasked.*

## Accuracy and cost

{measured}

*Exact match on 128 held-out chain questions: 32 tokens, block length 4 unless stated otherwise. computed:
computed tokens relative to exact decoding. KV pairs: cached per layer and head, on `tiny-llada`. Measured on
models that were [trained to be cached](../background/results.md). {age}*{unmeasured}

{speed}

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

## Cite

{citation}

## Signature

::: {package}.{name}
    options:
      members: false
      show_root_heading: false
      show_root_toc_entry: false
      show_docstring_description: false
      show_docstring_attributes: false
"""
CHAINS = "policies_cpu"
IN_BLOCKS = "policies_block_causal_cpu"  # measured on models that attend within blocks
OF_BLOCKS = """\
## Accuracy and cost

{measured}

*Exact match of `tiny-sdar` (then `tiny-sdar-moe`) on 64 held-out questions, block length 4; in brackets the
KV pairs per layer and head that a later step attends to, on average. computed: computed tokens relative to
exact decoding. {age} [All policies](index.md#long-prompts-on-block-causal-models).*

{speed}

"""
SEVERAL = "One panel for each layer, or for layers that do the same. "
LIGHT = "Light blue: only {} are new; attention and MLP outputs are cached. "
PALE = "Paler: retained by fewer heads. "
UPDATES = {  # of policies whose pictures have light blue: what it stands for
    "DLLMCache": "values", "MaskKV": "values", "DyLLM": "values", "FOCUS": "values",
    "SPACache": "keys and values",
}  # fmt: skip
BY_HEAD = ("MaskKV", "EvictPrompt", "MAGE")  # have paler colors
ALIKE = ("D2Cache",)  # has a layer of its own, yet all layers do the same
UNMEASURED = """

The defaults are the paper's, for models of 8B parameters and long answers. No row above has them: `{}` is not
measured on the bundled models."""
LABELS = {  # paragraphs of docstrings
    "exact": "Equals exact decoding when",
    "differences": "Differences",
    "memory": "Memory",
    "limits": "Limits",
    "attributes": "Attributes",
}


@functools.cache
def measured(name: str = CHAINS) -> dict[str, Any]:
    """Reads what `bench.policies` measured."""
    return read_json(ROOT / "bench" / "results" / f"{name}.json")["models"]


def besides(name: str) -> str:
    """Says which further panels and colors the picture of a policy with a layer of its own has."""
    light = LIGHT.format(UPDATES[name]) if name in UPDATES else ""
    return SEVERAL * (name not in ALIKE) + light + PALE * (name in BY_HEAD)


def page_of(policy: dj.policies.Policy) -> str:
    """Makes a policy's page, in Markdown with a directive of mkdocstrings."""
    name, kind = _name(policy), type(policy)
    found, blocks = parts(kind), policy in dj.policies.BLOCK_CAUSAL
    page, rows = PAGE, summary.of_policy(measured(), kind)
    if blocks:  # of which those of one model alone are not measured
        own = kind in {type(setting.policy) for setting in grid.BLOCK_CAUSAL}
        page = re.sub(r"## Accuracy and cost.*?(?=## Memory)", OF_BLOCKS * own, PAGE, flags=re.DOTALL)
        rows = summary.block_causal(measured(IN_BLOCKS), dj.bundled.BLOCK_CAUSAL, kind) if own else ""
    text = page.format(
        name=name,
        origin="no run" if recorded.of(name) == recorded.NONE else recorded.of(name),
        age=sources.about(ROOT / "docs/policies/x.md", f"{IN_BLOCKS if blocks else CHAINS}.json").strip("*"),
        speed=speed.sentence(name),
        description=found["description"],
        paper=paper(policy),
        module=module(kind),
        package=kind.__module__,
        example=example(policy),
        besides="" if policy.only_sets else besides(name),
        fields=markdown_table("option | meaning | values | default | published", fields(policy)),
        citation=citation(policy),
        settings=markdown_table("setting | for | source", published(kind)),
        measured=rows,
        unmeasured="" if f"| `{call(policy)}`" in rows or blocks else UNMEASURED.format(call(policy)),
        large="SDAR-8B (with blocks of 32)" if blocks else "LLaDA-8B",
        cache=cache_size(policy, blocks),
        dense=cache_size(dj.policies.DualCache(), blocks),
        memory=found.get("memory", ""),
        limits=f"{found.get('limits', '')}\n\n{compatible(name)}".strip(),
        exact=found.get("exact") or "Always.",
        differences=differences(policy, found.get("differences", "")),
    )
    return re.sub(r"^## .*\n\s*(?=^## )", "", text, flags=re.MULTILINE)  # sections that are empty


def module(kind: type) -> str:
    """The path of the file that holds a class, in the repository."""
    return Path(inspect.getfile(kind)).relative_to(ROOT).as_posix()


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
    return "\n".join([*lines[begin : begin + 2], row, *(["", note] if re.search(r"\(\d+\)", row) else [])])


def method(policy: dj.policies.Policy) -> str:
    """The method's name, with which the docstring of the policy's file begins."""
    return re.split(r"[:,' ]| \(", inspect.getdoc(inspect.getmodule(type(policy))) or "")[0]


def differences(policy: dj.policies.Policy, text: str) -> str:
    """Collects the differences that the docstring and docs/differences.md name."""
    head, line, *rows = (
        line for line in (ROOT / "docs" / "differences.md").read_text().splitlines() if line.startswith("|")
    )
    rows = [row for row in rows if row.startswith(f"| {method(policy)}") and policy.reuses]
    shown = "\n".join([head, line, *rows]) if rows else ""
    return f"{text}\n\n{shown}".strip()


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


def citation(*policies: dj.policies.Policy) -> str:
    """Copies the BibTeX entries of the papers of policies from docs/references.bib."""
    entries = (ROOT / "docs" / "references.bib").read_text().split("\n\n")
    named = [one for policy in policies for one in papers(policy)]
    found = [entry.strip() for entry in entries if any(f"eprint = {{{one}}}" in entry for one in named)]
    shown = "\n\n".join(found)
    return f"```bibtex\n{shown}\n```" if found else "[CITATION.cff](../../CITATION.cff)."


def paper(policy: dj.policies.Policy) -> str:
    """A link to the first paper of a policy."""
    found = papers(policy)
    return f"[{found[0]}](https://arxiv.org/abs/{found[0]})" if found else "none"


def papers(policy: dj.policies.Policy) -> list[str]:
    """The arXiv ids that the policy's docstring names, or else its file."""
    of = lambda place: re.findall(PAPER, inspect.getdoc(place) or "")
    return of(type(policy)) or of(inspect.getmodule(type(policy)))


def markdown_table(head: str, lines: list[str]) -> str:
    """Makes a table; nothing without lines."""
    if not lines:
        return ""
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *lines])


def _sentence(text: str) -> str:
    """Begins with a capital, unless with an option; sets options such as `keep=1` as code."""
    text = re.sub(r"(?<![`\w(])(\w+=(?:\w+\([^)]*\)|[\w.]*\w))", r"`\1`", text)
    return text if text.startswith("`") else text[:1].upper() + text[1:]


def _name(policy: dj.policies.Policy) -> str:
    return type(policy).__name__
