"""Style check of docstrings, comments and reader pages; `python -m tests.test_prose` prints what is wrong."""

import ast
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = "dllm_jax", "pallas_kernels", "convert", "bench", "examples"
LONGEST = 25  # words of a sentence on a page for readers
# At most: docstrings and entries that begin wrongly, lines of comments and docstrings with words to replace,
# longer sentences, mean words of all and of one page's sentences, words (with a letter) of README and docs
# without docs/dev, docs/reference and generated tables; variables whose names are no nouns.
BARS = {
    "headless": 5, "dangling": 10, "fillers": 5, "vague": 50,
    "long": 0, "mean": 14, "worst": 16, "words": 17_000,
}  # fmt: skip
VAGUE = {"found", "own", "some", "one", "held", "kept"}
TERMS = (
    "continuous batching", "max_new_tokens", "gen_length", "semi-autoregressive", "parallel decoding",
    "KV pairs", "quantization",
)  # fmt: skip
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
ENTRY = re.compile(r"^ +\*{0,2}\w[\w, *`]*(?: \(.*?\))?: (?:of|as|see)\b", re.MULTILINE)
# Write: after, next to, compared with, again.
FILLERS = re.compile(r"\b(behind|beside|anew|lest)\b(?!:)", re.IGNORECASE)
OF_COMMENTS = re.compile(rf"{FILLERS.pattern}|\b(whatever|in the place of)\b", re.IGNORECASE)
SECTION = re.compile(r"^( *)(?:Args|Attributes):\n((?:\1 +.*\n|\s*\n)*)", re.MULTILINE)


def docstrings() -> list[tuple[str, str]]:
    """Place and text of every docstring of the packages."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
                if text:
                    line = getattr(node, "lineno", 1)
                    found.append((f"{path.relative_to(ROOT)}:{line}", text))
    return found


def fillers(documented: list[tuple[str, str]]) -> list[str]:
    """Docstrings, and comments of packages and tests, with words that the style sheet replaces."""
    found = [
        f"{place}: {line.strip()}"
        for place, text in documented
        for line in text.splitlines()
        if FILLERS.search(line)
    ]
    for path in sorted(path for package in (*PACKAGES, "tests") for path in (ROOT / package).rglob("*.py")):
        with path.open("rb") as file:
            comments = [t for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT]
        found += [
            f"{path.relative_to(ROOT)}:{c.start[0]}: {c.string}"
            for c in comments
            if OF_COMMENTS.search(c.string)
        ]
    return found


def headless(documented: list[tuple[str, str]]) -> list[str]:
    """Docstrings that begin with What, Which or Who."""
    return [f"{place}: {text[:60]}" for place, text in documented if re.match(r"(What|Which|Who)\b", text)]


def dangling(documented: list[tuple[str, str]]) -> list[str]:
    """Entries of Args and Attributes that begin with "of", "as" or "see"."""
    return [
        f"{place}: {entry.strip()}"
        for place, text in documented
        for section in SECTION.findall(f"{text}\n")
        for entry in ENTRY.findall(section[1])
    ]


def vague() -> list[str]:
    """Variables and arguments of the packages whose names say nothing of what they hold; fields aside."""
    places = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        fields = {
            id(line.target)
            for node in nodes
            if isinstance(node, ast.ClassDef)
            for line in node.body
            if isinstance(line, ast.AnnAssign)
        }
        for node in nodes:
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
            places += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}"] if name in VAGUE else []
    return places


def pages() -> list[Path]:
    """README and docs, without docs/dev."""
    written = [path for path in (ROOT / "docs").rglob("*.md") if "dev" not in path.relative_to(ROOT).parts]
    return [ROOT / "README.md", *sorted(written)]


def sentences(markdown: str) -> list[str]:
    """Sentences of a page, without code blocks, tables, directives and the targets of links."""
    text = re.sub(r"^(```|~~~).*?^\1", "\n\n", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *\||:::| {4,}\S).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|#+|>) )", text)
    blocks = [re.sub(r"^\s*(?:[-*]|\d+\.|>) ", "", block) for block in blocks if not block.startswith("#")]
    parts = [re.split(r"(?<=[.!?])[*)\]]*\s+", " ".join(block.split())) for block in blocks]
    return [part for block in parts for part in block if re.search(r"\w", part)]


def without_tables(text: str) -> str:
    """A page without the tables that commands write or print, and without comments."""
    text = re.sub(r"<!-- (table|printed): .*?<!-- end of table -->", "", text, flags=re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def measured() -> tuple[dict[Path, tuple[int, list[int]]], list[str]]:
    """Per page its words and those of each sentence; and the sentences that are too long."""
    counted, long = {}, []
    for page in pages():
        text = without_tables(page.read_text())
        found = sentences(text)
        size = sum(bool(re.search("[A-Za-z]", word)) for word in text.split())
        counted[page] = size, [words(sentence) for sentence in found]
        long += [f"{page.relative_to(ROOT)}: {one}" for one in found if words(one) > LONGEST]
    return counted, long


def report() -> dict[str, float]:
    """Prints the counts of each page and what the checks find; returns what `BARS` bounds."""
    counted, long = measured()
    means = {page: sum(found) / len(found) for page, (_, found) in counted.items() if found}
    for page, (size, _) in counted.items():
        print(f"{page.relative_to(ROOT)!s:45} {size:6} words {means.get(page, 0):5.1f} per sentence")
    documented = docstrings()
    first, entries, filled = headless(documented), dangling(documented), fillers(documented)
    print(*long, *first, *entries, *filled, *(names := vague()), sep="\n")
    lengths = [length for _, found in counted.values() for length in found]
    found = {"headless": len(first), "dangling": len(entries), "fillers": len(filled), "long": len(long)}
    found["vague"] = len(names)
    found |= {"mean": sum(lengths) / len(lengths), "worst": max(means.values())}
    found["words"] = sum(size for page, (size, _) in counted.items() if "reference" not in page.parts)
    print(found)
    return found


def test_words_keep_to_the_style():
    found = report()
    assert {name: value for name, value in found.items() if value > BARS[name]} == {}
    text = " ".join(page.read_text() for page in pages())
    assert [term for term in TERMS if term not in text] == []


def test_names_of_tests_begin_with_their_subject():
    named = re.compile(r"^def (test_(?:what|whatever|they|those|who|which)_\w+)", re.MULTILINE)
    assert [name for path in (ROOT / "tests").glob("*.py") for name in named.findall(path.read_text())] == []


if __name__ == "__main__":
    report()
