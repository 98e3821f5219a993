"""LongBench's metrics as published (github.com/THUDM/LongBench at 2e00731, metrics.py and eval.py).

Every metric maps (prediction, reference) to [0, 1], oddities included: scores are meant to be compared with
published ones. `score` is what a sample gets.
"""

import collections
import difflib
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, Literal

Alignment = Literal["difflib", "indel"]
Metric = Callable[[str, str], float]


def f1(prediction: str, reference: str) -> float:
    """Overlap of the two multisets of words, without case, ASCII punctuation and articles."""
    ours, theirs = _words(prediction), _words(reference)
    common = sum((collections.Counter(ours) & collections.Counter(theirs)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L of the package `rouge` 1.0.1 (not the textbook's); 0 where that package raises.

    It compares sets of words of unions of longest common subsequences, so repeated words count once. It
    raises for empty texts, and for sentences so long that its recursion overflows.
    """
    from rouge import Rouge  # in the `eval` extra

    try:
        found: Any = Rouge(metrics=["rouge-l"]).get_scores([prediction], [reference], avg=True)
        return found["rouge-l"]["f"]
    except (ValueError, ZeroDivisionError, RecursionError):
        return 0.0


def edit_similarity(prediction: str, reference: str, alignment: Alignment = "difflib") -> float:
    """Whole percents of similarity of the first line that is code.

    Args:
      prediction: its first line without a backtick, "#" or "//" counts, or nothing.
      reference: the next line of code.
      alignment: "difflib" is what LongBench's requirements give (fuzzywuzzy alone); "indel" what the same
        call gives where python-Levenshtein is installed as well. They differ by some percents.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((text for text in lines if not re.search("`|#|//", text)), "")
    ratio = {"difflib": _difflib_ratio, "indel": _indel_ratio}[alignment]
    return round(100 * ratio(line, reference)) / 100


def _difflib_ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _indel_ratio(a: str, b: str) -> float:
    """Twice the longest common subsequence over the summed lengths."""
    if not a and not b:
        return 1.0
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return 2 * row[-1] / (len(a) + len(b))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / number of class names found if the right one is among them.

    Names that are part of the right one are dropped; the published loop deletes from the list it walks, so
    the name after a dropped one is never looked at, and that is kept.
    """
    found = [name for name in classes if name in prediction]
    i = 0
    while i < len(found):
        if found[i] in reference and found[i] != reference:
            found.remove(found[i])
        i += 1
    return 1.0 / len(found) if reference in found else 0.0


def count(prediction: str, reference: str) -> float:
    """Share of the numbers in the prediction that are the right one, compared as strings."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """`count` of the paragraph's number.

    Raises:
      ValueError: the reference is not "Paragraph N".
    """
    number = re.search(r"Paragraph (\d+)", reference)
    if number is None:
        raise ValueError(f"reference {reference!r} does not name a paragraph ('Paragraph 7')")
    return count(prediction, number[1])


def first_line(prediction: str) -> str:
    """Of the few-shot tasks' predictions only the first line counts."""
    return prediction.lstrip("\n").split("\n")[0]


def score(metric: Metric, prediction: str, references: Sequence[str]) -> float:
    """The best over the references, at least 0."""
    return max([0.0, *(metric(prediction, reference) for reference in references)])


def data_set_score(scores: Sequence[float]) -> float:
    """What is published: 100 times the mean, to two digits."""
    return round(100 * sum(scores) / len(scores), 2)
