"""`plan evaluate`: the price of layouts that someone chose."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from planner.cli import options as o
from planner.cli.job_options import LayoutOptions, command_line, job_options
from planner.errors import PlannerError, SpecError, one_line

if TYPE_CHECKING:
    from planner.answer import PricedLayout
    from planner.cli.inputs import Job

MAX_LINE_BYTES = 2**20
OWN_CHOICE_LIMIT_S = 10.0
Runs = Annotated[
    str | None,
    o.text(o.JOB, "--runs", "FILE", 'Price many: a {"id": …, "run": {…}} a line in, an answer a line out; - is stdin.'),
]


@job_options
def evaluate_command(
    ctx: typer.Context,
    asked: LayoutOptions,
    runs: Runs = None,
    json: o.Json = False,
    output: o.Output = None,
    force: o.Force = False,
) -> None:
    """Price a given layout, fit or not, or a file of many.

    \b
    Example:
      plan evaluate --model 405b --gpus 16384 --tp 8 --pp 16 --dp 128
      plan evaluate --runs runs.jsonl --json
    """
    if runs is not None:
        _evaluate_runs(ctx, runs, json)
        return
    from planner.cli.inputs import read_described, read_job, read_parallelism
    from planner.cli.output import dumps, save, show
    from planner.files import refuse_to_overwrite
    from planner.layout.evaluate import evaluate
    from planner.trainers.stated import consented

    job = read_job(asked)
    run, parallelism = read_described(asked, job), read_parallelism(asked)
    if output is not None:
        refuse_to_overwrite(output, force)
    says = run.says_switches
    plan = evaluate(run.model, run.cluster, run.training, parallelism, runtime=run.runtime_spec, says_switches=says)
    plan = plan.model_copy(update={"command": command_line(asked, "plan evaluate")})
    if save(plan, output, force):
        return
    if json:
        sys.stdout.write(dumps(plan.to_json()))
    else:
        from planner.report.terminal import render

        show(render(plan, _own_choice(job, consented(run.runtime_spec))))


def _own_choice(job: Job, allow: tuple[str, ...]) -> PricedLayout | None:
    """The planner's choice for the same job, under the same consent; None where it finds no layout that fits."""
    from planner.cli.output import waiting
    from planner.search.search import plan
    from planner.specs.training import SearchLimits

    limits = SearchLimits(time_limit_s=OWN_CHOICE_LIMIT_S, allow=allow)
    try:
        with waiting("searching for the planner's own choice"):
            return plan(job.model, job.cluster, job.training, limits=limits, runtime=job.runtime_spec).best
    except PlannerError:
        return None


def _evaluate_runs(ctx: typer.Context, path: str, as_json: bool) -> None:
    for name, value in ctx.params.items():
        if name not in ("runs", "json") and value is not None and value is not False:
            raise SpecError(f"--runs and --{name.replace('_', '-')}: both given", "each line of the file says it all")
    from planner.cli.output import dumps
    from planner.layout.runs import evaluate_lines
    from planner.report.terminal import summary

    with _opened(path) as file:
        for run in evaluate_lines(_lines(file, path)):
            if as_json:
                sys.stdout.write(dumps(run.to_json(), indent=None))
            else:
                text = summary(run.layout) if run.layout else f"error: {run.error}"
                sys.stdout.write(f"{one_line(str(run.id))}\n    {one_line(text)}\n")
            sys.stdout.flush()


def _opened(path: str) -> BinaryIO:
    from planner.specs.reading import STDIN

    if path == STDIN:
        return sys.stdin.buffer
    try:
        return open(path, "rb")
    except OSError as error:
        raise SpecError(f"--runs: {path}: {error.strerror}", "name a file of JSON lines, or - for stdin") from None


def _lines(file: BinaryIO, path: str) -> Iterator[str]:
    """Lines as text, none read before it is asked for; SpecError for what cannot be a file of runs."""
    try:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES or b"\0" in line:
                raise SpecError(f"--runs: {path}: is not a file of JSON lines", "write one JSON object a line")
            yield line.decode(errors="replace").removeprefix("\ufeff")
    except OSError as error:
        raise SpecError(f"--runs: {path}: {error.strerror}", "name a file of JSON lines, or - for stdin") from None
