"""The steps that a rank runs: to warm up, then to measure, until what they take is sure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from planner.probe.rank.clock import ActionTimes, StepRecord
from planner.probe.repeats import Repeats, spread_fraction
from planner.probe.result import StepSeconds
from planner.probe.run import ProbeRun
from planner.probe.worker.chunk_seconds import chunk_seconds

GROWTH = 1.1


class StepLoop:
    """Counts steps and collects their seconds.

    Warm-up ends after `run.warm_up_steps` and `run.steady_s`, measuring after `run.num_steps` and `run.steady_s`, once
    the medians are sure or the steps took `run.most_s`. `agree` makes one decision of those of all ranks.
    """

    def __init__(self, run: ProbeRun, agree: Callable[[bool], bool] = bool) -> None:
        self.run, self.agree = run, agree
        self.warm_up, self.steps = list[StepSeconds](), list[StepSeconds]()
        self.actions: list[ActionTimes] = []
        """The actions of all measured steps."""
        self.record = StepRecord()
        """The record of the last step."""
        self.next_look = 0.0

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """The number of each step, and the name of its phase. The caller runs it and calls `add`."""
        run = self.run
        for steps, name, repeats in (
            (self.warm_up, "warm-up", Repeats(run.warm_up_steps, run.steady_s, min(run.steady_s, run.most_s))),
            (self.steps, "step {}", Repeats(run.num_steps, run.steady_s, run.most_s)),
        ):
            self.into = steps
            while not self._suffice(repeats):
                yield len(self.warm_up) + len(self.steps), name.format(len(steps))

    def add(self, record: StepRecord, seconds: StepSeconds) -> None:
        """Keep a step's measurements."""
        self.into.append(seconds)
        self.record = record
        self.actions += record.actions if self.into is self.steps else ()

    @property
    def last_cold(self) -> int:
        """The number of the last step that warms up however long steps take."""
        return max(0, self.run.warm_up_steps - 1)

    @property
    def all_steps(self) -> list[StepSeconds]:
        return [*self.warm_up, *self.steps]

    def _suffice(self, repeats: Repeats) -> bool:
        steps_s = [step.step_s for step in self.into]
        enough = repeats.suffice(len(steps_s), sum(steps_s), partial(self._spread, steps_s))
        return self.agree(enough) if self.run.most_s and len(steps_s) >= repeats.fewest else enough

    def _spread(self, steps_s: list[float]) -> float | None:
        """The largest spread of the step and of its chunks; None where the steps are hardly more than at the last
        look, because many short ones take long to sort."""
        if len(steps_s) < self.next_look:
            return None
        self.next_look = GROWTH * len(steps_s)
        spreads = [spread_fraction(steps_s), *(chunk.spread_fraction for chunk in chunk_seconds(self.actions))]
        return max((spread for spread in spreads if spread is not None), default=None)
