"""The numbers of an answer and the ranges in which they make sense, which a saved file is held against."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

Quantity = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""An amount or a rate: finite, and never below nothing."""
Seconds = Annotated[float, Field(ge=-1e-6, allow_inf_nan=False)]
"""A time; a difference of two may round to a little less than nothing."""
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
"""A whole number of things or bytes."""
Difference = Annotated[float, Field(allow_inf_nan=False)]
"""A difference: it may have either sign."""


def _in_order(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError(f"begins at {ends[0]:g} and ends at {ends[1]:g}")
    return ends


Interval = Annotated[tuple[Seconds, Seconds], AfterValidator(_in_order)]
"""The ends of a range that is meant to hold the true value in 80% of all cases."""
