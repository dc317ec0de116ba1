"""`plan export`, and `plan import` and `plan check`: a plan as a trainer's files, and these as a run with its price."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.cli.options import Saving, Whole, Word
from planner.cli.output import dumps, tell, waiting
from planner.distribution import __version__
from planner.errors import Infeasible, PlannerError, SpecError, printable
from planner.files import write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.answer import Plan
    from planner.decide.check import Check
    from planner.export.export import Bundle
    from planner.export.imported_run import ImportedRun
    from planner.layout.runs import Run
    from planner.specs.base import Fields, Named

_log = logging.getLogger(__name__)
_SHOWN = 8
"""Settings that are shown of those that a configuration leaves out."""

FORMATS = ("text", "markdown", "json", "sarif")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a configuration is read, and what it leaves open."""

    from_: Word = None
    recipe: Word = None
    model: Word = None
    gpus: Whole = None
    hardware: Word = None
    gpus_per_node: Whole = None
    seq_length: Whole = None
    global_batch_size: Whole = None
    vocab_size: Whole = None
    example_lengths: Word = None
    set_: list[str] | None = None
    no_search: bool = False

    def variables(self) -> Named:
        """The variables of `--set NAME=VALUE`. Raises SpecError for what is none."""

        found = {}
        for text in self.set_ or []:
            name, equals, value = text.partition("=")
            if not equals or not name.isidentifier():
                raise SpecError(f"--set: {text[:60]!r} is no NAME=VALUE", "write --set SEQ_LEN=4096")
            found[name] = value
        return found

    def given(self) -> Fields:
        """Fields of the run that the user gives; null where he does not."""
        from planner.specs.phases import lengths_in

        return {
            "model": self.model, "num_gpus": self.gpus, "hardware": self.hardware,
            "gpus_per_node": self.gpus_per_node, "seq_length": self.seq_length,
            "global_batch_size": self.global_batch_size, "vocab_size": self.vocab_size,
            "document_lengths": self.example_lengths and [
                entry.model_dump() for entry in lengths_in(self.example_lengths, "--example-lengths")
            ],
        }  # fmt: skip


def import_command(
    file: str,
    asked: ReadOptions,
    tp: Whole = None,
    pp: Whole = None,
    *,
    saving: Saving,
) -> None:
    """Read the configuration of a run you have, price it, and say what the planner would do instead, and why.

    Scripts and recipes are read, never run. -o saves the run for plan evaluate --runs.

    \b
    Example:
      plan import pretrain.sh --hardware h100
      plan import launch.sh --set SEQ_LEN=4096 --gpus 64
      plan import config_registry.py --recipe llama3_405b --gpus 512
      plan import ds_config.json --model llama-2-13b --gpus 64 --seq-length 4096
    """
    from planner.decide.check import completed, judged
    from planner.export.import_run import read
    from planner.layout.runs import parse_run
    from planner.layout.step import mean_step_s
    from planner.report.format import seconds

    imported = read(file, asked.from_, asked.recipe, asked.variables())
    run_data = completed(imported, {**asked.given(), "tp": tp, "pp": pp})
    run = parse_run({"run": run_data}, file)
    if saving.output is not None:
        write_text(saving.output, dumps({"id": None, "run": run_data}, indent=None), saving.force)
    for name, value in imported.unknown.items():
        _log.warning("not understood: %s", f"{name} {value}".strip())
    evaluated, refused = judged(run)
    refused = [*imported.refused, *refused]
    if run.training.batching == "padded":
        mean = seconds(mean_step_s(evaluated))
        imported.notes.append(f"with examples of such lengths, a step takes {mean} in the mean")
    others = _otherwise(imported, run_data, file)
    for reason in refused:
        _log.warning("%s refuses this: %s", run.runtime.family, reason)
    with waiting("searching for the planner's own choice"):
        own, why = (None, "") if asked.no_search else _own(run, evaluated)
    if not saving.json:
        return tell(_report(imported, evaluated, refused, others, own, why))
    tell({
        "source": imported.source, "run": run_data, "unknown": imported.unknown, "ignored": imported.ignored,
        "assumed": imported.assumed, "notes": imported.notes, "refused": refused, "undecided": others,
        "evaluated": evaluated.to_json(), "own": None if own is None else own.best.model_dump(mode="json"), "why": why,
    })  # fmt: skip


def _otherwise(imported: ImportedRun, run: Fields, file: str) -> list[Fields]:
    """The step and the memory if a setting that is not understood says what it could."""
    from planner.layout.runs import parse_run

    found = []
    for other in imported.undecided(run):
        try:
            layout = parse_run({"run": other.run}, file).evaluate()
        except PlannerError:
            continue
        peak = max(stage.memory.total_bytes for stage in layout.stages)
        found.append({"name": other.name, "if": other.says, "step_s": layout.step.step_s, "total_bytes": peak})
    return found


def _own(run: Run, evaluated: Plan) -> tuple[Plan | None, str]:
    """The best plan for the same job and trainer, and why it is better; None and the reason where nothing fits."""
    from planner.decide.check import own_choice
    from planner.report.causes import largest_cause, says_slower
    from planner.specs.training import SearchLimits

    try:
        best = own_choice(run)
    except Infeasible as error:
        return None, error.message
    if not evaluated.fits:
        return best, "The configuration does not fit in memory; the planner's choice does."
    same = best.parallelism == evaluated.parallelism
    cause = None if same else largest_cause(best.best, evaluated.best, run.cluster)
    return best, says_slower(best, evaluated, cause, SearchLimits().gap_fraction)


def _report(
    imported: ImportedRun,
    evaluated: Plan,
    refused: list[str],
    others: list[Fields],
    own: Plan | None,
    why: str,
) -> Iterator[RenderableType]:
    from planner.report.pieces import bullets, section
    from planner.report.terminal import render

    yield render(evaluated, None if own is None else own.best)
    if refused:
        yield section("What the trainer refuses", bullets(refused))
    if imported.unknown:
        then = {other["name"]: other for other in others}
        listed = (_told(f"{name} {value}".strip(), then.get(name)) for name, value in imported.unknown.items())
        yield section("Not understood: these may change seconds or bytes", bullets(listed))
    if imported.assumed:
        shown = ", ".join(f"{name} {value}" for name, value in [*imported.assumed.items()][:_SHOWN])
        more = len(imported.assumed) - _SHOWN
        told = f"{shown}{f', and {more} more (--json)' if more > 0 else ''}: {imported.documented}"
        yield section("Left out, and as the trainer has them then", told)
    if imported.notes:
        yield section("About what was read", bullets(imported.notes))
    if why:
        yield section("What the planner would do instead, and why", why)


def _told(text: str, other: Fields | None) -> str:
    """A setting, and the price if it says what it could."""
    if other is None:
        return text
    gib = other["total_bytes"] / 2**30
    return f"{text} (if {other['if']}: {other['step_s']:.4g} s, {gib:.1f} GiB)"


def check_command(
    files: list[str],
    against: Word = None,
    *,
    asked: ReadOptions,
    format: str = "text",
    json: bool = False,
) -> None:
    """Say whether a launch file starts, fits and is no worse than the one it replaces: for reviews and pipelines.

    Exit code: 0 it does; 3 it does not fit; 8 its trainer refuses it; 9 it is slower or fuller than OLD; 10 a setting
    that may decide is not known. Of several files the worst counts.

    \b
    Example:
      plan check pretrain.sh --hardware h100
      plan check pretrain.sh --against main/pretrain.sh --format markdown
      plan check launch.sh --set SEQ_LEN=4096 --gpus 64
    """
    from planner.decide.check import ORDER, check, priced
    from planner.specs.problems import among

    chosen = "json" if json else format
    if chosen not in FORMATS:
        raise SpecError(f"--format: {format!r} is unknown", among(FORMATS, format))
    how = {"source": asked.from_, "recipe": asked.recipe, "variables": asked.variables(), **asked.given()}
    searches = not asked.no_search
    with waiting("checking"):
        olds = {} if against is None else {file: _beside(against, file) for file in files}
        before = {old: priced(old, searches=False, **how) for old in dict.fromkeys(olds.values())}
        checks = []
        failed = {}
        for file in files:
            try:
                checks.append(check(file, before.get(olds.get(file, "")), searches=searches, **how))
            except PlannerError as error:
                failed[file] = error
    _print_checks(checks, failed, chosen)
    for problem in failed.values():
        sys.stderr.write(problem.lines())
    codes = [*(one.exit_code for one in checks), *(problem.exit_code for problem in failed.values())]
    raise typer.Exit(max(codes, key=(*ORDER, *sorted({*codes} - {*ORDER})).index))


def _print_checks(checks: list[Check], failed: dict[str, PlannerError], form: str) -> None:
    """Print the findings of all files in one of FORMATS."""
    from planner.report.decisions import markdown, render_check, sarif

    if form == "json":
        told = [one.to_json() for one in checks]
        told += [{"new": {"file": file}, **e.to_json(), "exit_code": e.exit_code} for file, e in failed.items()]
        alone = {} if checks else next(iter(failed.values())).to_json()
        tell({"checks": told, **alone})
    elif form == "sarif":
        tell(sarif(checks, __version__, failed))
    elif form == "markdown":
        sys.stdout.write(markdown(checks))
    else:
        for one in checks:
            tell(render_check(one))


def _beside(against: str, file: str) -> str:
    """The old file: the one that is named, or the one of the same name in a folder."""

    folder = Path(against)
    return str(folder / Path(file).name) if folder.is_dir() else against


def export_command(
    plan: str,
    to: str,
    alternative: Whole = None,
    image: Word = None,
    trials: Whole = None,
    output: Word = None,
    dry_run: bool = False,
    force: bool = False,
    json: bool = False,
) -> None:
    """Write the files that a trainer or a scheduler takes as they are, or say what it cannot express.

    \b
    Example:
      plan export plan.json --to megatron -o run
      plan export plan.json --to torchtitan,kubernetes --dry-run
    """

    from planner.export.export import bundle_of, default_folder, write_bundle
    from planner.plan_file import read_plan, with_alternative

    chosen = with_alternative(read_plan(plan), alternative)
    if trials is not None:
        _write_trials(chosen, trials, to, image, output, force)
        return
    bundle = bundle_of(chosen, to, image, force)
    for note in (*bundle.notes, *_left_to_the_user(bundle)):
        _log.info("%s", note)
    if dry_run:
        sys.stdout.write(dumps(_with_texts(bundle)) if json else printable(_texts(bundle)))
        return
    folder = Path(output or default_folder(chosen, bundle))
    paths = write_bundle(bundle, folder, force)
    sys.stdout.write(dumps({**bundle.manifest(), "folder": str(folder)}) if json else printable(_listing(paths)))


def _write_trials(plan: Plan, count: int, to: str, image: str | None, output: str | None, force: bool) -> None:
    """The plan and its next best layouts, each in a folder of its own; their paths on stdout."""

    from planner.export.export import trials_of, write_trials
    from planner.export.trainer_files import slug
    from planner.plan_file import with_alternative

    most = len(plan.alternatives)
    if count > most:
        _log.info("the plan keeps %d alternatives, not %d: plan … --top N keeps more", most, count)
    plans = [plan, *(with_alternative(plan, number) for number in range(1, min(count, most) + 1))]
    trials, notes = trials_of(plans, to, image, force)
    for note in notes:
        _log.info("%s", note)
    folder = Path(output or f"{slug(plan.model.name)}-trials")
    sys.stdout.write(printable(_listing(write_trials(trials, folder, force))))


def _left_to_the_user(bundle: Bundle) -> Iterator[str]:
    """The values that the user fills in, and the run to begin with."""
    required = [place for place in bundle.placeholders if not (place.is_optional or place.default)]
    for place in required:
        yield f"fill in {place.name}: {place.meaning}"
    others = [place.name for place in bundle.placeholders if place not in required]
    if others:
        yield f"change where yours is another: {', '.join(others)}"
    if bundle.first_run:
        yield f"first run, to hold against the plan: {bundle.first_run}"


def _listing(paths: list[Path]) -> str:
    return "".join(f"{path}\n" for path in paths)


def _texts(bundle: Bundle) -> str:
    return "\n".join(f"==> {file.name} <==\n{file.text}" for file in bundle.with_manifest())


def _with_texts(bundle: Bundle) -> Fields:
    return {**bundle.manifest(), "texts": {file.name: file.text for file in bundle.files}}
