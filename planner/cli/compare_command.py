"""`plan compare`: plans, probes and runs beside each other."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli import options as o
from planner.errors import SpecError

if TYPE_CHECKING:
    from planner.decide.compare import Compared

MOST_FILES = 6
"""More columns than that cannot be read."""
Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE", help="Files of plan -o, plan probe -o, plan import -o, plan observe -o.", show_default=False
    ),
]


def compare_command(files: Files, json: o.Json = False) -> None:
    """Say what differs between plans, probes and runs (imported, observed), and why one is faster: terms that add up.

    The first file is what the others are held against.

    \b
    Example:
      plan compare plan.json other.json
      plan compare plan.json probe.json
      plan observe train.log --plan plan.json -o observed.json
      plan compare plan.json observed.json
      plan import pretrain.sh --gpus 64 -o mine.json
      plan compare mine.json plan.json
    """
    from planner.cli.output import dumps, show
    from planner.decide.compare import compare
    from planner.report.comparison import render_comparison

    if not 2 <= len(files) <= MOST_FILES:
        raise SpecError(f"plan compare: {len(files)} files", f"name two to {MOST_FILES} of them")
    if files.count("-") > 1:
        raise SpecError("plan compare: two files are standard input", "name a file for one of them")
    comparison = compare([_side(path) for path in files])
    if json:
        sys.stdout.write(dumps(comparison.to_json()))
    else:
        show(render_comparison(comparison))


def _side(path: str) -> Compared:
    """One side: a plan, a probe's result, or a run that `plan import` or `plan observe` read."""
    from planner.cli.measurements import is_probe, probe_of
    from planner.decide.compare import of_observation, of_plan, of_probe
    from planner.observe.judge import is_observed, observed_of
    from planner.plan_file import plan_of
    from planner.specs.reading import label, load_yaml
    from planner.specs.reading.limits import SAVED

    data, where = load_yaml(path, SAVED), label(path)
    if is_probe(data):
        return of_probe(probe_of(data, where), where)
    if is_observed(data):
        return of_observation(observed_of(data, where).observation, where)
    if {"source", "evaluated", "run"} <= data.keys():  # plan import --json
        return of_plan(plan_of(data["evaluated"], where), where, "run")
    if "run" in data:
        return of_plan(_priced(data, where), where, "run")
    return of_plan(plan_of(data, where), where)


def _priced(data: dict[str, Any], where: str) -> Any:
    """The price of a run in the form of `plan evaluate --runs`."""
    from planner.layout.evaluate import evaluate
    from planner.layout.runs import parse_run

    run = parse_run(data, where)
    return evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=run.runtime)
