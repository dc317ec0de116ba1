"""`plan next`: the one short run that is worth most, and what it would decide."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.cli.options import Number, Word
from planner.errors import Infeasible, PlannerError, SpecError

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.decide.next import MeasuredChoice, NextRun

_log = logging.getLogger(__name__)
_FITS = "plan --model 8b --gpus 16 -o plan.json searches for one that fits"


def next_command(
    plan: str,
    measured: Word = None,
    history: Word = None,
    no_history: bool = False,
    skip: Word = None,
    days: Number = None,
    json: bool = False,
    output: Word = None,
    force: bool = False,
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
    from planner.cli.output import dumps, show
    from planner.decide.next import DEFAULT_DAYS, NextRun, choices_of, next_answer
    from planner.export.run_settings import FIRST_RUN_STEPS
    from planner.files import STDOUT, refuse_to_overwrite
    from planner.plan_file import read_plan
    from planner.report.runs import render_next

    refuse_to_overwrite(output, force)
    read = read_plan(plan)
    if not read.fits:
        raise Infeasible(f"{plan}: its layout does not fit, and no run of it is worth proposing", _FITS)
    if days is not None and not 0 < days < float("inf"):
        raise SpecError(f"--days: {days:g} is no time", "write --days 30")
    known = [] if no_history else list(_kept(read, history))
    known = _once([*_observed(read, measured), *known])
    choices = choices_of(read)
    days = days or (DEFAULT_DAYS if read.run_cost is None else read.run_cost.days)
    run = NextRun(read.cluster.num_gpus, choices, known, days, FIRST_RUN_STEPS, _skipped(skip, len(choices)))
    answer = next_answer(run, read.model.name)
    _save_trial(read, run, output, force)
    if output == STDOUT:
        return
    if json:
        sys.stdout.write(dumps(answer.model_dump(mode="json")))
    else:
        show(render_next(answer))


def _save_trial(plan: Plan, run: NextRun, output: str | None, force: bool) -> None:
    from planner.cli.output import target_of
    from planner.decide.next import trial_plan
    from planner.files import STDOUT

    place = run.proposed()
    if output is None or place is None:
        if output is not None:
            _log.warning("no trial pays: %s is not written", output)
        return
    trial_plan(plan, run, place).save(output, force=force)
    if output != STDOUT:
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
        yield MeasuredChoice(choice_of(plan, observed.plan), evidence.step_s, evidence.width, where)


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
            yield MeasuredChoice(choice_of(plan, kept.plan), kept.step_s, kept.own_width, name)


def _once(runs: list[MeasuredChoice]) -> list[MeasuredChoice]:
    """The runs without those that were given twice: as a file, and kept."""
    return list({(run.choice.key, round(run.step_s, 9)): run for run in reversed(runs)}.values())[::-1]
