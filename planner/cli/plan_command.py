"""`plan --model … --gpus …`, `plan evaluate` and `plan explain`: a layout that is searched or chosen, and why.

Beside them what the main job becomes with --from, a job that goes on, and with --phases, a run of several.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO

import typer

from planner.cli.options import Answering, LayoutOptions, PlanOptions, Saving, SearchOptions, Word, command_line
from planner.cli.output import answer, dumps, progress, save, tell, waiting, warn_of_early_stop
from planner.errors import PlannerError, SpecError, one_line, printable
from planner.files import STDOUT, FolderFile, refuse_to_overwrite, write_folder, write_text

if TYPE_CHECKING:
    from planner.answer import Plan, PricedLayout
    from planner.cli.inputs import Job
    from planner.decide.phases import Batch, Phase, PhasesAnswer
    from planner.search.case import Case
    from planner.specs.base import Named, Texts
    from planner.specs.phases import PhaseSpec
    from planner.specs.training import TrainingSpec

_log = logging.getLogger(__name__)
MAX_LINE_BYTES = 2**20
OWN_CHOICE_LIMIT_S = 10.0
SUMMARY = "phases.json"


def plan_command(
    ctx: typer.Context,
    asked: PlanOptions,
    form: Answering,
) -> None:
    """Plan how to lay a large model out on N GPUs: the fastest layout that fits, proven, and why not the others.

    \b
    Example:
      plan --model 405b --gpus 2048
      plan --model deepseek-v3 --gpus 2048 --pp 8,16 --tokens 15T -o plan.json
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options_before(ctx)
        return
    if asked.phases is not None:
        return plan_phases(asked, asked.phases, form)
    if asked.from_ is not None:
        return replan_command(asked, asked.from_, asked.keep, form)
    if asked.keep is not None:
        raise SpecError("--keep: without --from, no job has anything to keep", "add --from plan.json")
    from planner.cli.inputs import read_case
    from planner.layout.evaluate import within
    from planner.search.search import planned

    case = read_case(asked)
    form.names  # noqa: B018 — refused before the search
    form.check()
    with waiting("searching") as news:
        found = planned(case, news)
    best = within(found, asked.days, asked.usd).model_copy(update={"command": command_line(asked)})
    warn_of_early_stop(best)
    answer(best, form)


def _refuse_options_before(ctx: typer.Context) -> None:
    given = [name for name, value in ctx.params.items() if value is not None and value is not False]
    if given:
        option, command = "--" + given[0].strip("_").replace("_", "-"), ctx.invoked_subcommand
        raise SpecError(f"{option}: stands before the command {command}", f"write plan {command} {option} …")


def evaluate_command(
    ctx: typer.Context,
    asked: LayoutOptions,
    runs: Word = None,
    *,
    form: Answering,
) -> None:
    """Price a given layout, fit or not, or a file of many.

    \b
    Example:
      plan evaluate --model 405b --gpus 16384 --tp 8 --pp 16 --dp 128
      plan evaluate --runs runs.jsonl --json
    """
    if runs is not None:
        _evaluate_runs(ctx, runs, form.json)
        return
    from planner.cli.inputs import priced
    from planner.trainers.stated import consented

    form.check()
    job, run, plan = priced(asked)
    plan = plan.model_copy(update={"command": command_line(asked, "plan evaluate")})
    own = None if form.json or form.is_to_stdout else _own_choice(job, consented(run.runtime_spec))
    answer(plan, form, own)


def _own_choice(job: Job, allow: Texts) -> PricedLayout | None:
    """The planner's choice for the same job, under the same consent; None where it finds no layout that fits."""
    from planner.search.search import planned
    from planner.specs.training import SearchLimits

    case = job.searched(SearchLimits(time_limit_s=OWN_CHOICE_LIMIT_S, allow=allow))
    try:
        with waiting("searching for the planner's own choice") as news:
            return planned(case, news).best
    except PlannerError:
        return None


def _evaluate_runs(ctx: typer.Context, path: str, as_json: bool) -> None:
    for name, value in ctx.params.items():
        if name not in ("runs", "json") and value is not None and value is not False:
            raise SpecError(f"--runs and --{name.replace('_', '-')}: both given", "each line of the file says it all")
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


def replan_command(asked: SearchOptions, path: str, keep: str | None, saving: Saving) -> None:
    """Answer how the job of a saved plan goes on with `--gpus`."""
    from planner.cli.inputs import Job, in_gpus, listed, read_limits
    from planner.decide.resume import replan
    from planner.plan_file import read_plan
    from planner.report.runs import render_resume

    _check_running(asked, path)
    saving.check()
    old = read_plan(path)
    asked = in_gpus(asked, old.cluster.node_size)
    assert asked.gpus is not None
    training = _training_of(asked, old)
    job = Job(old.model.spec, old.cluster, training, old.runtime, old.runtime_spec, {})
    limits = read_limits(asked, job)
    axes = () if keep is None else tuple(axis.replace("-", "_") for axis in listed("keep", keep, str))
    with waiting("replanning"):
        found = replan(old, asked.gpus, axes, training=training, limits=limits)
    plan = found.plan.model_copy(update={"command": command_line(asked)}) if found.resume.choices else found.plan
    if save(plan, saving):
        return
    tell(replace(found, plan=plan).to_json() if saving.json else render_resume(found.resume, plan))


def _check_running(asked: SearchOptions, path: str) -> None:
    """Raise SpecError for an option that the running job answers, and without a number of GPUs."""
    from planner.decide.job import OF_THE_JOB

    for name in OF_THE_JOB:
        if getattr(asked, name) not in (None, False):
            option = "--" + name.replace("_", "-")
            ways = {"batch_tokens": "give sequences: -b", "allow": "move a switch: --switch NAME=VALUE"}
            raise SpecError(f"{option}: the running job's comes from {path}", ways.get(name, f"leave {option} out"))
    if asked.gpus is None and asked.nodes is None:
        raise SpecError("--gpus: is missing", f"for example plan --from {path} --gpus 1984")


def _training_of(asked: SearchOptions, old: Plan) -> TrainingSpec:
    """The old plan's training, with the options that may change while a job runs."""
    from planner.cli.inputs import checked_options, count_of, given_of
    from planner.months.whole_run import check_spares
    from planner.specs.training import OperationsSpec, TrainingSpec

    names = ("global_batch_size", "moe_imbalance", "straggler_fraction")
    changed = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    if asked.tokens is not None:
        changed["tokens"] = count_of("tokens", asked.tokens)
    given = {**old.training.operations.model_dump(), **given_of(asked, OperationsSpec)}
    values = {**old.training.model_dump(), **changed, "operations": checked_options(OperationsSpec, given)}
    training = checked_options(TrainingSpec, values)
    check_spares(old.cluster.changed(num_gpus=asked.gpus), training)
    return training


def plan_phases(asked: PlanOptions, path: str, saving: Saving) -> None:
    """Plan the phases of a file, print the run, and save it: a file of all, or a folder with a plan of each."""
    from planner.decide.course import answer_of, course_of
    from planner.report.runs import render_phases
    from planner.specs.phases import read_phases

    if asked.from_ is not None or asked.keep is not None:
        other = "--from" if asked.from_ is not None else "--keep"
        raise SpecError(f"{other} and --phases: both given", f"plan the phases without {other}")
    if asked.tokens is not None:
        raise SpecError(
            "--tokens and --phases: both given", "leave --tokens out: the file says how many each phase has"
        )
    file = read_phases(path)
    said = set[str]()
    phases = [_phase(asked, spec, path, said) for spec in file.phases]
    paths = _paths(saving, [phase.name for phase in phases])
    with progress("planning phases", len(phases)) as advance:
        run = answer_of(course_of(phases, file.reshard_hours, advance), command_line(asked))
    # printed first, so that a file that cannot be written loses nothing
    if not saving.is_to_stdout:
        tell(run.to_json() if saving.json else render_phases(run))
    if saving.output is not None:
        _save(run, saving.output, paths, saving.force)


def _phase(asked: PlanOptions, spec: PhaseSpec, path: str, said: set[str]) -> Phase:
    """A phase as the command line and the file describe it; SpecError naming the file and the phase."""
    from planner.cli.inputs import read_case
    from planner.decide.phases import Phase
    from planner.specs.reading import label

    own = replace(_options(asked, spec), phases=None)
    try:
        case = read_case(own, said)
        training, ramp = case.training, spec.rampup
        batches = tuple(_batches(spec, training.global_batch_size, training.seq_length))
        tokens = sum(batch.tokens for batch in batches)
    except PlannerError as error:
        error.message = f"{label(path)}: phase {spec.name}: {error.message}"
        raise
    case = case.trained(tokens=float(tokens), document_lengths=spec.lengths)
    is_plain = spec.lengths is None and ramp is None
    command = command_line(replace(own, tokens=str(round(tokens)))) if is_plain else command_line(asked)
    return Phase(spec.name, case, batches, command)


def _options(asked: PlanOptions, spec: PhaseSpec) -> PlanOptions:
    """The options of the command line with those of the phase in their places."""
    stated = {name: getattr(spec, name) for name in ("seq_length", "dtype", "gpus", "allow", "switch")}
    batch = spec.global_batch_size
    if spec.batch_tokens is None and batch is None and spec.rampup is not None:
        batch = spec.rampup.to
    if batch is not None or spec.batch_tokens is not None:
        asked = replace(asked, global_batch_size=None, batch_tokens=None)
        stated |= {
            "global_batch_size": batch,
            "batch_tokens": None if spec.batch_tokens is None else str(spec.batch_tokens),
        }
    # operations are said to have no effect without tokens; how many a phase has is known when its batch is
    return replace(asked, tokens="1e15", **{name: value for name, value in stated.items() if value is not None})


def _batches(spec: PhaseSpec, last: int, seq_length: int) -> Iterator[Batch]:
    """The batches of a phase, the last one at the end."""
    from planner.decide.phases import Batch
    from planner.shape import divisors

    ramp, left = spec.rampup, float(spec.tokens or 0)
    if spec.steps is not None:
        left = float(spec.steps) * last * seq_length
    if ramp is not None:
        if ramp.start >= last or (last - ramp.start) % ramp.by:
            raise SpecError(
                f"rampup: from {ramp.start:,} by {ramp.by:,} does not reach the batch of {last:,} sequences",
                f"write by: {divisors(last - ramp.start, ramp.by)[-1]}"
                if ramp.start < last
                else f"let it begin below {last:,}, or leave rampup out",
            )
        samples = float(ramp.samples) if ramp.samples is not None else float(ramp.tokens or 0) / seq_length
        sizes = ramp.batches(last)
        each = samples * seq_length / len(sizes)
        left -= each * len(sizes)
        if left <= 0:
            raise SpecError(
                f"rampup: lasts {samples * seq_length:,.0f} tokens, the phase {float(spec.tokens or 0):,.0f}",
                f"give the phase more tokens than {samples * seq_length:,.0f}",
            )
        yield from (Batch(size, each) for size in sizes)
    if not math.isfinite(left):
        raise SpecError("tokens: is too large", "write tokens: 15T")
    yield Batch(last, left)


def _paths(saving: Saving, names: list[str]) -> Named:
    """The files of a folder's plans by phase, none of which may be there already; empty where a file is asked for."""
    output = saving.output
    if output is None or not (output.endswith("/") or os.path.isdir(output)):
        saving.check()
        return {}
    paths = {name: os.path.join(output, f"plan-{name}.json") for name in names}
    if os.path.isdir(output):
        for file in (*paths.values(), os.path.join(output, SUMMARY)):
            refuse_to_overwrite(file, saving.force)
    return paths


def _save(run: PhasesAnswer, output: str, paths: Named, force: bool) -> None:
    """Write one file, or a folder with a plan of each phase and the whole run."""

    if not paths:
        write_text(output, dumps(run.to_json()), force)
        if output != STDOUT:
            folder = PurePath(output).stem
            _log.info("wrote %s; -o %s/ writes a plan of each phase, which other commands read", output, folder)
        return
    files = [FolderFile(os.path.basename(paths[phase.name]), phase.plan.saved_text().encode()) for phase in run.phases]
    write_folder(Path(output), [*files, FolderFile(SUMMARY, dumps(run.to_json()).encode())], force)
    _log.info("wrote %s, and %s with a plan of each phase", os.path.join(output, SUMMARY), ", ".join(paths.values()))


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
    case = _explained(file, asked)
    if recipe:
        return _print_recipe(case if asked.time_limit else case.limited(time_limit_s=RECIPE_LIMIT_S), json)
    if program:
        return _print_program(case, json)
    from planner.report.explain import render_explanation
    from planner.search.why.explain import explained

    with waiting("searching"):
        answer = explained(case)
    tell(answer.to_json() if json else render_explanation(answer))


def _explained(file: str | None, asked: SearchOptions) -> Case:
    """The job and the pins of the options, or of a saved plan: a layout that was priced alone is its own pins."""
    from planner.cli.inputs import Job, read_case, read_limits

    if file is None:
        return read_case(asked)
    if asked.model is not None or asked.gpus is not None:
        raise SpecError(f"{file}: a saved plan has a job, and so have --model and --gpus", "give one of them")
    from planner.answer import Plan
    from planner.trainers.stated import consented, freed

    saved = Plan.load(file)
    runtime = saved.runtime_spec
    job = Job(saved.model.spec, saved.cluster, saved.training, saved.runtime, freed(runtime), {})
    case = job.searched(read_limits(asked, job))
    case = case.limited(allow=case.limits.allow or consented(runtime))
    if saved.search is None and not {"tp", "pp", "cp", "ep", "dp"} & case.pins.keys():
        pins = ("tp", "cp", "ep", "pp", "vpp", "micro_batch_size")
        case = case.limited(**{name: (getattr(saved.parallelism, name),) for name in pins})
    return case


def _print_recipe(case: Case, json: bool) -> None:
    """Plan, set every switch to its other values, and print what that costs."""
    from planner.report.explain import render_recipe_table
    from planner.search.why.recipe import other_values, recipe_table

    with progress("planning without each switch", len(other_values(case))) as advance:
        answer = recipe_table(case, advance)
    tell(answer.to_json() if json else render_recipe_table(answer))


def _print_program(case: Case, json: bool) -> None:
    """Plan, and print the integer program of the best layout with its numbers."""
    from planner.search.search import planned
    from planner.search.why.explain import program_text

    with waiting("searching"):
        answer = planned(case)
    text = program_text(answer, limits=case.limits)
    if json:
        tell({"parallelism": answer.parallelism.model_dump(), "program": text})
    else:
        sys.stdout.write(printable(f"{text}\n"))
