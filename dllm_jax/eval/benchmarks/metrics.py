"""Scores of answers in [0, 1], as published, oddities included: they are compared with published ones.

First those of LongBench (github.com/THUDM/LongBench at 2e00731, metrics.py and eval.py); `score` takes the
best over a sample's references. Then those of questions about images, as published with the data sets and
as lmms-eval takes them.
"""

import collections
import difflib
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, Literal

from dllm_jax.options import shown

TOLERANCE = 0.05  # of numbers, relative to the reference
THRESHOLD = 0.5  # similarities below it are 0
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Alignment = Literal["difflib", "indel"]
Metric = Callable[[str, str], float]


def f1(prediction: str, reference: str) -> float:
    """F1 of the two multisets of words; case, ASCII punctuation and articles are ignored."""
    # Multisets: a word that occurs twice in both counts twice.
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
        scores: Any = Rouge(metrics=["rouge-l"]).get_scores([prediction], [reference], avg=True)
        return scores["rouge-l"]["f"]
    except (ValueError, ZeroDivisionError, RecursionError):
        return 0.0


def edit_similarity(prediction: str, reference: str, alignment: Alignment = "difflib") -> float:
    """Similarity of the first line of code and the reference, rounded to whole percents.

    Args:
      prediction: Predicted code; its first line without a backtick, "#" or "//" is compared, or "" if there
        is none.
      reference: the next line of code.
      alignment: "difflib" is what LongBench's requirements give (fuzzywuzzy alone); "indel" is what the same
        call gives where python-Levenshtein is also installed. They differ by some percents.
    """
    # Models put fences and comments in front of the line that is asked for.
    lines = prediction.lstrip("\n").split("\n")
    line = next((text for text in lines if not re.search("`|#|//", text)), "")
    total = len(line) + len(reference)
    if alignment == "difflib":
        return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100
    from rapidfuzz.distance import Indel  # in the `eval` extra

    # Twice the longest common subsequence over the summed lengths. `Indel.normalized_similarity` is one minus
    # the distance's fraction: for halves of a percent, its last bits round the other way.
    return round(100 * (total - Indel.distance(line, reference)) / total) / 100 if total else 1.0


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / number of class names found in the prediction, if the right one is among them; else 0.

    Names that are part of the right one are dropped. The published loop deletes from the list it iterates
    over and so skips the name after a dropped one; so does this.
    """
    named = [name for name in classes if name in prediction]
    # A `for` over the list that is being changed, as published, in other words.
    i = 0
    while i < len(named):
        if named[i] in reference and named[i] != reference:
            named.remove(named[i])
        i += 1
    return 1.0 / len(named) if reference in named else 0.0


def count_score(prediction: str, reference: str) -> float:
    """Fraction of the prediction's numbers that equal the reference, compared as strings."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """`count` of the paragraph's number.

    Raises:
      ValueError: the reference is not "Paragraph N".
    """
    number = re.search(r"Paragraph (\d+)", reference)
    if number is None:
        raise ValueError(f"reference {shown(reference)} does not name a paragraph ('Paragraph 7')")
    return count_score(prediction, number[1])


def score(metric: Metric, prediction: str, references: Sequence[str]) -> float:
    """The metric's best value over the references; 0 without references."""
    return max([0.0, *(metric(prediction, reference) for reference in references)])


def relaxed(answer: str, reference: str) -> float:
    """ChartQA's relaxed accuracy (arXiv:2203.10244, section 5.1): 1 for numbers within 5 % of the reference.

    Texts must be equal but for their case. "50%" is the number 0.5. Against a reference of 0, for which no
    number is within 5 %, texts are compared.
    """
    ours, wanted = _number(answer), _number(reference)
    if ours is not None and wanted:
        return float(abs(ours - wanted) / abs(wanted) <= TOLERANCE)
    return float(answer.lower() == reference.lower())


def _number(text: str) -> float | None:
    """The number that a text is, None if it is none."""
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def anls(answer: str, reference: str) -> float:
    """Normalized Levenshtein similarity of DocVQA and InfoVQA (arXiv:1907.00490); 0 below a half.

    Case and repeated white space do not count. The mean over questions, each with the best of its references,
    is ANLS. At exactly a half the paper's formula gives 0; this gives a half, as lmms-eval does.
    """
    similarity = levenshtein(*(" ".join(text.lower().split()) for text in (answer, reference)))
    return similarity if similarity >= THRESHOLD else 0.0


def levenshtein(answer: str, reference: str) -> float:
    """Similarity of texts: one minus the edit distance over the longer length; 1 for two empty texts."""
    from rapidfuzz.distance import Levenshtein  # in the `eval` extra

    return Levenshtein.normalized_similarity(answer, reference)


def exact_score(answer: str, reference: str) -> float:
    """1 for equal texts; case and repeated white space do not count."""
    return float(answer.lower().split() == reference.lower().split())


def letter(answer: str, reference: str, choices: Sequence[str]) -> float:
    """1 if an answer names the right one of the choices, by its letter or by its text.

    Args:
      answer: what comes first of these counts: "B" alone; a letter in front, as in "B. a cat"; a letter in
        brackets; the text of a choice; a letter among words.
      reference: the letter of the right choice.
      choices: texts of A, B, C, ...
    """
    return float(chosen_option(answer, choices) == reference)


def chosen_option(answer: str, choices: Sequence[str]) -> str | None:
    """The letter of the choice that an answer names, None if it names none; nothing is guessed."""
    # The forms of `letter`, in this order: the first one that is found counts.
    letters = LETTERS[: len(choices)]
    in_front = re.match(rf"\(?([{letters}])(?:[).:,]|$)", answer)
    in_brackets = re.search(rf"\(([{letters}])\)", answer)
    for match in (in_front, in_brackets):
        if match:
            return match[1]
    for name, text in zip(letters, choices, strict=True):
        if exact_score(answer, text):
            return name
    among_words = re.search(rf"(?<![\w'])([{letters}])(?![\w'])", answer)
    return among_words[1] if among_words else None
