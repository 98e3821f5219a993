"""Scores of answers to questions about images, in [0, 1]; of several references the best counts.

As published with the data sets and as lmms-eval takes them, oddities included: scores are meant to be
compared with published ones.
"""

import re
from collections.abc import Sequence

TOLERANCE = 0.05  # of numbers, relative to the reference
THRESHOLD = 0.5  # similarities below it are 0


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
    """Normalised Levenshtein similarity of DocVQA and InfoVQA (arXiv:1907.00490); 0 below a half.

    Case and repeated white space do not count. The mean over questions, each with the best of its references,
    is ANLS. At exactly a half the paper's formula gives 0; this gives a half, as lmms-eval does.
    """
    from rapidfuzz.distance import Levenshtein  # in the `eval` extra

    ours, wanted = (" ".join(text.lower().split()) for text in (answer, reference))
    # The distance over the longer text: 0 for equal texts, 1 for texts without a letter in common.
    longest = max(len(ours), len(wanted))
    similarity = 1 - Levenshtein.distance(ours, wanted) / longest if longest else 1.0
    return similarity if similarity >= THRESHOLD else 0.0


def exact(answer: str, reference: str) -> float:
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
    return float(chosen(answer, choices) == reference)


def chosen(answer: str, choices: Sequence[str]) -> str | None:
    """The letter of the choice that an answer names, None if it names none; nothing is guessed."""
    # The forms of `letter`, in this order: the first one that is found counts.
    letters = LETTERS[: len(choices)]
    in_front = re.match(rf"\(?([{letters}])(?:[).:,]|$)", answer)
    in_brackets = re.search(rf"\(([{letters}])\)", answer)
    for found in (in_front, in_brackets):
        if found:
            return found[1]
    for name, text in zip(letters, choices, strict=True):
        if exact(answer, text):
            return name
    among_words = re.search(rf"(?<![\w'])([{letters}])(?![\w'])", answer)
    return among_words[1] if among_words else None


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
