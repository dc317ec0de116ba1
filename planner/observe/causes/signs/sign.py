"""The type of a sign, and how sure a number makes one."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST, MOST, MOST_BY_ITSELF = 0.01, 0.99, 0.999
"""No measurement makes a pattern surer than this, nor less sure: prices and readers err, and one in a thousand times a
clock, a profiler or a log does."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A pattern that the files can show, and how sure it is there."""

    strength: float
    """Probability that the pattern is there, given the noise of what shows it."""
    says: str
    """A clause with the numbers, such as `rank 3 computes 12% longer than its peers`."""
    seconds: float | None = None
    """Seconds of a step that the pattern accounts for; None where it tells none."""
    where: str = ""
    """The rank, stage or group that it is about."""
    times: float = 1.0
    """How many times as large as what is worth a word, for numbers of the run itself that no price can spoil."""

    @property
    def is_seen(self) -> bool:
        """True where the pattern is likelier there than not."""
        return self.strength > 0.5


def sure(value: float, threshold: float, noise: float, most: float = MOST) -> float:
    """Φ((value − threshold) ÷ noise), the probability that a number with normal noise is above a threshold."""
    if noise <= 0:
        return most if value > threshold else 1 - most
    return min(most, max(1 - most, 0.5 * math.erfc((threshold - value) / (noise * math.sqrt(2)))))


def large(
    value: float, threshold: float, noise: float, says: str, seconds: float | None = None, where: str = ""
) -> Sign:
    """A sign of a number of the run itself: the further above the threshold, the seldomer in a run without a fault."""
    strength = sure(value, threshold, noise, MOST_BY_ITSELF)
    return Sign(strength, says, seconds, where, max(1.0, value / threshold))
