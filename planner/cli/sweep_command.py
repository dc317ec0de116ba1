"""`plan sweep`: many jobs planned, to decide how many GPUs, and which."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from planner.cli import options as o
from planner.cli.options import Number, SearchOptions, Word
from planner.errors import SpecError
from planner.specs.units import parse_whole

if TYPE_CHECKING:
    from planner.decide.sweep import Goal, Sweep, Trial

AUTO = "auto"
MOST_GPUS = 131_072
"""The most GPUs that `--gpus auto` looks at."""
MOST_POINTS = 4096
"""The most points of one sweep: at a second for each, an hour."""
TEXTS: tuple[str, ...] = ("hardware", "runtime", "dtype", "schedule", "recompute")
NUMBERS: tuple[str, ...] = (
    "seq_length", "global_batch_size", "tp", "pp", "dp", "cp", "ep", "etp", "vpp", "micro_batch_size", "zero_stage",
)  # fmt: skip


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class SweepOptions(SearchOptions):
    """A job of which some options have several values: each combination is a point."""

    gpus: Word = None  # type: ignore[assignment]
    seq_length: Word = None  # type: ignore[assignment]
    global_batch_size: Word = None  # type: ignore[assignment]


def sweep_command(
    asked: SweepOptions,
    deadline: Number = None,
    usd: Number = None,
    json: bool = False,
    csv: Word = None,
    plot: Word = None,
    force: bool = False,
) -> None:
    """Plan a job on many numbers and kinds of GPUs, and say which are the fewest, the cheapest and the fastest.

    Every option of the job and the layout takes a list (8,16) or a range (256..4096, by doubling, or a..b:step). With
    --deadline or --usd, --gpus auto finds the fewest GPUs that meet it.

    \b
    Example:
      plan sweep --model 70b --gpus 64,128,256
      plan sweep --model 70b --gpus auto --tokens 2T --deadline 30d
      plan sweep --model 70b --gpus 128 --hardware h100,h200,b200 --tokens 2T
    """
    from planner.cli.output import dumps, show
    from planner.files import STDOUT, refuse_to_overwrite, write_text
    from planner.report.sweep import as_csv, render_sweep

    for path in (csv, plot):
        refuse_to_overwrite(path, force)
    draw = None if plot is None else _drawing_to(plot)
    goal = _goal(asked, deadline, usd)
    answer = _swept(asked, goal)
    if draw is not None and plot is not None:
        draw(answer, plot, force)
    if csv is not None:
        write_text(csv, as_csv(answer), force)
    if csv == STDOUT:
        return
    if json:
        sys.stdout.write(dumps(answer.to_json()))
    else:
        show(render_sweep(answer))


def _goal(asked: SweepOptions, deadline: float | None, usd: float | None) -> Goal:
    from planner.decide.sweep import Goal

    for name, given in (("--deadline", deadline), ("--usd", usd)):
        if given is not None and not 0 < given < math.inf:
            raise SpecError(
                f"{name}: {given:g} is not more than 0", f"write {name} {5_000_000 if name == '--usd' else 30}"
            )
        if given is not None and asked.tokens is None:
            raise SpecError(f"{name}: a run without tokens has no end", f"add --tokens 15T to {name} {given:g}")
    return Goal(deadline_days=deadline, budget_usd=usd)


def _swept(asked: SweepOptions, goal: Goal) -> Sweep:
    """Plan the points that the options name, or look for the number of GPUs that meets the goal."""
    from planner.cli.output import progress
    from planner.decide.sweep import of_points, planners, sweep

    if asked.gpus is None:
        raise SpecError("--gpus: is missing", "for example --gpus 256,512, 256..4096 or auto")
    trials = list(_trials(asked))
    if asked.gpus == AUTO:
        with progress("looking for the fewest GPUs", None) as advance, planners(MOST_GPUS, advance) as plan_all:
            return of_points([point for trial in trials for point in _auto(trial, goal, plan_all)], goal)
    with progress("planning", len(trials)) as advance, planners(len(trials), advance) as plan_all:
        return sweep(trials, goal, plan_all)


def _auto(trial: Trial, goal: Goal, plan_all: Any) -> list[Any]:
    """The points planned on the way to the fewest GPUs that meet the goal, and to the most within a budget."""
    from planner.decide.sweep import PlannedNodes

    nodes = PlannedNodes(trial, plan_all, MOST_GPUS // trial.case.cluster.node_size)
    first = nodes.first_that(lambda point: point.fits)
    if first is not None and goal.deadline_days is not None:
        in_time = goal.model_copy(update={"budget_usd": None})
        first = nodes.first_that(in_time.is_met, first)
    if first is not None and goal.budget_usd is not None and goal.is_met(nodes.point(first)):
        nodes.last_that(goal.is_met, first)
    return [nodes.points[number] for number in sorted(nodes.points)]


def _trials(asked: SweepOptions) -> Iterator[Trial]:
    """One trial for each combination of the options' values."""
    from planner.cli.inputs import read_job, read_limits
    from planner.decide.sweep import Trial
    from planner.search.case import Case

    axes, said = _axes(asked), set[str]()
    single = {field.name: getattr(asked, field.name) for field in fields(SearchOptions)}
    num_others = prod(len(values) for values in axes.values())
    if num_others > MOST_POINTS:
        raise _too_many(num_others)
    for values in product(*axes.values()):
        options = dict(zip(axes, values, strict=True))
        point = SearchOptions(**{**single, **{name: _typed(name, value) for name, value in options.items()}})
        numbers_of_gpus = _gpus(asked, point)
        if num_others * len(numbers_of_gpus) > MOST_POINTS:
            raise _too_many(num_others * len(numbers_of_gpus))
        for gpus in numbers_of_gpus:
            job = read_job(replace(point, gpus=gpus), said)
            limits = read_limits(point, job)
            case = Case(job.model, job.cluster, job.training, job.runtime_spec, limits)
            yield Trial({"gpus": gpus, **{name: value for name, value in options.items() if len(axes[name]) > 1}}, case)


def _too_many(num_points: int) -> SpecError:
    return SpecError(
        f"plan sweep: {num_points:,} points", f"at most {MOST_POINTS:,}: give shorter lists, or plan in parts"
    )


def _axes(asked: SweepOptions) -> dict[str, list[Any]]:
    """The values of each option that was given, beside --gpus."""
    from planner.cli.inputs import listed, option

    axes: dict[str, list[Any]] = {}
    for name in (*TEXTS, *NUMBERS):
        text = getattr(asked, name)
        if text is None:
            continue
        axes[name] = numbers(option(name), text, doubling) if name in NUMBERS else list(listed(name, text, str))
    return axes


def _typed(name: str, value: Any) -> Any:
    """A value as `plan` takes it: numbers of the job as numbers, those of the layout as text."""
    return value if name in (*TEXTS, "seq_length", "global_batch_size") else str(value)


def _gpus(asked: SweepOptions, point: SearchOptions) -> list[int]:
    """The numbers of GPUs; one node, from which the search for the fewest starts, where they are looked for."""
    from planner.specs.registry import load_hardware

    node_size = point.gpus_per_node or load_hardware(point.hardware or o.DEFAULT_HARDWARE).gpus_per_node
    if asked.gpus == AUTO:
        return [node_size]
    return numbers("--gpus", str(asked.gpus), by_nodes(node_size))


def _drawing_to(path: str) -> Callable[[Sweep, str, bool], None]:
    """The function that draws a sweep, once it is known that it can draw to `path`."""
    from planner.report.plots import check_picture, draw_sweep

    check_picture(path, "sweep")
    return draw_sweep


MOST_STEPS = 1024
"""The most points of a range that gives its step."""
_RANGE = re.compile(r"([0-9]{1,18}[kKmM]?)\.\.([0-9]{1,18}[kKmM]?)(?::([0-9]{1,18}))?")


def numbers(option: str, text: str, between: Callable[[int, int], list[int]]) -> list[int]:
    """The numbers of a list of numbers and ranges; `between` gives those of a range without a step."""
    found: dict[int, None] = {}
    for part in text.split(","):
        found |= dict.fromkeys(_numbers_of(option, part.strip(), between))
    if len(found) > MOST_STEPS:
        raise SpecError(f"{option}: {text[:60]!r} are {len(found):,} points", f"at most {MOST_STEPS:,}: a longer step")
    return list(found)


def _numbers_of(option: str, part: str, between: Callable[[int, int], list[int]]) -> list[int]:
    match = _RANGE.fullmatch(part)
    try:
        whole = [parse_whole(word, "size") for word in ((part,) if match is None else match.groups("1"))]
    except ValueError:
        whole = [0]
    if match is None:
        if whole[0] < 1:
            raise SpecError(
                f"{option}: {part[:60]!r} is no whole number and no range", f"write {option} 256,512 or 256..4096"
            )
        return whole
    first, last, step = whole[0], whole[1], match[3]
    if not 0 < first <= last or (step is not None and int(step) < 1):
        raise SpecError(
            f"{option}: {part[:60]!r} is an empty range", f"write the smaller number first: {option} 256..4096"
        )
    if step is None:
        return between(first, last)
    if (last - first) // int(step) >= MOST_STEPS:
        raise SpecError(f"{option}: {part[:60]!r} has more than {MOST_STEPS:,} points", "a longer step, or a list")
    return list(range(first, last + 1, int(step)))


def by_nodes(node_size: int) -> Callable[[int, int], list[int]]:
    """The powers of two between two numbers of nodes, and both ends."""

    def between(first: int, last: int) -> list[int]:
        low, high = -(-first // node_size), last // node_size
        if low > high:
            raise SpecError(
                f"--gpus: {first}..{last} holds no whole node of {node_size} GPUs", "name the numbers instead"
            )
        powers = [2**power for power in range(high.bit_length()) if low < 2**power < high]
        return [nodes * node_size for nodes in dict.fromkeys([low, *powers, high])]

    return between


def doubling(first: int, last: int) -> list[int]:
    """The first number and its doubles up to the last one."""
    return list(_doubles(first, last))


def _doubles(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2
