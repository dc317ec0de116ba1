"""The type of a sign, and how sure a number makes one."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST, MOST = 0.01, 0.99
"""No measurement makes a pattern surer than this, nor less sure: clocks, profilers and logs err, too."""


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

    @property
    def is_seen(self) -> bool:
        """True where the pattern is likelier there than not."""
        return self.strength > 0.5


def sure(value: float, threshold: float, noise: float) -> float:
    """Φ((value − threshold) ÷ noise), the probability that a number with normal noise is above a threshold."""
    if noise <= 0:
        return MOST if value > threshold else LEAST
    return min(MOST, max(LEAST, 0.5 * math.erfc((threshold - value) / (noise * math.sqrt(2)))))
