"""Compares two records: differences with bootstrap confidence intervals, paired by question."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Gt, Lt
from jaxtyping import Float
from numpy.typing import ArrayLike

from dllm_jax.eval.results.record import changed
from dllm_jax.eval.results.schema import EvaluationRecord
from dllm_jax.options import check_argument

CONFIDENCE = 0.95  # of intervals
COSTS = {
    "forwards": "forwards",
    "computed": "positions computed",
    "tokens": "tokens",
    "seconds": "seconds, without compilation",
}


class Difference(NamedTuple):
    """Difference of mean scores, B minus A, over the requests in both.

    Attributes:
      group: the task; "average" is the mean over tasks.
      count: pairs of requests.
      a: mean score of A.
      b: mean score of B.
      difference: b - a.
      low: lower end of its confidence interval.
      high: upper end.
    """

    group: str
    count: int
    a: float
    b: float
    difference: float
    low: float
    high: float


class RecordComparison(NamedTuple):
    """Result of `compare`.

    Attributes:
      scores: per group, then the average if there are several groups.
      same: fraction of pairs with equal answers; a request that failed has none.
      unpaired: requests in only one of the two, or of the same name but with different questions.
      costs: Mean costs (A, B) by name, over the pairs in which neither request failed.
      settings: Settings (A, B) that differ, by name.
    """

    scores: list[Difference]
    same: float
    unpaired: int
    costs: dict[str, tuple[float, float]]
    settings: dict[str, tuple[Any, Any]]


def compare_records(
    a: EvaluationRecord, b: EvaluationRecord, confidence: float = 0.95, draws: int = 10_000, seed: int = 0
) -> RecordComparison:
    """Compares two records on the requests in both: of equal group, id, prompt and references.

    Args:
      a: First record (`dllm_jax.eval.results.record.read`).
      b: Second record.
      confidence: Confidence level of the percentile intervals.
      draws: number of bootstrap resamples of each group's pairs.
      seed: Random seed of the resampling.

    Raises:
      ValueError: no question in common, the kinds differ, or a bad confidence.
    """
    check_argument("confidence", confidence, Annotated[float, Gt(0), Lt(1)])
    if a["kind"] != b["kind"]:
        raise ValueError(f"A is a result of {a['kind']}, B of {b['kind']}: they have no scores in common")
    # Requests pair by name, and only if they asked the same: another seed gives other questions equal names.
    mine, theirs = ({(row["group"], row["id"]): row for row in record["requests"]} for record in (a, b))
    named: list[tuple[Any, Any]] = [(row, theirs[name]) for name, row in mine.items() if name in theirs]
    pairs = [(x, y) for x, y in named if x["question"] == y["question"]]
    differ = changed(a, b)
    if not named:
        raise ValueError("A and B have no request in common")
    if not pairs:
        first, settings = named[0][0], [name for name in differ if name.startswith("settings.")]
        listed = ", ".join(f"{name}: {differ[name][0]} and {differ[name][1]}" for name in settings)
        raise ValueError(
            f"A and B ask different questions: the prompts or references of all {len(named)} requests of "
            f"equal name differ, e.g. of {first['group']} {first['id']}; "
            f"{listed or 'the settings are the same'}"
        )

    # A failed request counts in the scores, as 0; what it would have cost is not known.
    good = [pair for pair in pairs if pair[0]["error"] is None and pair[1]["error"] is None]
    mean = lambda name, side: float(np.mean([pair[side][name] for pair in good]))
    return RecordComparison(
        scores=_differences(pairs, confidence, draws, seed),
        same=sum(x["answer"] == y["answer"] for x, y in good) / len(pairs),
        unpaired=len(mine) + len(theirs) - 2 * len(pairs),
        costs={name: (mean(name, 0), mean(name, 1)) for name in (COSTS if good else ())},
        settings=differ,
    )


def _differences(
    pairs: Sequence[tuple[Any, Any]], confidence: float, draws: int, seed: int
) -> list[Difference]:
    """Per group, with the percentile interval of resampled pairs; the average is over groups."""
    scores = dict[str, list[tuple[float, float]]]()
    for x, y in pairs:
        scores.setdefault(x["group"], []).append((x["score"], y["score"]))
    groups = {name: [np.asarray(pairs, np.float64)] for name, pairs in scores.items()}
    # However many requests each group has.
    if len(groups) > 1:
        groups["average"] = [pairs for (pairs,) in groups.values()]
    differences = []
    for name, of in groups.items():
        a, b = np.mean([pairs.mean(axis=0) for pairs in of], axis=0).tolist()
        # Of each group the pairs are resampled, not A and B apart.
        _, low, high = estimate([pairs[:, 1] - pairs[:, 0] for pairs in of], confidence, draws, seed)
        differences.append(Difference(name, sum(map(len, of)), a, b, b - a, low, high))
    return differences


def estimate(
    groups: Sequence[ArrayLike], confidence: float = CONFIDENCE, draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """The average of the means of groups of numbers, and the ends of its percentile bootstrap interval."""
    values = [np.asarray(numbers, np.float64) for numbers in groups]
    resampled = [
        bootstrap(numbers, draws, np.random.default_rng(seed + i)) for i, numbers in enumerate(values)
    ]
    ends = np.percentile(np.mean(resampled, axis=0), (50 * (1 - confidence), 50 * (1 + confidence)))
    return float(np.mean([numbers.mean() for numbers in values])), *ends.tolist()


def bootstrap(values: Float[np.ndarray, "n"], draws: int, rng: np.random.Generator) -> Float[np.ndarray, "t"]:
    """Means of `draws` resamples with replacement; computed in chunks to bound memory."""
    chunks = [min(512, draws - start) for start in range(0, draws, 512)]
    return np.concatenate([values[rng.integers(len(values), size=(n, len(values)))].mean(1) for n in chunks])
