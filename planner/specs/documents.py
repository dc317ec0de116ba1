"""Distributions of document lengths, as people state them: a list, a lognormal, or percentiles."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from pydantic import Field

from planner.errors import SpecError
from planner.specs.base import PositiveFloat, Spec
from planner.specs.problems import checked
from planner.specs.reading import kind_of
from planner.specs.training import DocumentLength

_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?|100)")
_LEAST_SHARE, _STEP = 1e-9, 0.125
_NUM_QUANTILES = 200
_FORMS = "a list of {length, share}, or {mean, sigma}, or percentiles {p10, p50, p90, …}"


class LogNormal(Spec):
    """Lengths whose logarithms are normal."""

    mean: PositiveFloat = Field(ge=1, le=2**31)
    """Mean length in tokens."""
    sigma: PositiveFloat = Field(le=5)
    """Standard deviation of the natural logarithm."""

    def lengths(self) -> tuple[DocumentLength, ...]:
        """The distribution in steps of an eighth of sigma, as far as tokens are found: a token's length is lognormal
        too, sigma² further up."""
        middle, last = math.log(self.mean) - self.sigma**2 / 2, 6 + self.sigma
        normal, edges = NormalDist(), [-6 + _STEP * step for step in range(math.ceil((last + 6) / _STEP) + 1)]
        shares: dict[int, float] = {}
        for low in edges[:-1]:
            length = max(1, round(math.exp(middle + self.sigma * (low + _STEP / 2))))
            shares[length] = shares.get(length, 0.0) + normal.cdf(low + _STEP) - normal.cdf(low)
        kept = [(length, share) for length, share in shares.items() if share * length > _LEAST_SHARE * self.mean]
        return tuple(DocumentLength(length=min(length, 2**31), share=share) for length, share in kept)


def of_percentiles(lengths: Mapping[float, float]) -> tuple[DocumentLength, ...]:
    """Lengths whose logarithm is straight between percentiles, and no shorter or longer than the outermost ones."""
    points = sorted((percent / 100, math.log(length)) for percent, length in lengths.items())
    shares: dict[int, float] = {}
    for step in range(_NUM_QUANTILES):
        at = (step + 0.5) / _NUM_QUANTILES
        above = next((i for i, (fraction, _) in enumerate(points) if fraction >= at), len(points))
        low, high = points[max(above - 1, 0)], points[min(above, len(points) - 1)]
        along = (at - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
        length = round(math.exp(low[1] + along * (high[1] - low[1])))
        shares[length] = shares.get(length, 0.0) + 1 / _NUM_QUANTILES
    return tuple(DocumentLength(length=length, share=share) for length, share in shares.items())


def read_lengths(given: Any, where: str) -> Any:
    """A stated distribution as a list of lengths and shares; lists are left as they are. SpecError naming `where`."""
    if not isinstance(given, dict):
        if not isinstance(given, list):
            raise SpecError(f"{where}: is {kind_of(given)}, no distribution", f"give {_FORMS}")
        return given
    if not given or not all(isinstance(key, str) and _PERCENTILE.fullmatch(key) for key in given):
        if {"mean", "sigma"} & given.keys():
            return [entry.model_dump() for entry in checked(LogNormal, given, where).lengths()]
        raise SpecError(f"{where}: is no distribution", f"give {_FORMS}")
    percentiles = {}
    for key, length in given.items():
        if type(length) not in (int, float) or not 1 <= length <= 2**31:
            raise SpecError(f"{where}.{key}: {length!r:.60} is no length in tokens", f"write {key}: 1000")
        percentiles[float(key[1:])] = float(length)
    ordered = [percentiles[percent] for percent in sorted(percentiles)]
    if ordered != sorted(ordered):
        raise SpecError(f"{where}: a lower percentile is longer than a higher one", "let lengths grow with percentiles")
    return [entry.model_dump() for entry in of_percentiles(percentiles)]
