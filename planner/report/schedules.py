"""A pipeline's step as text of 80 columns, as JSON, and as the parts of it that pictures draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Group
from rich.table import Table
from rich.text import Text

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.layout.price import reprice, with_microbatches
from planner.report.format import ACTIONS, percent, seconds, sentence, sentences
from planner.report.pieces import headed, listed
from planner.schedule.actions import Action, F, Schedule
from planner.schedule.compare import ScheduleComparison, StragglerCost
from planner.schedule.replay import IDLE_CAUSES, FloatArray, Timeline
from planner.schedule.synthesis import Synthesis
from planner.specs.base import Fields

IDLE = "·"
_STYLE = {"F": "cyan", "B": "green", "I": "green", "W": "yellow"}


def render_timeline(timeline: Timeline, width: int = 80) -> Group:
    """Headline, one row of text per rank in `width` columns, a legend, and what each rank does with its time."""
    said = {"timeline": timeline, "schedule": timeline.schedule}
    head, bubble = (Text(text) for item in ("timeline_head", "timeline_bubble") for text in sentences(item, **said))
    head.style = "bold"
    return Group(head, bubble, "", *drawing(timeline, width), _legend(timeline.schedule), "", _ranks(timeline))


def spans(timeline: Timeline, rank: int) -> Iterator[tuple[Action, float, float]]:
    """The actions of a rank with their starts and ends."""
    starts_s, ends_s = timeline.start_s[rank].tolist(), timeline.end_s[rank].tolist()
    return zip(timeline.schedule.ranks[rank], starts_s, ends_s, strict=True)


def drawing(timeline: Timeline, width: int) -> list[Text]:
    """One row of exactly `width` columns per rank: each action as its kind and micro-batch where they fit.

    Small letters are every second chunk of a rank; an action too short for a column of its own may go unseen.
    """
    label = len(f"{timeline.schedule.pp - 1} ")
    columns = max(1, width - label)
    scale = columns / timeline.makespan_s if timeline.makespan_s else 0.0
    rows, chunks = [], timeline.schedule.stage_to_chunk
    for rank in range(timeline.schedule.pp):
        row = Text(f"{rank} ".rjust(label))
        column = 0
        for action, start_s, end_s in spans(timeline, rank):
            first, last = max(column, round(start_s * scale)), min(columns, round(end_s * scale))
            if last > first:
                row.append(IDLE * (first - column))
                row.append(_block(action, chunks[action.stage], last - first), style=_STYLE[action.kind])
                column = last
        row.append(IDLE * (columns - column))
        rows.append(row)
    return rows


def _block(action: Action, chunk: int, columns: int) -> str:
    kind = action.kind.lower() if chunk % 2 else action.kind
    label = f"{kind}{action.microbatch}"
    return (label if len(label) <= columns else kind).ljust(columns, "─")


def _legend(schedule: Schedule) -> Text:
    legend = Text()
    for kind in sorted({action.kind for actions in schedule.ranks for action in actions}, key="FBIW".index):
        legend.append(f"{kind} {ACTIONS[kind]}", style=_STYLE[kind])
        legend.append("  ")
    legend.append(f"{IDLE} idle")
    if len(schedule.stage_to_rank) > schedule.pp:
        legend.append("  small: every second chunk")
    return legend


def _ranks(timeline: Timeline) -> Table:
    spell = partial(seconds, like_s=timeline.makespan_s)
    shown = [cause for cause in IDLE_CAUSES if timeline.idle_s[cause].max() > 1e-9 * timeline.makespan_s]
    table = headed(("rank", "busy", *shown, "in flight"), "r" * (len(shown) + 3))
    for rank in range(timeline.schedule.pp):
        idle = (spell(float(timeline.idle_s[cause][rank])) for cause in shown)
        peak = f"{timeline.peak_in_flight_microbatches[rank]:g}"
        table.add_row(str(rank), percent(float(timeline.busy_s[rank]) / timeline.makespan_s), *idle, peak)
    return table


def render_comparison(rows: Sequence[ScheduleComparison]) -> Table:
    """A line per schedule: time, bubble, memory and what it asks for, or why it is not defined here."""
    like_s = max((row.step_s for row in rows), default=0.0)
    return listed("schedules", rows, like_s=like_s, refusal=_refusal)


def render_synthesis(synthesis: Synthesis) -> Text:
    """A sentence that compares the order that was found with the best named schedule and with the bound."""
    return Text(sentence("synthesis", it=synthesis))


def render_straggler(cost: StragglerCost) -> Text:
    """A sentence about the seconds that slow ranks cost, and what moving layers off them would give back."""
    return Text(sentence("straggler", it=cost))


def _refusal(row: ScheduleComparison) -> str:
    return row.refusal.message.removeprefix(f"schedule {row.name} ") if row.refusal else ""


def comparison_json(row: ScheduleComparison) -> Fields:
    """One schedule of a comparison."""
    shape = {"schedule": row.name, "vpp": row.vpp}
    if row.timeline is None:
        return {**shape, "refused": row.refusal.message if row.refusal else ""}
    schedule = row.timeline.schedule
    peaks = row.timeline.peak_in_flight_microbatches.tolist()
    of_schedule = {name: getattr(schedule, name) for name in ("num_weight_copies", "splits_backward", "asynchronous")}
    figures = {"step_s": row.step_s, "bubble_fraction": row.bubble_fraction, "peak_in_flight_microbatches": peaks}
    return {**shape, **figures, **of_schedule}


def timeline_json(
    timeline: Timeline, synthesis: Synthesis | None = None, straggler: StragglerCost | None = None
) -> Fields:
    """A replay with every action's start and end; how an order was found and what slow ranks cost, where known."""
    schedule = timeline.schedule
    answer = {
        "schedule": schedule.name,
        **{name: getattr(schedule, name) for name in ("pp", "vpp", "num_microbatches")},
        **{name: getattr(timeline, name) for name in ("makespan_s", "bubble_fraction", "bubble_of_useful_fraction")},
        "busy_s": timeline.busy_s.tolist(),
        "idle_s": {cause: seconds.tolist() for cause, seconds in timeline.idle_s.items()},
        "peak_in_flight_microbatches": timeline.peak_in_flight_microbatches.tolist(),
        "stage_to_rank": list(schedule.stage_to_rank),
        "ranks": [
            [
                {"action": str(action), "start_s": start_s, "end_s": end_s}
                for action, start_s, end_s in spans(timeline, rank)
            ]
            for rank in range(schedule.pp)
        ],
    }
    if synthesis is not None:
        answer["lower_bound_s"], answer["gap"] = synthesis.lower_bound_s, synthesis.gap_fraction
        answer["best_named"] = None if synthesis.named is None else synthesis.named
        answer["best_named_s"] = None if synthesis.named is None else synthesis.named_makespan_s
    if straggler is not None:
        answer["straggler"] = asdict(straggler)
    return answer


LONG = 400_000
"""Actions of a step beyond which a shorter one is replayed: more take a second."""


def shown_step(plan: Plan) -> Candidate:
    """The plan's best layout, or a shorter step of the same pipeline where a replay would take long."""
    layout, num_microbatches = plan.parallelism, plan.parallelism.num_microbatches
    drawn = num_microbatches
    if not plan.best.actions:
        rounds = LONG // (3 * layout.pp * layout.vpp * layout.pp)
        drawn = min(drawn, max(2, rounds) * layout.pp + num_microbatches % layout.pp)
    return reprice(plan, with_microbatches(plan.best, drawn))


WHOLE, WINDOW, MOST = 80, 40, 1_600
"""Bars of a rank up to which a step is drawn whole, bars of a rank in a window, and the most bars of one window: in 11
inches they still bear the number of their micro-batch."""

Mask = npt.NDArray[np.bool_]


class Window(NamedTuple):
    """A part of a step and its title."""

    title: str
    from_s: float
    to_s: float


@dataclass(frozen=True, eq=False)
class DrawnStep:
    """A replayed step as arrays along all of its actions."""

    timeline: Timeline

    @property
    def start_s(self) -> FloatArray:
        """Time when each action starts."""
        return self.timeline.timing.start_s

    @property
    def end_s(self) -> FloatArray:
        """Time when each action ends."""
        return self.timeline.timing.end_s

    @property
    def rank(self) -> npt.NDArray[np.int32]:
        """Rank of each action."""
        return self.timeline.graph.rank

    @cached_property
    def rows(self) -> FloatArray:
        """Height of each action in the drawing: its rank."""
        return self.rank.astype(np.float64)

    @cached_property
    def is_forward(self) -> Mask:
        """True for forwards."""
        forward: Mask = self.timeline.graph.kind == F
        return forward

    @cached_property
    def chunk(self) -> npt.NDArray[np.int32]:
        """Number of the chunk that each action works on, counted on its rank from 0."""
        return np.array(self.timeline.schedule.stage_to_chunk, dtype=np.int32)[self.timeline.graph.stage]

    @cached_property
    def num_chunks(self) -> int:
        """The most chunks of a rank."""
        return max(self.timeline.schedule.stage_to_chunk) + 1

    @cached_property
    def turns_s(self) -> FloatArray:
        """Times, per rank, of the first action that is no forward; the step's end where there is none."""
        firsts = np.full(self.timeline.schedule.pp, self.timeline.makespan_s)
        np.minimum.at(firsts, self.rank[~self.is_forward], self.start_s[~self.is_forward])
        return firsts

    @cached_property
    def last_forwards_s(self) -> FloatArray:
        """Times, per rank, of the end of the last forward."""
        lasts = np.zeros(self.timeline.schedule.pp)
        np.maximum.at(lasts, self.rank[self.is_forward], self.end_s[self.is_forward])
        return lasts

    @cached_property
    def first_s(self) -> FloatArray:
        """Times, per rank, of its first action."""
        return np.array([float(start_s.min()) for start_s in self.timeline.start_s])

    @cached_property
    def final_s(self) -> FloatArray:
        """Times, per rank, of the end of its last action."""
        return np.array([float(end_s.max()) for end_s in self.timeline.end_s])

    @property
    def steady_s(self) -> tuple[float, float]:
        """Time from which all ranks have run a backward, and time of the first rank's last forward."""
        return float(self.turns_s.max()), float(self.last_forwards_s.min())

    def windows(self) -> list[Window]:
        """The whole step, or its steady state, beginning and end."""
        makespan_s, ranks = self.timeline.makespan_s, self.timeline.schedule.pp
        most = int(np.bincount(self.rank).max(initial=0))
        if most <= WHOLE and len(self.rank) <= MOST:
            return [Window("whole step", 0.0, makespan_s)]
        long_s = makespan_s / most * min(WINDOW, max(MOST // ranks, 8))
        fill_s, drain_s = self.steady_s
        from_s = min(max((fill_s + drain_s - long_s) / 2, 0.0), makespan_s - long_s)
        title = "steady state" if fill_s + long_s < drain_s else "from forwards to backwards"
        middle = Window(title, from_s, from_s + long_s)
        # until the last rank has begun, and from the first rank's end on
        slants_s = float(self.first_s.max()), makespan_s - float(self.final_s.min())
        begin_s, end_s = (min(max(long_s / 2, 1.1 * slant_s), 1.6 * long_s) for slant_s in slants_s)
        return [middle, Window("beginning", 0.0, begin_s), Window("end", makespan_s - end_s, makespan_s)]


def caption(step: DrawnStep, windows: list[Window], bubble_fraction: float | None, num_microbatches: int) -> str:
    """The sentences that say what is drawn, and what the step is made of.

    `bubble_fraction` is the plan's own, and `num_microbatches` that of its step where the timeline is of a shorter one.
    """
    timeline, (fill_s, drain_s) = step.timeline, step.steady_s
    return " ".join(
        sentences(
            "timeline_caption", step=step, timeline=timeline, schedule=timeline.schedule, bubble=bubble_fraction,
            makespan_s=timeline.makespan_s, num_microbatches=num_microbatches, fill_s=fill_s, drain_s=drain_s,
            windows=windows,
        )
    )  # fmt: skip
