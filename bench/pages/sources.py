"""Numbers of sentences and hand-written tables, each with an invisible source, and those that need none.

    165<!-- generate_h200.json: 256 / median(row(policy="DualCache").seconds) -->

A source is a file of bench/results and an expression over it, `code:` and an expression over the library, the
id of a test that holds the number, or `paper:` and a place in a publication. `renewed` computes numbers
of the first two again; `bare` lists numbers that have no source and belong to no class of `FREE`.
"""

import functools
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax

import dllm_jax as dj
from bench.shared.numbers import rounded
from dllm_jax.eval.run.files import read_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
NUMBER = r"\d{1,3}(?: \d{3})+(?!\d)|\d+(?:\.\d+)?"
SOURCED = re.compile(
    rf"(?P<number>{NUMBER})(?P<unit>(?:x\b|%)?)(?P<close>[*`)]*)"
    r"<!-- (?P<source>(?!table:|printed:|end of)\S.*?) -->",
    re.DOTALL,
)
KIND = re.compile(r"(?P<kind>\S+\.json|code|paper): (?P<text>.*)|(?P<file>tests/\w+\.py)::(?P<test>\w+)")
CARD, ROOFLINE = r"\b[ABH]\d00\b", r'HARDWARE\["(\w+)"\]'
MADE = re.compile(r"<!-- (?:table|printed): .*?<!-- end of table -->", re.DOTALL)


class Source(NamedTuple):
    """A number of a page with its source.

    Attributes:
      number: Number as printed, with the spaces between thousands.
      unit: "x", "%" or nothing.
      kind: Name of a file of bench/results, "code", "paper", or the file of a test.
      text: Expression, place in a publication, or the name of a test.
    """

    number: str
    unit: str
    kind: str
    text: str

    @property
    def value(self) -> float | None:
        """The value of the expression; None where the source is a test or a publication."""
        if self.kind == "code":
            return evaluate(self.text, _of_code())
        return evaluate(self.text, results(self.kind)) if self.kind.endswith(".json") else None

    @property
    def shown(self) -> str:
        """The number as its source has it, with as many digits as the printed one."""
        if (value := self.value) is None:
            return self.number
        text = rounded(100 * value if self.unit == "%" else value, len(self.number.partition(".")[2]))
        whole, dot, rest = text.partition(".")
        return (f"{int(whole):,}".replace(",", " ") if " " in self.number else whole) + dot + rest


class Row(dict):
    """A dictionary of a result file whose entries are attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return _wrapped(self[name])


def sources(text: str) -> Iterator[Source]:
    """The numbers of a page that have a source."""
    return map(_source, SOURCED.finditer(text))


def renewed(text: str) -> str:
    """A page with its numbers as their sources have them today."""
    comment = lambda found: found[0][found.end("unit") - found.start() :]
    return SOURCED.sub(lambda found: _source(found).shown + found["unit"] + comment(found), text)


def evaluate(expression: str, names: Mapping[str, Any]) -> float:
    """The value of a source's expression."""
    return eval(expression, {"median": median} | dict(names))


def foreign(text: str) -> list[tuple[str, set[str]]]:
    """Sentences that name other cards than their numbers are of, or none where a roofline's number stands."""
    notes: list[str] = []
    marked = re.sub("<!--(.*?)-->", lambda note: f"\0{notes.append(note[1]) or len(notes) - 1}\0", text)
    wrong = []
    for sentence in re.split(r"(?<=[.;])\s|\n\n|\n(?=[|-])", marked):
        named = set(re.findall(CARD, sentence))
        for note in (notes[int(index)] for index in re.findall("\0(\\d+)\0", sentence)):
            file = re.match(r" (\w+\.json):", note)
            device = results(file[1])["document"].device if file and named else ""
            cards = set(re.findall(CARD, device)) | {card.upper() for card in re.findall(ROOFLINE, note)}
            wrong += [(sentence, cards - named)] if cards - named else []
    return wrong


@functools.cache
def results(file: str) -> Mapping[str, Any]:
    """The names of an expression over a result file: `document`, `row`, `rows` and `of`.

    `rows(*keys, **fields)` has the dictionaries below all of the keys with these fields; a text field also
    matches a call of that name. `row` is the only one. `of` is that of a setting with one token per step.
    """
    document = read_json(RESULTS / file)

    def rows(*keys: str, **fields: Any) -> list[Row]:
        return [Row(found) for path, found in _dictionaries(document) if _matches(path, found, keys, fields)]

    def row(*keys: str, **fields: Any) -> Row:
        found = rows(*keys, **fields)
        if len(found) != 1:
            raise LookupError(f"{file} has {len(found)} rows of {keys} {fields}")
        return found[0]

    def of(task: str, policy: str, block: int = 4, sampler: str = "Confidence()") -> Row:
        found = rows(task, policy=policy, sampler=sampler, block=block)
        return max((row for row in found if row.policy == policy), key=lambda row: row.steps)

    return {"document": _wrapped(document), "row": row, "rows": rows, "of": of}


def _matches(path: tuple[str, ...], found: dict[str, Any], keys: tuple[str, ...], fields: Any) -> bool:
    named = all(key in path for key in keys)
    value = lambda name: str(found.get(name))
    return named and all(
        name in found and (value(name) == str(asked) or value(name).startswith(f"{asked}("))
        for name, asked in fields.items()
    )


def _dictionaries(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    if isinstance(value, dict):
        yield path, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in pairs:
        yield from _dictionaries(below, (*path, str(key)))


def _wrapped(value: Any) -> Any:
    if isinstance(value, list):
        return [_wrapped(one) for one in value]
    return Row(value) if isinstance(value, dict) else value


def _source(found: re.Match[str]) -> Source:
    words = " ".join(found["source"].split())
    named = KIND.fullmatch(words)
    if named is None:
        raise ValueError(f"{words!r} must be a source: FILE.json: .., code: .., paper: .., or a test's id.")
    kind, text = named["kind"] or named["file"], named["text"] or named["test"]
    return Source(found["number"], found["unit"], kind, text)


def about(page: Path, *files: str) -> str:
    """Says on what, with which versions and when files were made, which are old, and links them."""
    made: dict[str, list[str]] = {}
    for file in files:
        link = os.path.relpath(RESULTS / file, page.parent)
        made.setdefault(_about(read_json(RESULTS / file)), []).append(f"[data]({link})")
    parts = (f"{when} ({', '.join(links)})" for when, links in made.items())
    return f"*{'; '.join(parts)}.*"


def _about(document: dict[str, Any]) -> str:
    every = [found for _, found in _dictionaries(document)]
    days = sorted({found["date"][:10] for found in every if isinstance(found.get("date"), str)})
    versions = sorted({found["dllm_jax"] for found in every if "dllm_jax" in found})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    device = document["device"].removeprefix("none: ")
    device = "CPU" if device.lower().startswith("cpu") else device
    old = "" if age(versions[0]) < OLD else ", not repeated since"
    return f"{device}, jax {document['jax']}, dllm_jax {', '.join(versions)}, {when}{old}"


OLD = 2  # minor versions after which a page says that its rows are old


def age(version: str) -> int:
    """Minor versions between a version and this one; releases before 1.0 only."""
    minor = lambda text: int(text.split(".")[1])
    return minor(dj.__version__) - minor(version)


def _of_code() -> dict[str, Any]:
    """The names of an expression over the library: its own, and sizes of models in bfloat16."""
    leaves = lambda model: jax.tree.leaves(model.params)
    return vars(dj) | {
        "parameters": lambda name: sum(leaf.size for leaf in leaves(dj.load(dj.bundled.path(name)))),
        "gigabytes": lambda name: sum(2 * leaf.size for leaf in leaves(dj.abstract(name))) / 1e9,
        "spec": dj.presets.model_spec,
        "usable": importlib.import_module("dllm_jax.roofline.predict").USABLE,
    }


# Numbers that are neither measured nor predicted nor counted, by class: a number inside of a match is free.
_N = r"\d[\d ]*(?:\.\d+)?"
_MORE = rf"(?:(?:, | and | or | to | x ){_N})*"
_SETTING = (
    r"prompts?|[Bb]locks?|block length|lengths?|[Bb]atch|batch size|budgets?|slots|seed|temperature|"
    r"confidence|"
    r"windows?|width|gamma|intervals?|canvas|chains|size|rank|positions?|token|image|step|layers?|dp|tp|chips"
)
_UNIT = (
    "tokens?|positions|blocks?|prompts?|questions?|slots|layers|heads|devices|chips|sequences|look-ups|links|"
    "letters|values|pictures|images?|masks?|experts|groups|held-out|steps|turns|branches|draws|digits|bits|per|"
    "times|requests|text|colors|examples|cells|chains|seeds"
)
FREE = {
    "version": r"(?:[Vv]ersions?|below|jax|Python|CUDA|transformers|driver|libtpu|dllm_jax|lm_eval|tunix)"
    r"(?: (?:>=|below|is|was))? \d[\w.]*(?:(?: and| or|,) \d[\w.]*)*(?: or newer)?",
    "date": r"\d{4}-\d\d-\d\d|\b\d{1,2}(?: and \d{1,2})? (?:November|December) ?\d{0,4}|\b20[12]\d\b",
    "arXiv id": r"\b\d{4}\.\d{4,5}\b",
    "place in a publication": r"\b(?:[Tt]ables?|[Ff]igures?|equations?|algorithms?|sections?) \d+\w?",
    "number of an item or a note": r"(?:^|\s)\d+\. (?=[\[A-Z`*])|\(\d+\)|exit code \d|starts? at \d",
    "range or formula": r"\d+-bit|\[0, 1\]|\b0 \.\. |[a-z] ?[-+] ?\d\b|\d [-+] \w|95% interval",
    "setting of the example": rf"\b(?:{_SETTING})(?: of| at| is| =)? {_N}{_MORE}"
    rf"|{_N}{_MORE}(?: (?:generated|held-out|new|prompt|denoising|consecutive))? (?:{_UNIT})\b(?!/)",
}
TOKEN = re.compile(r"(?<![\w.\-/^+])(\d+(?: \d{3})*(?:\.\d+)?)(?:%|x\b)?(?!\w)")


def bare(text: str) -> list[str]:
    """The numbers of a page that have no source and are not free, each with the words around it.

    Code, links, made tables and signatures are left out.
    """
    for pattern in (MADE, re.compile(r"^(```|~~~).*?^\1|^ {4,}\S.*?$", re.MULTILINE | re.DOTALL)):
        text = pattern.sub("", text)
    text = re.sub(r"`[^`\n]*`", "`code`", re.sub(r"\]\([^)]*\)", "]", SOURCED.sub("_", text)))
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = re.sub(r"(?<!\n)\n(?![\n|*-])", " ", text)  # sentences go on in the next line
    spans = [found.span() for free in FREE.values() for found in re.finditer(free, lines, re.MULTILINE)]
    inside = lambda at: any(first <= at < last for first, last in spans)
    found = [number for number in TOKEN.finditer(lines) if not inside(number.start())]
    return [lines[max(0, one.start() - 30) : one.end() + 20].replace("\n", " ") for one in found]
