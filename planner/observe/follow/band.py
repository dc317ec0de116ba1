"""When a run has left its band: not by a slow step, nor by a tenth of them, but by many steps in a row.

A step is out where the median of the last five is: three of five have to be, so that single slow ones, and one in ten
of them, are none. Beyond the band's end it has to be by two standard errors of that median, 1.2533 σ / √5, and by what
the printed digits hide; σ follows from the differences of neighbours, median |difference| · 1.4826 / √2, which a shift
of the level does not touch. Steps that the log itself explains (checkpoint, evaluation, garbage collection) are not
counted, and of those after a start the first ones that are out are warm-up, at most as many as the alarm takes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Place = Literal["learning", "warm-up", "in band", "above", "below"]
DEFAULT_STEPS = 20
"""Steps in a row that are out before the alarm: minutes of most jobs, against months of a run; a spell of congestion is
shorter. The false alarms are in docs/OBSERVE.md."""
LEAST_S, FAR_FRACTION = 120.0, 0.2
"""Short steps have to be out for two minutes, unless by a fifth: in MLPerf's logs of steps of half a second, spells of
10 to 90 s in which they take 5 to 10% longer follow evaluations, and pass."""
_WINDOW, _LEAST_ROWS, _NEIGHBOURS = 5, 3, 50
_ERRORS = 2.0
_ERROR_OF_MEDIAN = 1.2533  # of a normal distribution's, in standard deviations over √n
_SIGMA_OF_DIFFERENCE = 1.4826 / math.sqrt(2)


@dataclass(frozen=True, slots=True)
class Band:
    """The seconds of a step that are as they should be."""

    low_s: float
    high_s: float
    source: str


@dataclass(slots=True)
class BandWatch:
    """Counts the steps that a run is out of its band."""

    allowed_steps: int = DEFAULT_STEPS
    band: Band | None = None
    precision_fraction: float = 0.0
    """Half a unit of the last digit that the log prints, as a share of the step."""
    side: int = 0
    """1 where the last steps are above the band, -1 below, 0 inside."""
    out_steps: int = 0
    """Steps in a row on that side."""
    out_s: float = 0.0
    """Seconds of those steps."""
    is_far: bool = False
    """True where the last steps are far beyond the band's end."""
    least_s: float = LEAST_S
    """Seconds that the steps have to take before the alarm, unless they are far out."""
    only_slow: bool = False
    """True where a run below its band rings no alarm."""
    _out_rows: int = 0
    _warm_up_left: int = -1
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _differences: deque[float] = field(default_factory=lambda: deque(maxlen=_NEIGHBOURS))

    def start(self) -> None:
        """The trainer started, or started anew: what comes first may be slow."""
        self._warm_up_left = self.allowed_steps
        self._recent.clear()
        self._reset(0)

    def take(self, seconds: float, covers: int, explained: bool) -> None:
        """Take a row: the mean seconds of as many steps as it covers, which the log may explain."""
        if explained or self._is_warm_up(seconds, covers):
            return
        if self._recent:
            self._differences.append(abs(seconds - self._recent[-1]))
        self._recent.append(seconds)
        if self.band is None or len(self._recent) < self._needed(covers):
            return
        side = self._side_of(median(self._recent), self._error_s())
        if side != self.side:
            self._reset(side)
        if side:
            self.out_steps += covers
            self.out_s += covers * seconds
            self._out_rows += 1
            end_s = self.band.high_s if side > 0 else self.band.low_s
            self.is_far = abs(median(self._recent) / end_s - 1) > FAR_FRACTION

    def settle(self, band: Band) -> None:
        """Take another band; the steps so far count no more."""
        self.band = band
        self._reset(0)

    def _reset(self, side: int) -> None:
        self.side, self.out_steps, self.out_s, self._out_rows, self.is_far = side, 0, 0.0, 0, False

    def _needed(self, covers: int) -> int:
        """Rows whose median counts: five, or three where a row is the mean of so many steps that five take too long."""
        return _WINDOW if covers * _WINDOW <= self.allowed_steps else _LEAST_ROWS

    def _is_warm_up(self, seconds: float, covers: int) -> bool:
        if self._warm_up_left < 0:
            self._warm_up_left = self.allowed_steps
        if self._warm_up_left > 0 and self.band is not None and self._side_of(seconds, 0.0):
            self._warm_up_left = max(0, self._warm_up_left - covers)
            return True
        self._warm_up_left = 0 if self.band is not None else self._warm_up_left
        return False

    def _error_s(self) -> float:
        """The seconds by which the median may miss the level: its standard errors."""
        sigma = _SIGMA_OF_DIFFERENCE * median(self._differences) if self._differences else 0.0
        return _ERRORS * _ERROR_OF_MEDIAN * sigma / math.sqrt(len(self._recent))

    def _side_of(self, seconds: float, slack_s: float) -> int:
        assert self.band is not None
        slack_s += self.precision_fraction * seconds
        return (seconds - slack_s > self.band.high_s) - (seconds + slack_s < self.band.low_s)

    @property
    def place(self) -> Place:
        """The place of the run to its band."""
        if self.band is None:
            return "learning"
        if len(self._recent) == 0:
            return "warm-up"
        return "above" if self.side > 0 else "below" if self.side else "in band"

    @property
    def rings(self) -> bool:
        """True once the run has been out for as many steps as are allowed, and for so long, or far."""
        enough = self.out_steps >= self.allowed_steps and self._out_rows >= _LEAST_ROWS
        return enough and (self.side > 0 or not self.only_slow) and (self.is_far or self.out_s >= self.least_s)
