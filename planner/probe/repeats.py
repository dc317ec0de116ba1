"""How often a measurement is repeated: so long that clocks are steady, and until its median is sure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

import numpy as np

SURE_FRACTION = 0.01
"""A median is sure when its standard error is at most this share of it."""
STEADY_S = 1.0
"""Seconds of one kind of work after which a GPU's clocks are those of its power limit, and that a figure rests on."""


class Repeats(NamedTuple):
    """The rule that ends repetitions: at least `fewest` of them and `steady_s` in all, then as soon as the median is
    sure, and after `most_s` in any case."""

    fewest: int = 3
    steady_s: float = 0.0
    most_s: float = 0.0

    def suffice(self, num_repeats: int, total_s: float, spread: Callable[[], float | None]) -> bool:
        """True if so many repetitions are enough, which took `total_s` in all. `spread` gives that of their median."""
        if num_repeats < self.fewest or total_s < min(self.steady_s, self.most_s):
            return False
        return total_s >= self.most_s or is_sure(spread())


def is_sure(spread: float | None) -> bool:
    return spread is not None and spread <= SURE_FRACTION


def spread_fraction(values: Sequence[float]) -> float | None:
    """Standard error of the median of `values`, as a share of it; None for one value.

    Half the distance between the values √n / 2 ranks below and above the middle one: an interval of one standard error
    to either side, whatever the distribution is. `values` come in the order of their measurement, so that a drift shows
    as half the difference between the medians of the first and the second half; the larger of the two counts.
    """
    num, middle = len(values), median(values) if values else 0.0
    if num < 2 or middle <= 0:
        return None
    ranks = (num - 1) / 2 - sqrt(num) / 2, (num - 1) / 2 + sqrt(num) / 2
    low, high = np.interp(ranks, np.arange(num), np.sort(values))
    drift = abs(median(values[: num // 2]) - median(values[num - num // 2 :]))
    return float(max(high - low, drift) / 2 / middle)
