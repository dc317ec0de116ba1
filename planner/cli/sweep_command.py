"""`plan sweep`, many jobs planned to decide on GPUs, and `plan next`, the one short run that is worth most."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from planner.cli import options as o
from planner.cli.options import Number, Saving, SearchOptions, Word
from planner.cli.output import progress, refuse_files, target_of, tell
from planner.errors import Infeasible, PlannerError, SpecError
from planner.files import STDOUT, write_text
from planner.specs.units import parse_whole

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.decide.next import MeasuredChoice, NextRun
    from planner.decide.sweep import Goal, Sweep, Trial

_log = logging.getLogger(__name__)
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
    from planner.report.decisions import as_csv, render_sweep

    refuse_files({"--csv": csv, "--plot": plot}, force)
    if plot is not None:
        from planner.report.plots import check_picture

        check_picture(plot, "sweep")
    goal = _goal(asked, deadline, usd)
    answer = _swept(asked, goal)
    if plot is not None:
        from planner.report.plots import drawn_sweep

        write_text(plot, drawn_sweep(answer), force)
    if csv is not None:
        write_text(csv, as_csv(answer), force)
    if csv == STDOUT:
        return
    tell(answer.to_json() if json else render_sweep(answer))


def _goal(asked: SweepOptions, deadline: float | None, usd: float | None) -> Goal:
    from planner.decide.sweep import Goal

    for name, given in (("--deadline", deadline), ("--usd", usd)):
        if given is not None and asked.tokens is None:
            raise SpecError(f"{name}: a run without tokens has no end", f"add --tokens 15T to {name} {given:g}")
    return Goal(deadline_days=deadline, budget_usd=usd)


def _swept(asked: SweepOptions, goal: Goal) -> Sweep:
    """Plan the points that the options name, or look for the number of GPUs that meets the goal."""
    from planner.decide.sweep import of_points, plan_all

    if asked.gpus is None:
        raise SpecError("--gpus: is missing", "for example --gpus 256,512, 256..4096 or auto")
    trials = list(_trials(asked))
    if asked.gpus == AUTO:
        with progress("looking for the fewest GPUs", None) as advance:
            each = partial(plan_all, advance=advance)
            return of_points([point for trial in trials for point in _auto(trial, goal, each)], goal)
    with progress("planning", len(trials)) as advance:
        return of_points(plan_all(trials, advance), goal)


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
    from planner.cli.inputs import read_case
    from planner.decide.sweep import Trial

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
            told = {name: value for name, value in options.items() if len(axes[name]) > 1}
            yield Trial({"gpus": gpus, **told}, read_case(replace(point, gpus=gpus), said))


def _too_many(num_points: int) -> SpecError:
    return SpecError(
        f"plan sweep: {num_points:,} points", f"at most {MOST_POINTS:,}: give shorter lists, or plan in parts"
    )


def _axes(asked: SweepOptions) -> dict[str, list[Any]]:
    """The values of each option that was given, beside --gpus."""
    from planner.cli.inputs import listed, option

    axes = {}
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
    first, last, step = whole
    if not 0 < first <= last or step < 1:
        raise SpecError(
            f"{option}: {part[:60]!r} is an empty range",
            f"write the smaller number first, from 1 on, and a step of at least 1: {option} 256..4096:256",
        )
    if match[3] is None:
        return between(first, last)
    if (last - first) // step >= MOST_STEPS:
        raise SpecError(f"{option}: {part[:60]!r} has more than {MOST_STEPS:,} points", "a longer step, or a list")
    return list(range(first, last + 1, step))


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
    return [first * 2**times for times in range((last // first).bit_length())]


def next_command(
    plan: str,
    measured: Word = None,
    history: Word = None,
    no_history: bool = False,
    skip: Word = None,
    days: Number = None,
    *,
    saving: Saving,
) -> None:
    """Say which one short run to do next: that whose step saves most of the long run, and what it would decide.

    It looks at the plan's layouts and at its best one with each switch at another value. Where no trial pays for
    itself, it says so. A plan with more --top, or with --tokens, gives it more to choose from and to weigh.

    \b
    Example:
      plan next plan.json --days 30 -o next.json
      plan export next.json --to megatron --trials 0 -o trial
      plan observe trial/trial-0/first_run.log --plan next.json -o observed.json
      plan next plan.json --days 30 --measured observed.json
    """
    from planner.decide.next import DEFAULT_DAYS, NextRun, choices_of, next_answer
    from planner.export.run_settings import FIRST_RUN_STEPS
    from planner.plan_file import read_plan
    from planner.report.runs import render_next

    saving.check()
    read = read_plan(plan)
    if not read.fits:
        job = f"--model {read.model.name} --gpus {read.cluster.num_gpus} --hardware {read.cluster.hardware.name}"
        problem = f"{plan}: its layout does not fit, and no run of it is worth proposing"
        raise Infeasible(problem, f"plan {job} -o plan.json searches for one that fits")
    known = [] if no_history else list(_kept(read, history))
    known = _once([*_observed(read, measured), *known])
    choices = choices_of(read)
    days = days or (DEFAULT_DAYS if read.run_cost is None else read.run_cost.days)
    run = NextRun(read.cluster.num_gpus, choices, known, days, FIRST_RUN_STEPS, _skipped(skip, len(choices)))
    answer = next_answer(run, read.model.name)
    _save_trial(read, run, saving)
    if not saving.is_to_stdout:
        tell(answer.model_dump(mode="json") if saving.json else render_next(answer))


def _save_trial(plan: Plan, run: NextRun, saving: Saving) -> None:
    from planner.decide.next import trial_plan

    place, output = run.proposed(), saving.output
    if output is None or place is None:
        if output is not None:
            _log.warning("no trial pays: %s is not written", output)
        return
    trial_plan(plan, run, place).save(output, force=saving.force)
    if not saving.is_to_stdout:
        target = target_of(plan)
        export = f": plan export {output} --to {target} --trials 0 writes the run" if target else ""
        _log.info("wrote %s%s", output, export)


def _skipped(skip: str | None, count: int) -> frozenset[int]:
    from planner.cli.inputs import listed

    numbers = frozenset(() if skip is None else listed("skip", skip, int))
    if wrong := [number for number in numbers if not 0 <= number < count]:
        raise SpecError(f"--skip: {wrong[0]} is no layout of this plan", f"numbers of the table, 0 to {count - 1}")
    return numbers


def _observed(plan: Plan, paths: str | None) -> Iterator[MeasuredChoice]:
    """The runs in files of `plan observe`."""
    from planner.decide.next import MeasuredChoice, choice_of, other_job
    from planner.observe.calibration_by_run import evidence_of
    from planner.observe.judge import read_observed
    from planner.specs.reading import label

    for path in [] if paths is None else paths.split(","):
        observed, where = read_observed(path), label(path)
        evidence = evidence_of(observed, observed.plan, plan.cluster, where)
        assert observed.plan is not None, "evidence_of refuses a run without a plan"
        if differs := other_job(plan, observed.plan):
            raise SpecError(f"{where}: is a run of another job: {differs}", "observe it with a layout of this plan")
        for sentence in evidence.left_out:
            _log.warning("%s: %s", where, sentence)
        yield MeasuredChoice(choice_of(plan, observed.plan), evidence.step_s, evidence.width)


def _kept(plan: Plan, given: str | None) -> Iterator[MeasuredChoice]:
    """The runs of this job among those that `plan validate --add` keeps."""
    from planner.decide.next import MeasuredChoice, choice_of, other_job
    from planner.observe import folder_of
    from planner.observe.history import kept_files, read_kept

    folder = folder_of(given)
    if folder is None or not folder.is_dir():
        if given:
            raise SpecError(f"--history: {given}: is no folder", "plan validate --add observed.json --history DIR")
        return
    for name in kept_files(folder):
        try:
            kept = read_kept(folder / name)
        except PlannerError as error:
            _log.warning("%s: is left out: %s", name, error.message)
            continue
        if not other_job(plan, kept.plan):
            yield MeasuredChoice(choice_of(plan, kept.plan), kept.step_s, kept.own_width)


def _once(runs: list[MeasuredChoice]) -> list[MeasuredChoice]:
    """The runs without those that were given twice: as a file, and kept."""
    return list({(run.choice.key, round(run.step_s, 9)): run for run in reversed(runs)}.values())[::-1]
