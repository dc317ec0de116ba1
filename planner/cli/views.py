"""Views of what was saved: `plan show`, `report`, `trace`, `memory`, `compare`; and `serve` and `mcp`, which answer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.cli import options as o
from planner.cli.options import Saving, SearchOptions, Shown, Whole, Word, command_line, converted, rows_of
from planner.cli.output import needing, refuse_files, show_and_save, tell, waiting
from planner.errors import SpecError
from planner.files import STDOUT, refuse_to_overwrite, write_bytes, write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.answer import Plan
    from planner.decide.compare import Compared
    from planner.layout.alive import MemoryAnswer, MemoryOfStage
    from planner.layout.candidate import Candidate
    from planner.serve.controls import Question
    from planner.specs.base import Fields, Named

_log = logging.getLogger(__name__)
MOST_FILES = 6
"""More columns than that cannot be read."""


def show_command(
    file: str,
    page: Word = None,
    trace: Word = None,
    alternative: Whole = None,
    micro_batches: Whole = None,
    *,
    form: Shown,
    json: bool = False,
    force: bool = False,
) -> None:
    """Print again what was saved: a plan, a sweep, phases, a comparison, a probe, an observed or imported run.

    \b
    Example:
      plan show plan.json
      plan show plan.json --show rejected,proof
      plan show plan.json --page report.html --trace trace.json
    """
    from planner.specs.reading import read_saved

    if page is not None or trace is not None:
        plan = _saved_plan(file, alternative, [path for path in (page, trace) if path is not None], force)
        if page is not None:
            _write_page(plan, page, force)
        if trace is not None:
            _write_trace(plan, file, micro_batches, trace, force)
        return
    data, where = read_saved(file)
    rendered = _drawn(data, where, form, alternative)
    tell(data if json else rendered)


_IMPORTED = {"source", "evaluated", "run"}
"""Keys of what `plan import --json` prints."""


def _drawn(data: Fields, where: str, form: Shown, alternative: int | None) -> RenderableType:
    """The answer in a file as the command that saved it shows it: of the first kind whose keys are there."""
    from planner.plan_file import plan_of, with_alternative
    from planner.specs.problems import checked

    keys = data.keys()
    if keys >= {"comparisons", "run", "ranks"}:
        from planner.cli.measurements import probe_of
        from planner.report.machines import render_probe

        return render_probe(probe_of(data, where))
    if keys >= {"observation", "verdict"}:
        from planner.observe.judge import observed_of
        from planner.report.observe import render_observed

        return render_observed(observed_of(data, where))
    if keys >= {"points", "pareto", "answers"}:
        from planner.decide.sweep import Sweep
        from planner.report.decisions import render_sweep

        return render_sweep(checked(Sweep, {name: data[name] for name in ("points", "goal") if name in data}, where))
    if keys >= {"sides", "differences", "waterfall"}:
        from planner.decide.compare import Compared, compare
        from planner.report.decisions import render_comparison

        return render_comparison(compare([checked(Compared, side, where) for side in data["sides"]]))
    if keys >= {"phases", "changes", "total"} or keys >= {"proposed", "outcomes", "layouts"}:
        return _drawn_runs(data, where)
    if keys >= {"schema_version", "best", "resume"}:
        from planner.decide.job import Resume
        from planner.report.runs import render_resume

        return render_resume(checked(Resume, data["resume"], where), plan_of(data, where))
    if not (keys >= _IMPORTED or keys >= {"schema_version", "best"}):
        hint = "save a plan with plan --model 8b --gpus 64 -o plan.json"
        raise SpecError(f"{where}: is nothing that a command saved", hint)
    from planner.report.terminal import render, screen

    plan = with_alternative(plan_of(data["evaluated"] if keys >= _IMPORTED else data, where), alternative)
    return render(plan, None, form.names) if form.full or form.names else screen(plan)


def _drawn_runs(data: Fields, where: str) -> RenderableType:
    """The phases of a run, or the trial to do next."""
    from planner.decide.next import NextAnswer
    from planner.decide.phases import PhasesAnswer
    from planner.plan_file import plan_of
    from planner.report.runs import render_next, render_phases
    from planner.specs.problems import checked

    if "phases" not in data:
        return render_next(checked(NextAnswer, data, where))
    phases = [{**phase, "plan": plan_of(phase["plan"], where)} for phase in data["phases"]]
    fields = {name: value for name, value in data.items() if name != "schema_version"}
    return render_phases(checked(PhasesAnswer, {**fields, "phases": phases}, where))


def report_command(plan: str, output: str = "report.html", force: bool = False) -> None:
    """Write a plan as one HTML file that needs nothing else: stages, memory, seconds, schedule, alternatives, inputs.

    \b
    Example:
      plan report plan.json -o report.html
      plan --model 8b --gpus 16 -o - | plan report - -o report.html
    """
    _write_page(_saved_plan(plan, None, [output], force), output, force)


def trace_command(
    plan: str,
    alternative: Whole = None,
    micro_batches: Whole = None,
    output: str = "trace.json",
    force: bool = False,
) -> None:
    """Write one step of a plan as a trace: passes, exchanges, waits, memory of every stage, arrows between stages.

    \b
    Example:
      plan trace plan.json -o trace.json
      plan trace plan.json -m 32 -o - | gzip > trace.json.gz
    """
    _write_trace(_saved_plan(plan, alternative, [output], force), plan, micro_batches, output, force)


def _saved_plan(file: str, alternative: int | None, written: list[str], force: bool) -> Plan:
    """A saved plan, or one of its alternatives. SpecError before it is read where a file to write exists."""
    from planner.plan_file import read_plan, with_alternative

    for path in written:
        refuse_to_overwrite(path, force)
    return with_alternative(read_plan(file), alternative)


def _write_page(plan: Plan, path: str, force: bool) -> None:
    """Write the report of a plan as HTML."""
    from planner.report.page import write_report

    with waiting("drawing"):
        write_report(plan, path, force=force)
    if path != STDOUT:
        _log.info("wrote %s", path)


def _write_trace(chosen: Plan, file: str, micro_batches: int | None, path: str, force: bool) -> None:
    """Write a step of a plan as Chrome trace events, which Perfetto opens."""
    from planner.layout.price import num_actions, with_microbatches
    from planner.report.trace import MAX_ACTIONS, trace_text

    layout = with_microbatches(chosen.best, micro_batches)
    actions, sizes = num_actions(layout), layout.parallelism
    if actions > MAX_ACTIONS:
        few = MAX_ACTIONS * sizes.num_microbatches // actions
        raise SpecError(
            f"{file}: a step has {actions:,} actions, too many for a trace",
            f"trace a shorter step with --micro-batches {max(few // sizes.pp, 1) * sizes.pp}",
        )
    with waiting("tracing"):
        text = trace_text(chosen, layout)
    write_text(path, text, force)
    if path != STDOUT:
        _log.info("wrote %s: open it at ui.perfetto.dev", path)


def memory_command(
    plan: str,
    stage: Whole = None,
    alternative: Whole = None,
    json: bool = False,
    plot: Word = None,
    snapshot: Word = None,
    output: Word = None,
    force: bool = False,
) -> None:
    """Show the tensors that are alive when a stage's memory is fullest: which, of what shape, and who frees them.

    They add up to the plan's peak. What a change would free, and what it would cost, is priced. --plot and --snapshot
    show the stage that --stage names, or the fullest.

    \b
    Example:
      plan memory plan.json
      plan memory plan.json --stage 0 --plot stage0.svg
      plan memory plan.json --stage 0 --snapshot stage0.pickle
    """
    from planner.layout.alive import explore, shown
    from planner.layout.price import reprice
    from planner.plan_file import read_plan, with_alternative
    from planner.report.terminal import render_memory

    refuse_files({"-o": output, "--plot": plot, "--snapshot": snapshot}, force)
    if snapshot == STDOUT:
        raise SpecError("--snapshot: - is no file", "name one, such as --snapshot stage.pickle")
    if plot is not None:
        from planner.report.plots import check_picture

        check_picture(plot, "memory")
    chosen = with_alternative(read_plan(plan), alternative)
    num_stages = len(chosen.best.stages)
    if stage is not None and not 0 <= stage < num_stages:
        raise SpecError(f"--stage {stage}: the plan has {num_stages} stages", f"0 to {num_stages - 1}")
    with waiting("listing tensors"):
        candidate = shown(reprice(chosen, chosen.best))
        answer = explore(chosen, chosen.best, candidate, range(num_stages) if stage is None else (stage,))
    _note_fewer(candidate, chosen.best.parallelism.num_microbatches)
    fullest = max(answer.stages, key=lambda one: one.memory.total_bytes)
    if plot is not None:
        from planner.report.plots import drawn_memory

        write_text(plot, drawn_memory(fullest), force)
    if snapshot is not None:
        _write_snapshot(answer, fullest, candidate, snapshot, force)
    data = answer.model_dump(mode="json") if json or output is not None else None
    show_and_save(data, render_memory(answer, fullest), Saving(json=json, output=output, force=force), indent=None)


def _note_fewer(candidate: Candidate, num_microbatches: int) -> None:
    if candidate.num_microbatches < num_microbatches:
        _log.warning(
            "a step of %s micro-batches is too long to show; one of %s has the same peaks",
            f"{num_microbatches:,}", f"{candidate.num_microbatches:,}",
        )  # fmt: skip


def _write_snapshot(answer: MemoryAnswer, stage: MemoryOfStage, candidate: Candidate, path: str, force: bool) -> None:
    from planner.layout.alive import step_of
    from planner.layout.memory_curve import memory_curves
    from planner.report.trace import snapshot
    from planner.schedule.replay import replay

    timeline = replay(candidate.order, candidate.durations)
    tensors, events = step_of(candidate, timeline, memory_curves(candidate, timeline)[stage.stage])
    write_bytes(path, snapshot(tensors, events, stage.stage, answer.model), force)
    _log.info("wrote %s, stage %d: open it at pytorch.org/memory_viz", path, stage.stage)


def compare_command(files: list[str], json: bool = False) -> None:
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
    from planner.decide.compare import compare
    from planner.report.decisions import render_comparison

    if not 2 <= len(files) <= MOST_FILES:
        raise SpecError(
            f"plan compare: {len(files)} file{'' if len(files) == 1 else 's'}", f"name two to {MOST_FILES} of them"
        )
    if files.count("-") > 1:
        raise SpecError("plan compare: two files are standard input", "name a file for one of them")
    comparison = compare([_side(path) for path in files])
    tell(comparison.to_json() if json else render_comparison(comparison))


def _side(path: str) -> Compared:
    """One side: a plan, a probe's result, or a run that `plan import` or `plan observe` read."""
    from planner.cli.measurements import is_probe, probe_of
    from planner.decide.compare import of_observation, of_plan, of_probe
    from planner.observe.judge import is_observed, observed_of
    from planner.plan_file import plan_of
    from planner.specs.reading import read_saved

    data, where = read_saved(path)
    if is_probe(data):
        return of_probe(probe_of(data, where), where)
    if is_observed(data):
        return of_observation(observed_of(data, where).observation, where)
    if data.keys() >= _IMPORTED:
        return of_plan(plan_of(data["evaluated"], where), where, "run")
    if "run" in data:
        return of_plan(_priced(data, where), where, "run")
    return of_plan(plan_of(data, where), where)


def _priced(data: Fields, where: str) -> Any:
    """The price of a run in the form of `plan evaluate --runs`."""
    from planner.layout.evaluate import evaluate
    from planner.layout.runs import parse_run

    run = parse_run(data, where)
    return evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=run.runtime)


START = {"model": "405b", "gpus": "2048"}
"""The job that the page opens with, unless options say another."""


def serve_command(asked: SearchOptions, port: Whole = None, open: bool = False) -> None:
    """Serve the planner as a page: controls change the plan, its memory and its timeline. Ctrl-C ends it.

    The page opens with the job of the options. It answers this machine only, and keeps nothing on disk. Files of
    models, hardware and trainers are read only if they are named here.

    \b
    Example:
      plan serve
      plan serve --port 8009 --model ./config.json --gpus 512 --open
    """
    with needing("plan serve", "serve"):
        from planner.serve.app import application
        from planner.serve.server import listen, serve
    start = start_of(asked)
    listener = listen(8008 if port is None else port)
    defaults = {"hardware": o.DEFAULT_HARDWARE}
    app = application(partial(read_question, said=set()), start, defaults)
    serve(listener, app, lambda address: _ready(address, open))


def start_of(asked: SearchOptions) -> Named:
    """The options given, as texts. Raises SpecError where a file is missing or wrong, or stdin would be read again."""
    start = {field.name: _text(getattr(asked, field.name)) for field in fields(asked)}
    start = {name: text for name, text in start.items() if text}
    for name in ("model", "hardware", "runtime", "calibration"):
        if start.get(name) == "-":
            raise SpecError(f"--{name}: the page reads it again and again, standard input only once", "name a file")
    if "calibration" in start:
        raise SpecError("--calibration: not on the page", "plan --calibration FILE takes it")
    start = {**START, **start}
    read_question(start)
    return start


def _text(value: Any) -> str:
    return "" if value is None or value is False else "on" if value is True else str(value)


def read_question(options: Mapping[str, str], said: set[str] | None = None) -> Question:
    """The job that texts of options describe, read as the command line reads them."""
    from planner.cli.inputs import read_case
    from planner.serve.controls import Question

    rows = rows_of(SearchOptions)
    values: Fields = {}
    for name, text in options.items():
        if name not in rows:
            raise SpecError(f"--{name.replace('_', '-')[:60]}: no such option", "`plan -h` lists the options")
        row, kind = rows[name]
        values[name] = converted(row, kind, text) if row.metavar else True
    asked = SearchOptions(**values)
    return Question(read_case(asked, said), command_line(asked))


def _ready(address: str, opens: bool) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    _log.info("answers this machine only; Ctrl-C ends it")
    if opens:
        import webbrowser

        webbrowser.open(address)


def mcp_command(ctx: typer.Context, folder: str = ".", port: Whole = None) -> None:
    """Offer the planner to agents as tools of the Model Context Protocol, over stdin and stdout.

    \b
    Example:
      plan mcp
      plan mcp --folder runs --http 8010
    """

    root = Path(folder)
    if not root.is_dir():
        raise SpecError(f"--folder: {folder!r} is no folder", "name one, such as --folder .")
    with needing("plan mcp", "mcp"):
        from planner.serve.mcp_server import over_http, server
    made = server(root)
    if port is None:
        made.run("stdio")
    else:
        over_http(made, port, lambda address: _ready(address, opens=False))
