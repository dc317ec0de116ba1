"""A job that stands: the seconds until it is back, and what waiting loses against going on with fewer GPUs.

A job that trains at rate v loses nodes at time 0. Either it waits and is as before once they are back, or it goes on
at rate f·v, b seconds after the failure, and returns to its old layout when they are back, for which it saves (s) and
starts and reads (a). Until both are as before, the seconds at rate v that they lose are

    waiting:   max(W, d) + a
    going on:  b + (1 − f)·max(0, W − b) + s + a

with W from the failure until the nodes are back and d until someone notices. Both lose as much at

    W* = b + s / f

and going on loses less for every longer wait. Returning costs s + a in which nothing is trained, and saves 1 − f of
every second after it, so that it pays if the job then runs for longer than (s + a) / (1 − f) seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.answer import Interval
from planner.months.facts import Fact

Number = Any
"""A float, or an array of one for each simulated run."""


def waiting_s(repair_s: Number, detection_s: Number, again_s: Number) -> Number:
    """Seconds of training lost by waiting `repair_s` from the failure on, and starting again."""
    return np.maximum(repair_s, detection_s) + again_s


def going_on_s(repair_s: Number, back_s: Number, rate_fraction: float, return_s: Number) -> Number:
    """Seconds at the old rate that are lost by going on at a fraction of it until the repair, and returning then."""
    return back_s + (1 - rate_fraction) * np.maximum(repair_s - back_s, 0.0) + return_s


def break_even_s(back_s: float, rate_fraction: float, save_s: float) -> float:
    """The wait, counted from the failure, from which on going on loses less than waiting."""
    return back_s + save_s / rate_fraction


def return_pays_s(return_s: float, rate_fraction: float) -> float:
    """Seconds that a job has to run after its return to the old layout for that to pay; infinite if it is no faster."""
    return return_s / (1 - rate_fraction) if rate_fraction < 1 else math.inf


@dataclass(frozen=True, slots=True)
class Standstill:
    """The seconds in which a job stands, by part."""

    parts: Mapping[str, Fact]

    @property
    def value_s(self) -> float:
        return sum(part.value for part in self.parts.values())

    @property
    def interval_s(self) -> Interval:
        """The ends of 80%: parts err independently, so that the squares of their distances add up."""
        below = math.hypot(*(part.value - part.low for part in self.parts.values()))
        above = math.hypot(*(part.high - part.value for part in self.parts.values()))
        return max(0.0, self.value_s - below), self.value_s + above
