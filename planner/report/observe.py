"""The answer of `plan observe`: steps, memory and wall time beside the prediction, and what traces show."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.observe.accounts import STEP_TERMS, WALL_TERMS
from planner.observe.gap_rows import GAP_ROWS, OF_MEMORY
from planner.observe.observation import GapCause, Observation, Observed, Prediction, Term, Wall
from planner.observe.traces.dumps import FlightReport, SnapshotReport
from planner.observe.traces.events import HOST, CollectiveTime, TraceReport, TraceStep
from planner.observe.traces.recorded import Recorded, steady
from planner.report.format import (
    BREAKDOWN,
    LEAST_SHARE,
    bar,
    gibibytes,
    percent,
    seconds,
    sentence,
    sentences,
    signed_seconds,
    told,
)
from planner.report.pieces import Parts, as_group, bullets, columns, headed, listed, section, shares
from planner.specs.base import grouped
from planner.specs.reading import printable

if TYPE_CHECKING:
    from planner.observe.follower import FollowedRun

_MOST_TIMERS, _MOST_RANKS = 16, 8
_LEAST_DRIFT = 0.01
_WALL = {
    "startup_s": "start-up", "steps_s": "steps", "evaluation_s": "evaluation", "checkpoint_s": "checkpoints",
    "down_s": "interruptions", "idle_s": "idle, or not said",
}  # fmt: skip
_KINDS = {
    "checkpoint": "after a checkpoint", "evaluation": "after an evaluation", "periodic": "regularly",
    "slow_spell": "in slow spells", "unexplained": "now and then",
}  # fmt: skip


@as_group
def render_observed(observed: Observed) -> Parts:
    """The whole answer, made for 80 columns."""
    observation, prediction = observed.observation, observed.prediction
    if says := conclusion(observed):
        yield Text(_sentence(says), style="bold")
    yield Text(_what(observation), style="" if says else "bold")
    if observation.step_s is not None:
        yield section("The step", _step(observation, prediction))
    if (causes := causes_section(observed)) is not None:
        yield causes
    if (gap := gap_section(observed)) is not None:
        yield gap
    if remarks := list(_remarks(observed)):
        yield section("Steps that took longer, and interruptions", bullets(remarks))
    if observation.wall is not None and not observed.beside:
        yield section("Where the wall time went", _wall(observation.wall))
    if observation.peak_memory_bytes is not None:
        yield section("Memory", _memory(observation, prediction))
    if observation.timers:
        yield section("Timers, of one step, least and most over the ranks", _timers(observation))
    if prediction is not None and len(observed.waterfall) < 2 and observation.breakdown.keys() - {"unattributed_s"}:
        yield section("Predicted seconds by term", _terms(prediction))
    if left := list(_open(observed)):
        yield section("What the files leave open", bullets(left))


def _what(observation: Observation) -> str:
    """One sentence on what was read."""
    sources, facts = observation.sources, observation.facts
    kinds = ", ".join(dict.fromkeys(source.format for source in sources))
    files = f"{len(sources)} files" if len(sources) > 1 else sources[0].path
    job = list(sentences("observed_job", facts=facts, kinds=kinds))
    return sentence("observed_what", o=observation, files=files, kinds=kinds, job=job)


def _step(observation: Observation, prediction: Prediction | None) -> Table:
    step_s = observation.step_s
    assert step_s is not None
    like_s = step_s if prediction is None else min(step_s, prediction.step_s)
    rows = told("observed_step", o=observation, p=prediction, like_s=like_s, least_drift=_LEAST_DRIFT)
    return columns("lrw", rows)


def _remarks(observed: Observed) -> Iterator[str]:
    observation = observed.observation
    if observation.num_warmup_steps and not observed.beside:
        yield from sentences("observed_warm_up", o=observation)
    for outlier in observation.outliers:
        yield from sentences("observed_outlier", it=outlier, kinds=_KINDS)
    for restart in observation.restarts:
        yield from sentences("observed_restart", it=restart)


def _wall(wall: Wall) -> Table:
    values = ((label, getattr(wall, name)) for name, label in _WALL.items())
    table = shares((label, seconds(value), value / wall.wall_s) for label, value in values if value)
    if wall.error_fraction >= 0.0005:
        table.add_row("counted twice", signed_seconds(-wall.overlap_s, wall.overlap_s), percent(wall.error_fraction))
    table.add_row("wall time", seconds(wall.wall_s))
    return table


def _memory(observation: Observation, prediction: Prediction | None) -> RenderableType:
    table = columns("lrw", told("observed_memory", o=observation, p=prediction))
    ranks = [rank for rank in observation.memory if rank.rank is not None]
    if len(ranks) < 2:
        return table
    ranks.sort(key=lambda rank: -(rank.max_allocated_bytes or rank.max_reserved_bytes or rank.device_bytes or 0))
    return Group(table, listed("observed_ranks", ranks[:_MOST_RANKS]))


def _timers(observation: Observation) -> Table:
    ranked = sorted(observation.timers, key=lambda timer: -timer.max_s)
    table = listed("observed_timers", ranked[:_MOST_TIMERS])
    if len(ranked) > _MOST_TIMERS:
        table.add_row(f"and {len(ranked) - _MOST_TIMERS} smaller ones, in --json", "", "")
    return table


def _terms(prediction: Prediction) -> Table:
    items = prediction.breakdown.items()
    return columns("lr", ((BREAKDOWN.get(name, name), seconds(value)) for name, value in items if value))


def _open(observed: Observed) -> Iterator[str]:
    observation = observed.observation
    yield from observation.notes
    for source in observation.sources:
        if source.partial:
            yield f"{source.path}: {source.partial}"
    yield from sentences("observed_open", o=observation, p=observed.prediction)


_LABELS = {**STEP_TERMS, **WALL_TERMS}
_WIDEST_HALF, _LONGEST = 8, 300
_MOST_LINES, _WIDTH = 6, 76
_WORTH_A_SENTENCE = 0.01
"""Terms of at least this share of the step have their evidence shown, as many as fit; that of all is in --json."""


class SignedBar:
    """A bar to the right of its middle for seconds lost, to the left for seconds won."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(7, 2 * _WIDEST_HALF + 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Parts:
        half = max(1, (min(2 * _WIDEST_HALF + 1, options.max_width) - 1) // 2)
        cells = bar(abs(self.fraction), half)
        won, lost = (cells[::-1], " " * half) if self.fraction < 0 else (" " * half, cells)
        yield Text.assemble((won, "green"), ("│", "dim"), (lost, "red"))


def gap_section(observed: Observed) -> RenderableType | None:
    """The waterfall from the predicted step to the wall time per step; None where there is nothing between them."""
    observation, prediction = observed.observation, observed.prediction
    step_s = observation.step_s
    if step_s is None or not (observed.waterfall or observed.beside):
        return None
    every = (*observed.waterfall, *observed.beside)
    largest_s = max(abs(term.seconds) for term in every)
    like_s = min(step_s, prediction.step_s) if prediction else step_s
    table = headed(("", "", "", "to win back"), "lrlr")
    if prediction is not None and observed.waterfall:
        table.add_row("predicted step", seconds(prediction.step_s, like_s), "", "", style="bold")
        _add_terms(table, observed.waterfall, like_s, largest_s, LEAST_SHARE * step_s)
    table.add_row("measured step", seconds(step_s, like_s), "", "", style="bold")
    parts: list[RenderableType] = [table]
    if observed.beside:
        _add_terms(table, observed.beside, like_s, largest_s, LEAST_SHARE * step_s)
        wall_s = step_s + sum(term.seconds for term in observed.beside)
        table.add_row("wall time per step", seconds(wall_s, like_s), "", "", style="bold")
        if observation.wall is not None:
            parts += map(Text, sentences("observed_wall", o=observation, wall=observation.wall))
    if said := list(_evidence(observed.waterfall, _WORTH_A_SENTENCE * step_s)):
        parts += ["", bullets(said)]
    return section("Where the seconds go", Group(*parts))


def _evidence(terms: Sequence[Term], least_s: float) -> Iterator[str]:
    """The evidence of the largest terms, in a few lines."""
    lines = 0
    for term in sorted(terms, key=lambda term: -abs(term.seconds)):
        words = f"{_label(term)}: {printable(term.evidence, _LONGEST)}"
        lines += math.ceil(len(words) / _WIDTH)
        if abs(term.seconds) < least_s or lines > _MOST_LINES:
            return
        yield words


def _add_terms(table: Table, terms: Sequence[Term], like_s: float, largest_s: float, least_s: float) -> None:
    """A row for each term, those that would read as nothing together in one."""
    small = [term for term in terms if abs(term.seconds) < least_s]
    for term in terms:
        if term not in small:
            back = "" if not term.recoverable_s else seconds(term.recoverable_s, like_s)
            table.add_row(
                f"  {_label(term)}", signed_seconds(term.seconds, like_s), SignedBar(term.seconds / largest_s), back
            )
    total_s = sum(term.seconds for term in small)
    if signed_seconds(total_s, like_s) != "0 s":
        words = f"  {len(small)} smaller ones" if len(small) > 1 else f"  {_label(small[0])}"
        table.add_row(words, signed_seconds(total_s, like_s), SignedBar(total_s / largest_s), "")


def _label(term: Term) -> str:
    return _LABELS.get(term.term, printable(term.term.replace("_", " "), 40))


def conclusion(observed: Observed) -> str:
    """The sentence of the verdict, with the row that takes most of the gap where one is shown for it."""
    says, is_memory = observed.says, observed.verdict == "memory"
    fitting = [cause for cause in observed.causes if (cause.name in OF_MEMORY) == is_memory]
    if not fitting or observed.verdict == "fast":
        return says
    clause = _clause(fitting[0])
    if observed.verdict == "slow":
        return f"slow: {clause}; {says.removeprefix('slow: ')}"
    return f"{says}; {clause}" if says else clause


def causes_section(observed: Observed) -> RenderableType | None:
    """Every row that is shown, and what to record next where none is."""
    parts = [part for cause in observed.causes for part in _cause(cause, observed.observation.step_s)]
    if observed.next_test:
        parts.append(Text(f"No file shows where the time went. Record next: {observed.next_test}."))
    return section("What the files show", Group(*parts)) if parts else None


def _clause(cause: GapCause) -> str:
    row = GAP_ROWS.get(cause.name)
    text = row.at(cause.where) if row else cause.name
    return text if not cause.seconds else f"{text}, {seconds(cause.seconds)} of a step"


def _cause(cause: GapCause, step_s: float | None) -> Parts:
    row = GAP_ROWS.get(cause.name)
    head = Text(row.at(cause.where) if row else cause.name)
    head.append(f"  {cause.name}")
    yield head
    yield Padding(columns("lw", told("observed_cause", cause=cause, step_s=step_s)), (0, 0, 0, 3))


_DAY_S = 86400.0


def line_of(found: FollowedRun) -> str:
    """`step 80 of 500  11.00 s a step  above 8.578–9.482 s, 8 of 20 steps  1.3 h left`."""
    if found.step is None or found.window_step_s is None:
        return found.says
    place = sentence("followed_place", run=found)
    return "  ".join(sentences("followed", run=found, place=place, day_s=_DAY_S))


_MOST_ROWS, _NAME_WIDTH = 10, 34
_PARTS = {
    "compute_s": "computing", "exposed_communication_s": "communication, exposed", "copies_s": "copies",
    "host_gaps_s": "GPU idle, host late", "dependencies_s": "GPU idle, work waits", "idle_s": "GPU idle, not told",
}  # fmt: skip


def recorded_sections(recorded: Recorded) -> Parts:
    """The parts of the answer that files beside logs give, made for 80 columns."""
    if recorded.flight_recorder:
        yield section("Collectives, by the flight recorder", _flight(recorded.flight_recorder))
    if recorded.traces:
        yield from _traces(recorded.traces)
    for snapshot in recorded.snapshots:
        title = f"Memory of {snapshot.file}, device {snapshot.device}, at its peak"
        yield section(title, _snapshot(snapshot))


def _traces(report: TraceReport) -> Parts:
    steps = steady(report.ranks)
    if not steps:
        return
    of_what = "a step" if steps[0].number is not None else "the whole trace"
    on_host = all(rank.device == HOST for rank in report.ranks)
    where = "on the host" if on_host else "on the GPU"
    count = f"mean of {len(steps)} on {len(report.ranks)} ranks" if len(report.ranks) > 1 else f"mean of {len(steps)}"
    yield section(f"Where {of_what} went {where}, {count}", _parts(steps, on_host))
    if any(step.families for step in steps):
        yield section("Computing, by family of kernels", _families(steps))
    if any(step.groups for step in steps):
        yield section("Communication, by group", _groups(steps))
    if exchanges := [row for rank in report.ranks for row in rank.collectives]:
        yield section("Exchanges that take longest", _exchanges(exchanges))


def _mean(steps: Sequence[TraceStep], name: str) -> float:
    return float(sum(getattr(step, name) for step in steps)) / len(steps)


def _parts(steps: Sequence[TraceStep], on_host: bool) -> Table:
    wall_s, told = _mean(steps, "wall_s"), _PARTS | ({"host_gaps_s": "between operators"} if on_host else {})
    means = ((words, _mean(steps, name)) for name, words in told.items())
    return shares(((words, seconds(s), s / wall_s) for words, s in means if s), ("all", seconds(wall_s)))


def _families(steps: Sequence[TraceStep]) -> RenderableType:
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        for family in step.families:
            total[family.family] += family.seconds / len(steps)
    whole = sum(total.values()) or 1.0
    ranked = sorted(total.items(), key=lambda item: -item[1])
    table = shares((name, seconds(value), value / whole) for name, value in ranked)
    unknown = dict.fromkeys(name for step in steps for family in step.families for name in family.longest)
    if not unknown:
        return table
    return Group(table, Text(f"other: {', '.join(name[:_NAME_WIDTH] for name in list(unknown)[:3])}"))


def _groups(steps: Sequence[TraceStep]) -> Table:
    rows = grouped((row.group, (row.busy_s, row.hidden_s, row.exposed_s)) for step in steps for row in step.groups)
    means = {group: [sum(parts) / len(steps) for parts in zip(*each, strict=True)] for group, each in rows.items()}
    ranked = sorted(means.items(), key=lambda item: -item[1][2])
    return listed("trace_groups", ranked)


def _exchanges(rows: Sequence[CollectiveTime]) -> Table:
    return listed("trace_exchanges", sorted(rows, key=lambda row: -row.median_s * row.count)[:_MOST_ROWS])


def _snapshot(report: SnapshotReport) -> RenderableType:
    parts = ((part.category, part.num_bytes) for part in report.parts)
    table = shares((name, f"{gibibytes(size)} GiB", size / (report.peak_bytes or 1)) for name, size in parts)
    for row in told("snapshot", it=report):
        table.add_row(*row)
    if (oom := report.out_of_memory) is None:
        return table
    return Group(table, *map(Text, sentences("snapshot_failed", oom=oom)))


def _flight(report: FlightReport) -> RenderableType:
    groups = listed("flight_groups", report.groups[:_MOST_ROWS], width=_NAME_WIDTH)
    return Group(Text(_sentence(report.verdict), style="bold"), groups)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
