"""`plan schedule`: a pipeline schedule drawn, timed and compared, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.cli.options import Number, Numbers, Whole, Word
from planner.cli.output import MAX_WIDTH, dumps, refuse_files, tell
from planner.errors import SpecError
from planner.files import write_text
from planner.specs.units import is_count

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.schedule.actions import Schedule
    from planner.schedule.compare import RankSeconds, StragglerCost
    from planner.schedule.replay import Timeline
    from planner.schedule.synthesis import Synthesis

AUTO = "auto"
MAX_CHUNKS = 2**21
"""Micro-batches times virtual stages; more would take minutes and gigabytes."""


def schedule_command(
    name: Word = None,
    pp: int = 4,
    micro_batches: int = 8,
    vpp: Whole = None,
    group: Whole = None,
    forward: Numbers = None,
    backward: Numbers = None,
    weight_grad: Numbers = None,
    p2p: float = 0.0,
    blocking: bool = False,
    slow_stage: list[str] | None = None,
    slow_link: list[str] | None = None,
    sizes: Numbers = None,
    in_flight: Number = None,
    compare: bool = False,
    json: bool = False,
    svg: Word = None,
    trace: Word = None,
    csv: Word = None,
    force: bool = False,
) -> None:
    """Draw, time or compare pipeline schedules.

    \b
    Example:
      plan schedule 1f1b --pp 4 --micro-batches 8
      plan schedule interleaved-1f1b --pp 8 --vpp 4 -m 64 --slow-stage 3:1.2
      plan schedule auto --pp 4 -m 12 --forward 1,1,1.1,1.3 --in-flight 4
      plan schedule --compare --pp 8 --micro-batches 64
    """
    refuse_files({"--svg": svg, "--trace": trace, "--csv": csv}, force)
    read = _read_csv(name) if name is not None and name.endswith(".csv") else None
    pp = pp if read is None else read.pp
    _check_sizes(pp, 1 if vpp is None else vpp, micro_batches)
    slow = slow_stages_of(slow_stage, pp), slow_links_of(slow_link, pp)
    seconds = rank_seconds(pp, forward, backward, weight_grad, p2p, blocking, sizes, *slow)
    if compare:
        _refuse_beside_compare(svg=svg, trace=trace, csv=csv, group=group, in_flight=in_flight)
        _print_comparison(name, seconds, micro_batches, vpp, json)
        return
    found = (read, None) if read else _order(name or "1f1b", seconds, micro_batches, vpp, group, in_flight)
    schedule, synthesis = found
    _write_files(timeline := seconds.replayed(schedule), svg, trace, csv, force)
    if "-" not in (svg, trace, csv):  # standard output is free
        _tell(timeline, synthesis, seconds, json)


def _tell(timeline: Timeline, synthesis: Synthesis | None, seconds: RankSeconds, json: bool) -> None:
    """Print the drawn schedule, what its slow ranks cost, and how it was found."""
    from planner.report.schedules import timeline_json
    from planner.schedule.compare import straggler_cost

    cost = straggler_cost(timeline.schedule, seconds) if seconds.slow_ranks else None
    tell((timeline_json if json else _rendered)(timeline, synthesis, cost))


def _refuse_beside_compare(**options: object) -> None:
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if given:
        raise SpecError(f"--compare and {given[0]}: all schedules are only compared", "name one schedule for it")


def _check_sizes(pp: int, vpp: int, micro_batches: int) -> None:
    if min(pp, vpp, micro_batches) < 1 or pp * vpp * micro_batches > MAX_CHUNKS:
        raise SpecError(
            f"--pp {pp}, --vpp {vpp}, --micro-batches {micro_batches}: each must be at least 1, their product at most "
            f"{MAX_CHUNKS:,}",
            "plan schedule 1f1b --pp 4 --micro-batches 8",
        )


def _order(
    name: str, seconds: RankSeconds, micro_batches: int, vpp: int | None, group: int | None, in_flight: float | None
) -> tuple[Schedule, Synthesis | None]:
    """The schedule that was named, or found."""
    from planner.schedule.compare import find_order
    from planner.schedule.orders import SCHEDULES, build_schedule

    pp = len(seconds.forward_s)
    if name == AUTO:
        synthesis = find_order(seconds, micro_batches, 1 if vpp is None else vpp, in_flight)
        return synthesis.schedule, synthesis
    fewest = SCHEDULES[name].min_vpp if name in SCHEDULES else 1
    return build_schedule(name, pp, fewest if vpp is None else vpp, micro_batches, group), None


def _read_csv(path: str) -> Schedule:
    from planner.schedule.graph import from_torch_csv
    from planner.specs.reading import CSV, read_text

    schedule = from_torch_csv(read_text(path, CSV.num_bytes), path)
    if len(schedule.stage_to_rank) % schedule.pp:
        stages = len(schedule.stage_to_rank)
        raise SpecError(f"{path}: {stages} stages on {schedule.pp} ranks", "give every rank as many stages")
    return schedule


def _write_files(timeline: Timeline, svg: str | None, trace: str | None, csv: str | None, force: bool) -> None:
    from planner.report.trace import trace_events
    from planner.schedule.graph import to_torch_csv

    if svg is not None:
        from planner.report.pictures import timeline_file

        write_text(svg, timeline_file(timeline), force)
    if trace is not None:
        write_text(trace, dumps(trace_events(timeline), indent=None), force)
    if csv is not None:
        write_text(csv, to_torch_csv(timeline.schedule), force)


def _rendered(
    timeline: Timeline, synthesis: Synthesis | None, straggler: StragglerCost | None
) -> Iterator[RenderableType]:
    from rich.console import Console

    from planner.report.schedules import render_straggler, render_synthesis, render_timeline

    yield render_timeline(timeline, min(Console().width, MAX_WIDTH))
    if synthesis is not None:
        yield render_synthesis(synthesis)
    if straggler is not None:
        yield render_straggler(straggler)


def _print_comparison(
    name: str | None, seconds: RankSeconds, micro_batches: int, vpp: int | None, as_json: bool
) -> None:
    from planner.report.schedules import comparison_json, render_comparison
    from planner.schedule.compare import compare

    if name is not None:
        raise SpecError(f"--compare and {name!r}: all schedules are compared", "leave one of the two out")
    rows = compare(seconds, micro_batches, vpp)
    tell([comparison_json(row) for row in rows] if as_json else render_comparison(rows))


MIN_SECONDS, MAX_SECONDS = 1e-12, 1e9
"""Less and more than any step takes; what lies between can be added up and drawn. 0 is allowed beside them."""


def rank_seconds(
    pp: int,
    forward: tuple[float, ...] | None,
    backward: tuple[float, ...] | None,
    weight_grad: tuple[float, ...] | None,
    p2p: float,
    blocking: bool,
    sizes: tuple[float, ...] | None,
    slow_ranks: dict[int, float],
    slow_links: dict[tuple[int, int], float],
) -> RankSeconds:
    """Seconds of each rank's passes and transfers; SpecError naming the option that makes no sense."""
    from planner.schedule.compare import RankSeconds

    def per_rank(option: str, values: tuple[float, ...]) -> tuple[float, ...]:
        if len(values) not in (1, pp) or not all(value == 0 or _is_time(value) for value in values):
            raise SpecError(
                f"{option} {','.join(f'{value:g}' for value in values)}: not one time, nor one for each of {pp} ranks",
                f"{option} 1",
            )
        return values if len(values) == pp else values * pp

    forward_s = per_rank("--forward", forward or (1.0,))
    backward_s = per_rank("--backward", backward) if backward else tuple(2 * f for f in forward_s)
    weight_grad_s = per_rank("--weight-grad", weight_grad) if weight_grad else tuple(b / 2 for b in backward_s)
    if any(w > b for w, b in zip(weight_grad_s, backward_s, strict=True)):
        raise SpecError("--weight-grad is longer than --backward, of which it is a part", "lower it, or leave it out")
    if not any((*forward_s, *backward_s)):
        raise SpecError("--forward 0 and --backward 0: no stage takes any time", "leave one of them out")
    input_grad_s = tuple(b - w for b, w in zip(backward_s, weight_grad_s, strict=True))
    (p2p_s,) = per_rank("--p2p", (p2p,))[:1]
    if sizes is not None and not all(map(_is_time, sizes)):
        raise SpecError("--sizes: a micro-batch has no length above 0", "--sizes 1,1,2 for three micro-batches")
    return RankSeconds(
        forward_s, input_grad_s, weight_grad_s, p2p_s, blocking,
        microbatch_sizes=sizes, slow_ranks=slow_ranks, slow_links=slow_links,
    )  # fmt: skip


def slow_stages_of(words: list[str] | None, pp: int) -> dict[int, float]:
    """`3:1.2` as {3: 1.2}."""
    says = f"not a rank below {pp} and a factor"
    return {rank: factor for (rank,), factor in _slow("--slow-stage", words, pp, 1, says, "3:1.2")}


def slow_links_of(words: list[str] | None, pp: int) -> dict[tuple[int, int], float]:
    """`1-2:5` as {(1, 2): 5.0}."""
    says = f"not two ranks below {pp} and a factor"
    return {(one, two): factor for (one, two), factor in _slow("--slow-link", words, pp, 2, says, "1-2:5")}


def _slow(
    option: str, words: list[str] | None, pp: int, count: int, says: str, example: str
) -> Iterator[tuple[list[int], float]]:
    """The ranks and the factor of each word."""
    for word in words or []:
        text, _, factor = word.partition(":")
        ranks = [int(rank) if is_count(rank) else pp for rank in text.split("-")]
        if not (len(ranks) == count and max(ranks) < pp and _is_factor(factor)):
            raise SpecError(f"{option} {word[:60]}: {says}", f"{option} {example}")
        yield ranks, float(factor)


def _is_time(value: float) -> bool:
    return MIN_SECONDS <= value <= MAX_SECONDS


def _is_factor(word: str) -> bool:
    try:
        return 0 < float(word) < float("inf")
    except ValueError:
        return False
