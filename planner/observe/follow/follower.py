"""Follows a run line by line: holds each step against the band, and says where the run stands when asked."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.answer import Plan
from planner.errors import SpecError
from planner.observe.describe import described
from planner.observe.follow.band import Band, Watch
from planner.observe.follow.window import KEPT_ROWS, keep_last, last_rows
from planner.observe.judge import (
    RUN_FRACTION,
    differences,
    judged,
    judged_alone,
    judged_beside,
    of_run,
    predicted,
    verdict_of,
)
from planner.observe.measured import Source
from planner.observe.observation import Observation, Observed, Prediction
from planner.observe.reader import Reader, trainer_of
from planner.observe.record import Record

LEARNED_STEPS, LEARNED_ROWS = 50, 10
"""Steady steps after the warm-up, and lines of them, by which a run without a prediction says its own band."""
OWN_FRACTION = 0.05
"""Least distance of a band from the run's own first steps: spells of a minute in which steps take 2 to 4% longer come
and go in MLPerf's logs (docs/OBSERVE_LIVE.md)."""
LEAST_WINDOW_STEPS = 100
EXPLAINED = {"checkpoint", "evaluation", "gc"}
"""Marks of a row that say why it may be long."""
Expected = tuple[Plan | Observed | None, str]
"""A plan or an earlier run, and where it is from."""


@dataclass(slots=True)
class Totals:
    """Counts over the whole run, beyond the rows that are kept."""

    rows: int = 0
    steps: int = 0
    restarts: int = 0
    lost_steps: int = 0
    checkpoint_step: int | None = None
    evaluation_step: int | None = None
    first_steady_s: float | None = None
    """The median of the first steady steps."""


@dataclass
class Follower:
    """A run that is followed."""

    where: str
    """The log as messages name it."""
    watch: Watch
    expected: Callable[[Observation], Expected]
    """Asked once, when the first steps are known: the price of what the log or the options say."""
    totals: Totals = field(default_factory=Totals)
    plan: Plan | None = None
    earlier: Observed | None = None
    """The earlier run that it is held against, its own first steps where nothing else is known."""
    prediction: Prediction | None = None
    expected_source: str = ""

    def __post_init__(self) -> None:
        self._reader = Reader(self.where)
        self._grammar = ""
        self._seen = 0
        self._seen_backs = 0
        self._is_asked = self._is_learned = False
        self._seq_length: int | None = None

    def feed(self, line: bytes) -> bool:
        """Take a line; true where it showed a step. Raises SpecError for a log of another job than the plan's."""
        matched = self._reader.num_matched
        self._reader.feed((line,))
        if self._reader.num_matched == matched:
            return False
        record = self._reader.leading()
        if record.grammar != self._grammar:
            self._grammar, self._seen, self._seen_backs = record.grammar, 0, 0
            self.totals = Totals()
        if len(record.numbers) <= self._seen:
            return False
        if not self._is_asked:
            self._ask()
        for row in range(self._seen, len(record.numbers)):
            self._take(record, row)
        self._seen = len(record.numbers)
        if self.totals.first_steady_s is None:
            self._learn()
        elif self.is_own and self.watch.rings and self.watch.side < 0:
            self._learn_again()
        if self._seen >= 2 * KEPT_ROWS:
            self._forget()
        return True

    def _take(self, record: Record, row: int) -> None:
        totals, covers = self.totals, record.covers[row]
        if len(record.backs) > self._seen_backs:
            first, end = record.backs[-1].lost_rows
            totals.restarts += 1
            totals.lost_steps += sum(record.covers[first:end])
            self._seen_backs = len(record.backs)
            self.watch.start()
        marks = record.marks.get(row, set())
        before = record.numbers[row - 1] if row else record.numbers[row] - covers
        if "checkpoint" in marks:
            totals.checkpoint_step = before
        if "evaluation" in marks:
            totals.evaluation_step = before
        totals.rows += 1
        totals.steps += covers
        self.watch.take(record.seconds[row], covers, bool(marks & EXPLAINED))

    def _forget(self) -> None:
        cut = keep_last(self._reader.leading(), KEPT_ROWS)
        for record in self._reader.all_records():
            keep_last(record, KEPT_ROWS)
        self._seen -= cut
        self._seen_backs = len(self._reader.leading().backs)

    def record(self) -> Record:
        """A finished copy of the rows that are kept."""
        return copy.deepcopy(self._reader).record()

    def observation(self, record: Record) -> Observation:
        """The observation of a record of this log; it is completed thereby, and no other may be made of it."""
        source = Source(path=self.where, format=record.grammar)
        return described(record, trainer_of(record.grammar), (source,))

    def _ask(self) -> None:
        """Find what the run is held against."""
        self._is_asked = True
        observation = self.observation(self.record())
        self._seq_length = observation.facts.seq_length
        self.watch.precision_fraction = observation.step_s_precision_fraction
        expected, source = self.expected(observation)
        if isinstance(expected, Plan):
            if differing := differences(observation, expected):
                raise SpecError(
                    f"{self.where}: is of another job than {source}: {'; '.join(differing)}",
                    "name the plan that the run was launched from, or leave --plan out",
                )
            self.plan = expected.model_copy(update={"alternatives": (), "search": None})
            self._hold_against(predicted(expected, source), source)
        elif expected is not None:
            self.earlier = expected
            self._hold_against(of_run(expected, source), source)

    def _hold_against(self, prediction: Prediction, source: str) -> None:
        step_s = prediction.step_s
        low_s, high_s = prediction.step_s_interval or (step_s * (1 - RUN_FRACTION), step_s * (1 + RUN_FRACTION))
        self.prediction, self.expected_source = prediction, source
        self.watch.settle(Band(low_s, high_s, source))

    def _learn(self) -> None:
        """The first steady steps, and the band where nothing else says one."""
        if self.totals.steps < LEARNED_STEPS or self.totals.rows < LEARNED_ROWS:
            return
        first = self.observation(self.record())
        if first.num_steps - first.num_warmup_steps < LEARNED_STEPS:
            return
        self.totals.first_steady_s = first.step_s
        if self.watch.band is None:
            self._own(first, f"the run's own first {first.num_steps:,} steps")

    @property
    def is_own(self) -> bool:
        """True where nothing but the run's own steps says its band."""
        return self.plan is None and self._is_learned

    def _learn_again(self) -> None:
        """Take the last steps for the band: a run that became faster had not settled when it was learned."""
        record = self.record()
        last = self.observation(last_rows(record, max(self.watch.allowed_steps, LEARNED_ROWS)))
        self._own(last, f"the run's own steps until {record.numbers[-1]:,}")

    def _own(self, steady: Observation, source: str) -> None:
        self._is_learned = True
        self.totals.first_steady_s = steady.step_s
        self.earlier = Observed(observation=steady)
        known = of_run(self.earlier, source)
        low_s, high_s = known.step_s_interval or (known.step_s, known.step_s)
        own = (min(low_s, known.step_s * (1 - OWN_FRACTION)), max(high_s, known.step_s * (1 + OWN_FRACTION)))
        self._hold_against(known.model_copy(update={"step_s_interval": own}), source)

    def last_step(self, total_tokens: float | None) -> tuple[int, int] | None:
        """The number of the last step made, and of the run's last one, by its log or by its tokens."""
        record, plan = self._reader.leading(), self.plan
        if not record.numbers:
            return None
        facts = record.job_facts()
        tokens = total_tokens or (plan.training.tokens if plan else None)
        batch = facts.global_batch_size or (plan.training.global_batch_size if plan else None)
        length = facts.seq_length or (plan.training.seq_length if plan else self._seq_length)
        if facts.num_steps_asked:
            return record.numbers[-1], facts.num_steps_asked
        if tokens and batch and length:
            return record.numbers[-1], math.ceil(tokens / (batch * length))
        return None

    @property
    def line_s(self) -> float:
        """Seconds of the steps that the last line of steps covers."""
        record = self._reader.leading()
        return record.seconds[-1] * record.covers[-1] if record.numbers else 0.0

    def window_rows(self, record: Record) -> int:
        """Rows of the last steps that are judged: those out of the band, else five times as many as ring the alarm."""
        steps, rows = self.watch.out_steps or max(LEAST_WINDOW_STEPS, 5 * self.watch.allowed_steps), 0
        while rows < len(record.numbers) and steps > 0:
            rows += 1
            steps -= record.covers[-rows]
        # the median of five was out when three of them were
        return min(rows + 2, len(record.numbers)) if self.watch.out_steps else rows

    def window(self, record: Record) -> Observation:
        """The observation of the last steps."""
        return self.observation(last_rows(record, self.window_rows(record)))

    def is_worth_a_cause(self, window: Observation) -> bool:
        """True where the last steps are not as expected: what is in order needs no cause."""
        prediction = self.prediction
        if prediction is None:
            return False
        return self.watch.side != 0 or verdict_of(window, prediction)[0] not in (None, "expected")

    def judged(self, observation: Observation) -> Observed:
        """The last steps, or all, beside what the run is held against, with the causes that they show."""
        if self.plan is not None:
            return judged(observation, self.plan, self.expected_source)
        if self.earlier is not None:
            return judged_beside(observation, self.earlier, self.expected_source)
        return judged_alone(observation)
