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

from planner.observe.accounts import STEP_TERMS, WALL_TERMS, in_steps
from planner.observe.gap_rows import GAP_ROWS, OF_MEMORY
from planner.observe.observation import GapCause, GapRemedy, Observation, Observed, Outlier, Prediction, Term, Wall
from planner.observe.traces.dumps import FlightReport, SnapshotReport
from planner.observe.traces.events import HOST, CollectiveTime, TraceReport, TraceStep
from planner.observe.traces.recorded import Recorded, steady
from planner.report.format import (
    BREAKDOWN,
    LEAST_SHARE,
    bar,
    digits,
    duration,
    gibibytes,
    large,
    percent,
    seconds,
    signed_seconds,
    span,
)
from planner.report.pieces import Parts, as_group, bullets, columns, headed, section, shares
from planner.specs.base import Texts
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
    facts = observation.facts
    kinds = ", ".join(dict.fromkeys(source.format for source in observation.sources))
    files = f"{len(observation.sources)} files" if len(observation.sources) > 1 else observation.sources[0].path
    job = [
        facts.trainer if facts.trainer and facts.trainer != kinds else None,
        facts.model,
        f"adapters of rank {facts.lora_rank:,}" if facts.lora_rank else None,
        f"{facts.num_gpus:,} GPUs" if facts.num_gpus else None,
        f"batch {facts.global_batch_size:,}" if facts.global_batch_size else None,
        f"sequence {facts.seq_length:,}" if facts.seq_length else None,
    ]
    said = ", ".join(part for part in job if part)
    return f"{files} ({kinds}): {observation.num_steps:,} steps{f'; {said}' if said else ''}."


def _step(observation: Observation, prediction: Prediction | None) -> Table:
    step_s = observation.step_s
    assert step_s is not None
    table = columns("lrw")
    like_s = step_s if prediction is None else min(step_s, prediction.step_s)
    spread = observation.step_s_spread
    around = "" if spread is None else f"{span(*spread, like_s)} for 8 of 10"
    if observation.step_s_precision_fraction > 0.001:
        around += f", ±{percent(observation.step_s_precision_fraction)} by the digits printed"
    table.add_row("median step", seconds(step_s, like_s), around)
    if prediction is not None:
        interval = prediction.step_s_interval
        text = "" if interval is None else f"{span(*interval, like_s)}, {prediction.source}"
        table.add_row("predicted", seconds(prediction.step_s, like_s), text)
    drift = observation.drift_fraction
    if drift is not None and abs(drift) >= _LEAST_DRIFT:
        table.add_row("drift", f"{100 * drift:+.1f}%", "from the begin to the end of the run")
    if observation.tokens_per_s is not None:
        predicted = "" if prediction is None else f"{large(round(prediction.tokens_per_s))} predicted"
        table.add_row("tokens/s", large(round(observation.tokens_per_s)), predicted)
    if observation.mfu is not None and prediction is not None:
        table.add_row("MFU", percent(observation.mfu), f"{percent(prediction.mfu)} predicted, same definition")
    if observation.printed_mfu is not None:
        table.add_row("MFU printed", percent(observation.printed_mfu), "by the trainer's own definition")
    if observation.printed_tflops_per_gpu is not None:
        table.add_row(
            "TFLOP/s printed", digits(observation.printed_tflops_per_gpu), "of a GPU, by the trainer's own formula"
        )
    return table


def _remarks(observed: Observed) -> Iterator[str]:
    observation = observed.observation
    if observation.num_warmup_steps and not observed.beside:
        extra = seconds(observation.warmup_extra_s)
        yield f"warm-up: {in_steps(observation.num_warmup_steps)}, {extra} longer than as many steady ones"
    for outlier in observation.outliers:
        yield _says(outlier)
    for restart in observation.restarts:
        down = "" if restart.down_s is None else f", {seconds(restart.down_s)} without steps"
        yield (
            f"restart: after step {restart.from_step:,} again from {restart.to_step:,}; {in_steps(restart.lost_steps)} "
            f"({seconds(restart.lost_s)}) were made again{down}"
        )


def _says(outlier: Outlier) -> str:
    steps = ", ".join(f"{step:,}" for step in outlier.steps[:6])
    more = ", …" if outlier.num_steps > 6 else ""
    period = f", every {outlier.period_steps:,} steps" if outlier.period_steps else ""
    likely = f": {outlier.likely}" if outlier.likely else ""
    kind = _KINDS[outlier.kind]
    return (
        f"{kind}{period}{likely}: {in_steps(outlier.num_steps)}, {seconds(outlier.extra_s)} in all (step {steps}{more})"
    )


def _wall(wall: Wall) -> Table:
    values = ((label, getattr(wall, name)) for name, label in _WALL.items())
    table = shares((label, seconds(value), value / wall.wall_s) for label, value in values if value)
    if wall.error_fraction >= 0.0005:
        table.add_row("counted twice", signed_seconds(-wall.overlap_s, wall.overlap_s), percent(wall.error_fraction))
    table.add_row("wall time", seconds(wall.wall_s))
    return table


def _memory(observation: Observation, prediction: Prediction | None) -> RenderableType:
    printed = len(observation.memory)
    whose = "of the one rank that prints it" if printed == 1 else f"of the fullest of {printed} ranks that print it"
    peak = f"{gibibytes(observation.peak_memory_bytes or 0)} GiB"
    table = columns("lrw", [(f"peak {observation.peak_memory_kind}", peak, whose)])
    if prediction is not None:
        ends = "–".join(map(gibibytes, prediction.total_memory_interval or ()))
        more = f"; {ends} with what is reserved" if ends else ""
        predicted = f"{gibibytes(prediction.peak_memory_bytes)} GiB"
        table.add_row("predicted", predicted, f"allocated on the fullest rank{more}")
    ranks = [rank for rank in observation.memory if rank.rank is not None]
    if len(ranks) < 2:
        return table
    ranks.sort(key=lambda rank: -(rank.max_allocated_bytes or rank.max_reserved_bytes or rank.device_bytes or 0))
    rows = (
        (str(rank.rank), *("" if size is None else gibibytes(size) for size in (rank.max_allocated_bytes,
                                                                               rank.max_reserved_bytes)))
        for rank in ranks[:_MOST_RANKS]
    )  # fmt: skip
    return Group(table, headed(("rank", "allocated", "reserved, GiB"), "lrr", rows))


def _timers(observation: Observation) -> Table:
    ranked = sorted(observation.timers, key=lambda timer: -timer.max_s)
    rows = ((timer.name, seconds(timer.min_s), seconds(timer.max_s)) for timer in ranked[:_MOST_TIMERS])
    table = headed(("timer", "least", "most"), "lrr", rows)
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
    if observation.wall is None and observation.step_s is not None:
        yield "the lines of steps have no times: the wall time is not known"
    if observation.asks:
        yield f"tokens per second: add {' '.join(observation.asks)}"
    if observed.prediction is None:
        yield "nothing was predicted: add --plan plan.json, or --model, --gpus and the layout (--tp, --pp, …)"


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
        parts += [Text(words) for words in _whole(observation)]
    if said := list(_evidence(observed.waterfall, _WORTH_A_SENTENCE * step_s)):
        parts += ["", bullets(said)]
    return section("Where the seconds go", Group(*parts))


def _whole(observation: Observation) -> Iterator[str]:
    """One sentence on the wall time of the whole run."""
    if (wall := observation.wall) is not None:
        warm_up = f", {observation.num_warmup_steps:,} of them to warm up" if observation.num_warmup_steps else ""
        share = percent(min(1.0, wall.steps_s / wall.wall_s)) if wall.wall_s else "all"
        yield f"{seconds(wall.wall_s)} in all, {share} of it {observation.num_steps:,} steps{warm_up}"


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
    yield Padding(_details(cause, step_s), (0, 0, 0, 3))


def _details(cause: GapCause, step_s: float | None) -> Table:
    table = columns("lw")
    table.add_row("seen", cause.evidence)
    if cause.seconds:
        share = f", {percent(cause.seconds / step_s)} of it" if step_s else ""
        table.add_row("takes", f"{seconds(cause.seconds)} of a step{share}")
    if cause.remedy is not None:
        table.add_row("helps", remedy_says(cause.remedy))
    return table


def remedy_says(remedy: GapRemedy) -> str:
    """The remedy in words, with its options and the step that it gives."""
    by = "by the price of this job" if remedy.is_priced else "without it"
    given = f"a step of {seconds(remedy.step_s)} {by}" if remedy.step_s is not None else ""
    return "; ".join(part for part in (remedy.says, " ".join(remedy.options), given) if part)


_DAY_S = 86400.0


def line_of(found: FollowedRun) -> str:
    """`step 80 of 500  11.00 s a step  above 8.578–9.482 s, 8 of 20 steps  1.3 h left`."""
    if found.step is None or found.window_step_s is None:
        return found.says
    step = f"step {found.step:,}" + (f" of {found.total_steps:,}" if found.total_steps else "")
    parts = [step, f"{seconds(found.window_step_s)} a step", _place(found)]
    if found.mfu is not None:
        parts.append(f"MFU {percent(found.mfu)}")
    elif found.tokens_per_s is not None:
        parts.append(f"{large(round(found.tokens_per_s))} tokens/s")
    if found.peak_memory_bytes is not None:
        parts.append(f"{gibibytes(found.peak_memory_bytes)} GiB")
    if found.eta_s is not None:
        left = f"{found.eta_s / _DAY_S:,.1f} d" if found.eta_s >= 2 * _DAY_S else duration(found.eta_s)
        parts.append(f"{left} left")
    return "  ".join(parts)


def _place(found: FollowedRun) -> str:
    if found.band_s is None:
        return found.place
    low_s, high_s = found.band_s
    around = f"{found.place} {span(low_s, high_s, high_s) if low_s else seconds(high_s)}"
    if found.place in ("above", "below"):
        return f"{around}, {found.out_steps:,} of {found.allowed_steps:,} steps"
    return around if low_s else f"{found.place} up to {seconds(high_s)}"


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
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for step in steps:
        for group in step.groups:
            for index, value in enumerate((group.busy_s, group.hidden_s, group.exposed_s)):
                total[group.group][index] += value / len(steps)
    ranked = sorted(total.items(), key=lambda item: -item[1][2])
    rows = ((name, *map(seconds, values)) for name, values in ranked)
    return headed(("group", "running", "behind computing", "exposed"), "lrrr", rows)


def _exchanges(rows: Sequence[CollectiveTime]) -> Table:
    heads = ("exchange", "group", "MB", "times", "transfer", "wait", "GB/s")
    return headed(
        heads, "llrrrrr", map(_exchange, sorted(rows, key=lambda row: -row.median_s * row.count)[:_MOST_ROWS])
    )


def _exchange(row: CollectiveTime) -> Texts:
    rate = "" if row.bus_gb_per_s is None else f"{'≥ ' if row.at_least else ''}{row.bus_gb_per_s:.1f}"
    times = (f"{seconds(row.median_s)} both", "")
    if row.transfer_s is not None:
        times = (seconds(row.transfer_s), seconds(row.wait_s or 0.0))
    size = "" if row.num_bytes is None else f"{row.num_bytes / 1e6:.2f}"
    return row.collective, row.group[:20], size, f"{row.count:,}", *times, rate


def _snapshot(report: SnapshotReport) -> RenderableType:
    parts = ((part.category, part.num_bytes) for part in report.parts)
    table = shares((name, f"{gibibytes(size)} GiB", size / (report.peak_bytes or 1)) for name, size in parts)
    for name, size in (
        ("peak, allocated", report.peak_bytes), ("most reserved", report.peak_reserved_bytes),
        ("free in blocks, at the end", report.inactive_bytes), ("largest of them", report.largest_free_block_bytes),
    ):  # fmt: skip
        table.add_row(name, f"{gibibytes(size)} GiB")
    if (oom := report.out_of_memory) is None:
        return table
    why = ""
    if oom.fragmented:
        why = f": {gibibytes(oom.inactive_bytes)} GiB were free, in blocks of at most "
        why += f"{gibibytes(oom.largest_free_block_bytes)} GiB; fragmentation"
    return Group(table, Text(f"Out of memory on a request of {gibibytes(oom.requested_bytes)} GiB{why}."))


def _flight(report: FlightReport) -> RenderableType:
    rows = (
        (
            (group.description or group.name)[:_NAME_WIDTH], f"{len(group.ranks):,}",
            f"{max(group.last_enqueued.values(), default=0):,}", f"{min(group.last_completed.values(), default=0):,}",
            f"{len(group.outstanding):,}", f"{len(group.mismatches):,}",
        )
        for group in report.groups[:_MOST_ROWS]
    )  # fmt: skip
    table = headed(("group", "ranks", "called", "ended", "outstanding", "differ"), "lrrrrr", rows)
    return Group(Text(_sentence(report.verdict), style="bold"), table)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
