"""A run that is followed: each step is held against the band, and where the run stands is said when asked.

A step is out where the median of the last five is: three of five have to be, so that single slow ones, and one in ten
of them, are none. Steps that the log itself explains (checkpoint, evaluation, garbage collection) are not counted, and
of those after a start the first ones that are out are warm-up, at most as many as the alarm takes.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from planner.answer import Interval, Plan
from planner.errors import SpecError
from planner.observe.accounts import GAP_TABLE
from planner.observe.describe import described
from planner.observe.formats import trainer_of
from planner.observe.judge import (
    RUN_FRACTION,
    differences,
    judged,
    of_run,
    predicted,
    with_mfu,
)
from planner.observe.lines import LineSource
from planner.observe.log_reader import LogReader
from planner.observe.observation import GapCause, Observation, Observed, SourceFile
from planner.specs.base import Fields, Spec
from planner.specs.expressions import told

Place = Literal["learning", "warm-up", "in band", "above", "below"]
DEFAULT_STEPS = 20
"""Steps in a row that are out before the alarm: minutes of most jobs, against months of a run; a spell of congestion is
shorter. The false alarms are in docs/OBSERVE.md."""
LEAST_S, FAR_FRACTION = 120.0, 0.2
"""Short steps have to be out for two minutes, unless by a fifth: in MLPerf's logs of steps of half a second, spells of
10 to 90 s in which they take 5 to 10% longer follow evaluations, and pass."""
_MEDIAN_OF, _LEAST_ROWS = 5, 3


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
    only_slow: bool = False
    """True where a run below its band rings no alarm."""
    side: int = 0
    """1 where the last steps are above the band, -1 below, 0 inside."""
    out: list[tuple[float, int]] = field(default_factory=list)
    """Rows in a row on that side: the mean seconds of a step, and the steps that each covers."""
    _warm_up_left: int = DEFAULT_STEPS
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_MEDIAN_OF))

    def start(self) -> None:
        """The trainer started, or started anew: what comes first may be slow."""
        self._warm_up_left = self.allowed_steps
        self.side = 0
        self._recent.clear()
        self.out.clear()

    def settle(self, band: Band) -> None:
        """Take another band; the steps so far count no more."""
        self.band = band
        self.side = 0
        self.out.clear()

    def take(self, seconds: float, covers: int, explained: bool) -> None:
        """Take a row: the mean seconds of as many steps as it covers, which the log may explain."""
        if explained:
            return
        if self._warm_up_left > 0 and self.band is not None:
            is_out = self._side_of(seconds) != 0
            self._warm_up_left = max(0, self._warm_up_left - covers) if is_out else 0
            if is_out:
                return
        self._recent.append(seconds)
        # five rows, or three where a row is the mean of so many steps that five take too long
        needed = _MEDIAN_OF if covers * _MEDIAN_OF <= self.allowed_steps else _LEAST_ROWS
        if self.band is None or len(self._recent) < needed:
            return
        if (side := self._side_of(median(self._recent))) != self.side:
            self.side = side
            self.out.clear()
        if side:
            self.out.append((seconds, covers))

    def _side_of(self, seconds: float) -> int:
        assert self.band is not None
        slack_s = self.precision_fraction * seconds
        return (seconds - slack_s > self.band.high_s) - (seconds + slack_s < self.band.low_s)

    @property
    def out_steps(self) -> int:
        """Steps in a row that are out."""
        return sum(covers for _, covers in self.out)

    @property
    def place(self) -> Place:
        """The place of the run to its band."""
        if self.band is None or not self._recent:
            return "learning" if self.band is None else "warm-up"
        return "above" if self.side > 0 else "below" if self.side else "in band"

    @property
    def rings(self) -> bool:
        """True once the run has been out for as many steps as are allowed, and for so long, or far."""
        if self.band is None or self.out_steps < self.allowed_steps or len(self.out) < _LEAST_ROWS:
            return False
        end_s = self.band.high_s if self.side > 0 else self.band.low_s
        is_far = abs(median(self._recent) / end_s - 1) > FAR_FRACTION
        is_long = sum(seconds * covers for seconds, covers in self.out) >= LEAST_S
        return (self.side > 0 or not self.only_slow) and (is_far or is_long)


LEARNED_STEPS, LEARNED_ROWS = 50, 10
"""Steady steps after the warm-up, and lines of them, by which a run without a prediction says its own band."""
OWN_FRACTION = 0.05
"""Least distance of a band from the run's own first steps: spells of a minute in which steps take 2 to 4% longer come
and go in MLPerf's logs (docs/OBSERVE.md). A run that becomes faster than they were is in its band."""
WINDOW_STEPS = 100
"""Last steps that are judged, where fewer are out of the band."""
SILENT_S = 1800.0
"""Seconds without a step that ring the alarm: evaluations and checkpoints take minutes, a hang takes for ever."""
BURST = 50
"""Lines printed about a log that is read faster than it was written; after them every n-th is."""
EXPLAINED = {"checkpoint", "evaluation", "gc"}
"""Marks of a row that say why it may be long."""
Expected = tuple[Plan | Observed | None, str]
"""A plan or an earlier run, and where it is from."""
Ended = Literal["", "alarm", "silent", "last step", "end of input", "interrupted"]


class FollowedRun(Spec):
    """A followed run, as its log shows it now; None for what is not known."""

    schema_version: Literal[1] = 1
    source: str
    """The log."""
    final: bool = False
    """True for the last one of a command."""
    step: int | None = None
    """The number of the last step."""
    total_steps: int | None = None
    num_steps: int = 0
    """Steps that were read, those made again included."""
    step_s: float | None = None
    """Seconds of the last step, or the mean of as many as the log's last line covers."""
    predicted_step_s: float | None = None
    """By the plan that it is held against."""
    window_steps: int = 0
    window_step_s: float | None = None
    """The median of that many last steps."""
    band_s: Interval | None = None
    """The seconds of a step that are as they should be."""
    band_source: str = ""
    """A plan, an earlier run, or the run's own first steps."""
    place: Place = "learning"
    out_steps: int = 0
    """Steps in a row outside of the band, until now."""
    allowed_steps: int = 0
    """As many of them ring the alarm."""
    rings: bool = False
    tokens_per_s: float | None = None
    mfu: float | None = None
    """By the planner's definition."""
    peak_memory_bytes: int | None = None
    """The highest so far."""
    eta_s: float | None = None
    """Seconds until the last step, at the median of the last ones."""
    causes: tuple[GapCause, ...] = ()
    """Rows of the gap that the last steps show, in the last line of a command that rings."""
    says: str = ""
    """The place of the run in one sentence."""


@dataclass
class Follower:
    """New lines in, the run as it stands out, until it ends or has left its band."""

    where: str
    """The log as messages name it."""
    source: LineSource
    expected: Callable[[Observation], Expected]
    """Asked once, when the first steps are known: the price of what the log or the options say."""
    now: Callable[[], float]
    """Seconds of a clock that never goes back."""
    wait: Callable[[], None]
    """Called where nothing is new, before the log is asked again."""
    watch: BandWatch = field(default_factory=BandWatch)
    is_live: bool = False
    """False until all that the file held at the begin is read: a run that was out and is not now rings no alarm."""
    total_tokens: float | None = None
    """Tokens of the whole run, which say its last step where the log does not."""
    num_steps: int = 0
    ended: Ended = ""

    def __post_init__(self) -> None:
        self._reader = LogReader(self.where)
        self._grammar = ""
        self._seen = 0
        self._held: Plan | Observed | None = None
        """The origin of the band: a plan, an earlier run, or the run's own first steps."""
        self._held_source = ""
        self._step_at_s = self.now()
        self._shown = 0
        self._in_burst = 0

    def standings(self) -> Iterator[FollowedRun]:
        """The run as it stands, once in as many steps as ring the alarm, until it ends."""
        while not self.ended:
            lines = self.source.read()
            for line in lines or ():
                if self.feed(line) and self.is_live:
                    if self.watch.rings:
                        self.ended = "alarm"
                        return
                    if self._is_due(2 ** (self._in_burst // BURST)):
                        self._in_burst += 1
                        yield self.standing()
            if lines is None:
                self.is_live, self.ended = True, "alarm" if self.watch.rings else "end of input"
            elif not lines:
                self.is_live, self._in_burst, self.ended = True, 0, self._ends()
                if not self.ended:
                    if self._is_due(1):
                        yield self.standing()
                    self.wait()

    def _is_due(self, rarer: int) -> bool:
        """True once in so many steps; rarer while a log is read faster than it was written."""
        if self.num_steps - self._shown < self.watch.allowed_steps * rarer:
            return False
        self._shown = self.num_steps
        return True

    def _ends(self) -> Ended:
        record = self._reader.leading()
        band = self.watch.band
        last = self.last_step()
        if self.watch.rings:
            return "alarm"
        if last is not None and last[0] >= last[1]:
            return "last step"
        if band is None:
            return ""
        line_s = record.seconds[-1] * record.covers[-1] if record.numbers else 0.0
        patience_s = max(SILENT_S, self.watch.allowed_steps * band.high_s, 3 * line_s)
        return "silent" if self.now() - self._step_at_s >= patience_s else ""

    def feed(self, line: bytes) -> bool:
        """Take a line; true where it showed a step. Raises SpecError for a log of another job than the plan's."""
        self._reader.feed((line,))
        record = self._reader.leading()
        if record.grammar != self._grammar:
            self._grammar = record.grammar
            self._seen = 0
            self.num_steps = 0
        if len(record.numbers) < self._seen:  # another run begins in the same file
            self._seen = 0
            self.watch.start()
        if len(record.numbers) <= self._seen:
            return False
        if not self.num_steps:
            self._ask()
        for row in range(self._seen, len(record.numbers)):
            if record.backs and record.backs[-1].row == row:
                self.watch.start()
            self.num_steps += record.covers[row]
            explained = bool(record.marks.get(row, {}).keys() & EXPLAINED)
            self.watch.take(record.seconds[row], record.covers[row], explained)
        self._seen, self._step_at_s = len(record.numbers), self.now()
        if self._held is None:
            self._learn()
        return True

    def observation(self, rows: int = 0) -> Observation:
        """The observation of the last rows, or of all that is known of the run."""
        record = copy.deepcopy(self._reader).record()
        if rows:
            record.only_from(max(0, len(record.numbers) - rows))
        source = SourceFile(path=self.where, format=record.grammar)
        return described(record, trainer_of(record.grammar), (source,), {})

    def _ask(self) -> None:
        """Find what the run is held against."""
        observation = self.observation()
        self.watch.precision_fraction = observation.step_s_precision_fraction
        expected, source = self.expected(observation)
        if isinstance(expected, Plan):
            if differing := differences(observation, expected):
                raise SpecError(
                    f"{self.where}: is of another job than {source}: {'; '.join(differing)}",
                    "name the plan that the run was launched from, or leave --plan out",
                )
            prediction = predicted(expected, source)
            step_s = prediction.step_s
            ends_s = prediction.step_s_interval or (step_s * (1 - RUN_FRACTION), step_s * (1 + RUN_FRACTION))
            self._hold(expected, source, ends_s)
        elif expected is not None:
            self._hold(expected, source, of_run(expected, source).step_s_interval)

    def _learn(self) -> None:
        """Take the run's own first steady steps as its band."""
        if self.num_steps < LEARNED_STEPS or len(self._reader.leading().numbers) < LEARNED_ROWS:
            return
        steady = self.observation()
        if steady.step_s is not None and steady.num_steps - steady.num_warmup_steps >= LEARNED_STEPS:
            source = f"the run's own first {steady.num_steps:,} steps"
            _, high_s = of_run(Observed(observation=steady), source).step_s_interval or (0.0, 0.0)
            own_s = (0.0, max(high_s, steady.step_s * (1 + OWN_FRACTION)))
            self._hold(Observed(observation=steady), source, own_s)

    def _hold(self, held: Plan | Observed, source: str, ends_s: Interval | None) -> None:
        assert ends_s is not None, "plans and runs have intervals"
        self._held = held
        self._held_source = source
        self.watch.settle(Band(*ends_s, source))

    def last_step(self) -> tuple[int, int] | None:
        """The number of the last step made, and of the run's last one, by its log or by its tokens."""
        record = self._reader.leading()
        plan = self._held if isinstance(self._held, Plan) else None
        facts = record.job_facts()
        tokens = self.total_tokens or (plan.training.tokens if plan else None)
        batch = facts.global_batch_size or (plan.training.global_batch_size if plan else None)
        length = facts.seq_length or (plan.training.seq_length if plan else None)
        asked = facts.num_steps_asked
        if not asked and tokens and batch and length:
            asked = math.ceil(tokens / (batch * length))
        return (record.numbers[-1], asked) if record.numbers and asked else None

    def window(self) -> Observation:
        """The observation of the last steps: those out of the band, else `WINDOW_STEPS`."""
        record = self._reader.leading()
        steps = self.watch.out_steps or WINDOW_STEPS
        rows = 0
        while rows < len(record.numbers) and steps > 0:
            rows += 1
            steps -= record.covers[-rows]
        return self.observation(rows + 2 if self.watch.out_steps else rows)  # the median was out when three were

    def judged(self, observation: Observation) -> Observed:
        """The last steps, or all, beside what the run is held against, with what they show."""
        return judged(observation, self._held, self._held_source)

    def standing(self, final: bool = False) -> FollowedRun:
        """The run as it stands now."""
        watch, record, last = self.watch, self._reader.leading(), self.last_step()
        common: Fields = {"source": self.where, "final": final, "allowed_steps": watch.allowed_steps}
        if not record.numbers:
            return FollowedRun(**common, says="no line of a step yet")
        plan = self._held if isinstance(self._held, Plan) else None
        window = self.window()
        seen = window if plan is None else with_mfu(window, plan)
        is_silent = self.ended == "silent"
        rings = watch.rings or is_silent
        names = {"watch": watch, "silent_s": is_silent * (self.now() - self._step_at_s), "step_s": seen.step_s or 0.0}
        says = next(told(GAP_TABLE["places"], names))[0]
        return FollowedRun(
            **common, says=says, rings=rings, step_s=record.seconds[-1], step=record.numbers[-1],
            predicted_step_s=None if plan is None else plan.step.step_s, total_steps=None if last is None else last[1],
            num_steps=self.num_steps, window_steps=seen.num_steps, window_step_s=seen.step_s, place=watch.place,
            band_s=None if watch.band is None else (watch.band.low_s, watch.band.high_s),
            band_source=self._held_source, out_steps=watch.out_steps, tokens_per_s=seen.tokens_per_s, mfu=seen.mfu,
            peak_memory_bytes=seen.peak_memory_bytes, causes=self.judged(window).causes if final and rings else (),
            eta_s=None if last is None or seen.step_s is None else max(0, last[1] - last[0]) * seen.step_s,
        )  # fmt: skip

    def answer(self, last_steps: bool) -> Observed | None:
        """The answer of `plan observe` by the last steps, or by all that are kept; None without a step."""
        return self.judged(self.window() if last_steps else self.observation()) if self.num_steps else None
