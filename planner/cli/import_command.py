"""`plan import`: a trainer's configuration as a run, its price, and what the planner would do instead."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli import options as o

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.answer import Plan
    from planner.export.common.imported_run import Imported
    from planner.layout.runs import Run

_log = logging.getLogger(__name__)
MAX_BYTES = 4_000_000
_READ = "What is read"

Configuration = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A launch script, an argument list, a YAML, a recipe or a ds_config.json; - is stdin.",
        show_default=False,
    ),
]
From = Annotated[
    str | None, o.text(_READ, "--from", "NAME", "megatron, torchtitan or deepspeed. [what the file looks like]")
]
VocabSize = Annotated[int | None, o.number(_READ, "--vocab-size", "Where only the tokenizer knows.")]
Output = Annotated[str | None, o.text("Output", "--output -o", "FILE", "Save the run; - is stdout.")]
NoSearch = Annotated[bool, typer.Option("--no-search", help="Price it, and search nothing.", rich_help_panel=_READ)]


def import_command(
    ctx: typer.Context,
    file: Configuration,
    from_: From = None,
    model: o.Model = None,
    gpus: o.Gpus = None,
    hardware: o.Hardware = None,
    gpus_per_node: o.GpusPerNode = None,
    seq_length: o.SeqLength = None,
    global_batch_size: o.GlobalBatchSize = None,
    vocab_size: VocabSize = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    no_search: NoSearch = False,
    json: o.Json = False,
    output: Output = None,
    force: o.Force = False,
) -> None:
    """Read the configuration of a run you have, price it, and say what the planner would do instead, and why.

    Scripts and recipes are read, never run. -o saves the run for plan evaluate --runs.

    \b
    Example:
      plan import pretrain.sh --hardware h100
      plan import ds_config.json --model llama-2-13b --gpus 64 --seq-length 4096
    """
    from planner.cli.output import dumps, show, waiting
    from planner.export.read import read_configuration
    from planner.files import write_text
    from planner.layout.runs import parse_run

    imported = read_configuration(_text(file), from_)
    run_data = _run(imported, ctx.params)
    run = parse_run({"run": run_data}, file)
    if output is not None:
        write_text(output, dumps({"id": None, "run": run_data}, indent=None), force)
    for name, value in imported.unknown.items():
        _log.warning("not understood: %s", f"{name} {value}".strip())
    evaluated = _evaluated(run)
    with waiting("searching for the planner's own choice"):
        own, why = (None, "") if no_search else _own(run, evaluated)
    if json:
        answer = {
            "source": imported.source,
            "run": run_data,
            "unknown": imported.unknown,
            "ignored": imported.ignored,
            "notes": imported.notes,
            "evaluated": evaluated.to_json(),
            "own": None if own is None else own.best.model_dump(mode="json"),
            "why": why,
        }
        sys.stdout.write(dumps(answer))
        return
    show(*_report(imported, evaluated, own, why))


def _text(path: str) -> str:
    from planner.errors import SpecError
    from planner.files import STDOUT as STDIN

    try:
        if path == STDIN:
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}", "name a file, or - for stdin") from None
    if len(data) > MAX_BYTES or b"\0" in data:
        raise SpecError(f"{path}: is no configuration", "give a script, YAML, Python, TOML or JSON file")
    return data.decode(errors="replace")


def _run(imported: Imported, given: dict[str, Any]) -> dict[str, Any]:
    """The run with what the user adds; a model that is known by its sizes gets its name."""
    from planner.export.common.published_models import known_name

    axes = {name: given[name] for name in ("tp", "pp") if given[name] is not None}
    parallelism = {**imported.run["parallelism"], **axes}
    known = {
        name: given[option]
        for name, option in (
            ("model", "model"),
            ("num_gpus", "gpus"),
            ("gpus_per_node", "gpus_per_node"),
            ("seq_length", "seq_length"),
            ("global_batch_size", "global_batch_size"),
        )
    }
    hardware = given["hardware"] or o.DEFAULT_HARDWARE
    if given["gpus"] is not None and given["gpus"] != imported.run.get("num_gpus"):
        parallelism.pop("dp", None)
    run = imported.complete(vocab_size=given["vocab_size"], hardware=hardware, parallelism=parallelism, **known)
    if isinstance(run["model"], dict):
        run["model"]["name"] = known_name(run["model"]) or run["model"]["name"]
    return run


def _evaluated(run: Run) -> Plan:
    from planner.layout.evaluate import evaluate

    return evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=run.runtime)


def _own(run: Run, evaluated: Plan) -> tuple[Plan | None, str]:
    """The best plan for the same job and trainer, and why it is better; None and the reason where nothing fits."""
    from planner.errors import Infeasible
    from planner.report.causes import largest_cause, says_slower
    from planner.search.search import plan
    from planner.specs.training import SearchLimits

    limits = SearchLimits(top=1)
    try:
        best = plan(run.model, run.cluster, run.training, limits=limits, runtime=run.runtime)
    except Infeasible as error:
        return None, error.message
    if not evaluated.fits:
        return best, "The configuration does not fit in memory; the planner's choice does."
    same = best.parallelism == evaluated.parallelism
    cause = None if same else largest_cause(best.best, evaluated.best, run.cluster)
    return best, says_slower(best, evaluated, cause, limits.gap_fraction)


def _report(imported: Imported, evaluated: Plan, own: Plan | None, why: str) -> list[RenderableType]:
    from planner.report.pieces import bullets, section
    from planner.report.terminal import render

    parts: list[RenderableType] = [render(evaluated, None if own is None else own.best)]
    if why:
        parts.append(section("What the planner would do instead, and why", why))
    if imported.unknown:
        listed = [f"{name} {value}".strip() for name, value in imported.unknown.items()]
        parts.append(section("Not understood: these may change seconds or bytes", bullets(listed)))
    if imported.notes:
        parts.append(section("About what was read", bullets(imported.notes)))
    return parts
