"""`plan explain`: why this layout, or why not the one that the pins ask for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from planner.cli.options import SearchOptions, Word
from planner.errors import SpecError, printable

if TYPE_CHECKING:
    from planner.cli.inputs import Job
    from planner.specs.training import SearchLimits

RECIPE_LIMIT_S = 10.0
"""Seconds that `--recipe` takes at most, unless --time-limit says otherwise."""


def explain_command(
    file: Word = None,
    *,
    asked: SearchOptions,
    program: bool = False,
    recipe: bool = False,
    json: bool = False,
) -> None:
    """Say why the best layout is the best or, with some of its axes pinned, why those are not chosen.

    Takes the main job's options, or a saved plan. With pins it plans with them and without, and says what refuses
    them, what does not fit, or where the seconds go; without, what decides against each alternative and what would
    change the choice.

    \b
    Example:
      plan explain --model 405b --gpus 2048 --tp 16
      plan explain plan.json
      plan explain --model 8b --gpus 16 --program
      plan explain --model qwen3-30b --gpus 16 --recipe
    """
    if program and recipe:
        raise SpecError("--program and --recipe: both given", "ask for one of them")
    job, limits = _asked(file, asked)
    if recipe:
        _print_recipe(job, limits, asked, json)
        return
    if program:
        _print_program(job, limits, json)
        return
    from planner.cli.output import dumps, show, waiting
    from planner.report.explain import render_explanation
    from planner.search.why.explain import explain

    with waiting("searching"):
        answer = explain(job.model, job.cluster, job.training, limits=limits, runtime=job.runtime_spec)
    if json:
        sys.stdout.write(dumps(answer.to_json()))
    else:
        show(render_explanation(answer))


def _asked(file: str | None, asked: SearchOptions) -> tuple[Job, SearchLimits]:
    """The job and the pins of the options, or of a saved plan: a layout that was priced alone is its own pins."""
    from planner.cli.inputs import Job, read_job, read_limits

    if file is None:
        job = read_job(asked)
        return job, read_limits(asked, job)
    if asked.model is not None or asked.gpus is not None:
        raise SpecError(f"{file}: a saved plan has a job, and so have --model and --gpus", "give one of them")
    from planner.answer import Plan
    from planner.trainers.stated import consented, freed

    saved = Plan.load(file)
    runtime = saved.runtime_spec
    job = Job(saved.model.spec, saved.cluster, saved.training, saved.runtime, freed(runtime), {})
    limits = read_limits(asked, job)
    given = {"allow": limits.allow or consented(runtime)}
    layout = saved.parallelism
    if saved.search is None and not limits.model_dump(include={"tp", "pp", "cp", "ep", "dp"}, exclude_none=True):
        pins = ("tp", "cp", "ep", "pp", "vpp", "micro_batch_size")
        return job, limits.model_copy(update=given | {name: (getattr(layout, name),) for name in pins})
    return job, limits.model_copy(update=given)


def _print_recipe(job: Job, limits: SearchLimits, asked: SearchOptions, json: bool) -> None:
    """Plan, set every switch to its other values, and print what that costs."""
    from planner.cli.output import dumps, progress, show
    from planner.report.explain import render_recipe_table
    from planner.search.case import Case
    from planner.search.why.recipe import other_values, recipe_table

    if asked.time_limit is None:
        limits = limits.model_copy(update={"time_limit_s": RECIPE_LIMIT_S})
    case = Case(job.model, job.cluster, job.training, job.runtime_spec, limits)
    with progress("planning without each switch", len(other_values(case))) as advance:
        answer = recipe_table(case, advance)
    if json:
        sys.stdout.write(dumps(answer.to_json()))
    else:
        show(render_recipe_table(answer))


def _print_program(job: Job, limits: SearchLimits, json: bool) -> None:
    """Plan, and print the integer program of the best layout with its numbers."""
    from planner.cli.output import dumps, waiting
    from planner.search.search import plan
    from planner.search.why.explain import program_text

    with waiting("searching"):
        answer = plan(job.model, job.cluster, job.training, limits=limits, runtime=job.runtime_spec)
    text = program_text(answer, limits=limits)
    sys.stdout.write(
        dumps({"parallelism": answer.parallelism.model_dump(), "program": text}) if json else printable(f"{text}\n")
    )
