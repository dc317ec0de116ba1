"""A series of numbers over steps that never grows beyond a limit: when it is full, every second one is left out."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

MOST_VALUES = 4_000
"""The most values of a series; of more, every 2nd, 4th, … in even distances, the last one always."""


@dataclass(slots=True)
class Thinned:
    """Values at steps, in the order in which they came; values of one step are one, the highest."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    stride: int = 1
    """Each kept value stands for so many, of which it is the highest."""
    _num_of_last: int = 0

    def add(self, step: int, value: float) -> None:
        """Take a value at a step."""
        if self.steps and (step == self.steps[-1] or self._num_of_last < self.stride):
            self._num_of_last += step != self.steps[-1]
            self.values[-1] = max(self.values[-1], value)
            self.steps[-1] = step
            return
        if len(self.steps) >= MOST_VALUES:
            self._halve()
        self.steps.append(step)
        self.values.append(value)
        self._num_of_last = 1

    def extend(self, later: Thinned) -> None:
        """Take the values of a later part."""
        for step, value in zip(later.steps, later.values, strict=True):
            self.add(step, value)

    def _halve(self) -> None:
        pairs = range(0, len(self.steps) - 1, 2)
        self.values = array("d", (max(self.values[row], self.values[row + 1]) for row in pairs))
        self.steps = array("q", (self.steps[row + 1] for row in pairs))
        self.stride *= 2
