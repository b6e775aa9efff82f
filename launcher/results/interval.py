"""How well a few measured values tell the median of what they were drawn from. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

CONFIDENCE = 0.834
"""Of intervals that are compared by whether they overlap: two of 83.4 % touch where the difference of two medians with equal errors is
significant at 5 % (1.39 errors each, 1.39 x 2 = 1.96 x sqrt 2; Goldstein and Healy, "The graphical presentation of a collection of means",
Journal of the Royal Statistical Society A 158, 1995). Intervals of 95 % would overlap far beyond that."""


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval that holds the median with ``confidence``, whatever the distribution of ``values``, of which there is one at least.

    The k-th smallest and the k-th largest of n values enclose the median with probability 1 - 2 P(Binomial(n, 1/2) < k); between one k and
    the next the ends are interpolated (Hettmansperger and Sheather, "Confidence intervals based on interpolated order statistics",
    Statistics and Probability Letters 4, 1986). So the interval never reaches beyond the values, one odd value hardly moves it, and it
    narrows with the root of n. Three values or fewer cannot give so much confidence: their whole range is the interval (75 % for three, 50
    % for two).
    """
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0  # the probability of fewer than k values below the median
    while 1 - 2 * (more := outside + _half_binomial(n, k)) >= confidence:
        outside, k = more, k + 1
    if k == 0:
        return ordered[0], ordered[-1]
    share = (1 - 2 * outside - confidence) / (2 * (more - outside))
    inward = (n - k) * share / (k + (n - 2 * k) * share)
    low = ordered[k - 1] + inward * (ordered[k] - ordered[k - 1])
    high = ordered[n - k] + inward * (ordered[n - k - 1] - ordered[n - k])
    return low, high


def _half_binomial(n: int, i: int) -> float:
    """P(X = i) of X ~ Binomial(n, 1/2)."""
    return math.exp(math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2))
