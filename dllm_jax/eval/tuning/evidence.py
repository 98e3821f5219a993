"""How sure scores make us: intervals of accuracies, and bounds on paired differences.

Scores lie in [0, 1], right or wrong being the usual case. Two settings answer the same questions, so what is
compared is their difference question by question, which is far less uncertain than either accuracy.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A number and how far it may be off.

    Attributes:
      value: the estimate.
      low: lower end of its interval.
      high: upper end.
    """

    value: float
    low: float
    high: float


def quantile(confidence: float, bounds: int = 1) -> float:
    """The normal quantile of one-sided bounds, all of which hold with this confidence.

    Args:
      confidence: Joint confidence level, in (0, 1).
      bounds: Number of bounds; each gets an equal share of the error probability (Bonferroni). The two ends
        of an interval are two.
    """
    return statistics.NormalDist().inv_cdf(1 - (1 - confidence) / bounds)


def accuracy_estimate(scores: Sequence[float], quantile: float) -> Estimate:
    """The mean score with Wilson's score interval.

    Scores between 0 and 1 vary no more than right and wrong of the same mean: for them it is wider than
    need be.

    Args:
      scores: one or more, each in [0, 1].
      quantile: Quantile of the normal distribution.
    """
    # The scores that a normal test at this level would not reject, around a center drawn toward a half.
    n, mean, z2 = len(scores), statistics.fmean(scores), quantile**2
    center = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = quantile / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    return Estimate(mean, max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half)))


def difference(scores: Sequence[float], others: Sequence[float], quantile: float) -> Estimate:
    """The mean of `scores` minus that of `others`, paired, with an adjusted Wald interval.

    One pair of difference 1 and one of -1 are added before mean and variance are taken (Bonett and Price,
    2012, Journal of Educational and Behavioral Statistics 37: 479-488). A few pairs that all agree are
    thereby no proof that two settings are equally good.

    Args:
      scores: one or more, each in [0, 1].
      others: Scores of the same questions.
      quantile: Quantile of the normal distribution.
    """
    pairs = [a - b for a, b in zip(scores, others, strict=True)]
    # The differences sum to the same with the added pair, which has one of each sign.
    n = len(pairs) + 2
    center = sum(pairs) / n
    variance = (sum(d * d for d in pairs) + 2) / n - center**2
    half = quantile * math.sqrt(variance / n)
    return Estimate(statistics.fmean(pairs), max(-1.0, center - half), min(1.0, center + half))
