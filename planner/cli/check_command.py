"""`plan check`: what a reviewer of a launch file needs, in ten lines, and an exit code for machines."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from planner.cli import options as o
from planner.cli.import_command import ReadOptions
from planner.cli.job_options import with_options

_WHAT = "What is checked"
Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE…", help="Launch scripts, recipes, YAMLs; - is stdin.", show_default=False),
]
Against = Annotated[
    str | None, o.text(_WHAT, "--against", "OLD", "The file that it replaces; a folder: the one of that name in it.")
]
Format = Annotated[str, o.text(o.OUTPUT, "--format", "NAME", "text, markdown, json or sarif. [text]")]
FORMATS = ("text", "markdown", "json", "sarif")


@with_options
def check_command(
    files: Files,
    against: Against = None,
    *,
    asked: ReadOptions,
    format: Format = "text",
    json: o.Json = False,
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
    from planner.cli.output import dumps, waiting
    from planner.decide.check import ORDER, check, priced
    from planner.errors import SpecError
    from planner.specs.problems import nearest

    chosen = "json" if json else format
    if chosen not in FORMATS:
        raise SpecError(f"--format: {format!r} is unknown", f"one of {', '.join(FORMATS)}{nearest(format, FORMATS)}")
    how = {"source": asked.from_, "recipe": asked.recipe, "variables": asked.variables(), **asked.given()}
    searches = not asked.no_search
    with waiting("checking"):
        olds = {} if against is None else {file: _beside(against, file) for file in files}
        before = {old: priced(old, searches=False, **how) for old in dict.fromkeys(olds.values())}
        checks = [check(file, before.get(olds.get(file, "")), searches=searches, **how) for file in files]
    if chosen == "json":
        sys.stdout.write(dumps({"checks": [one.to_json() for one in checks]}))
    elif chosen == "sarif":
        from planner import __version__
        from planner.report.comparison import sarif

        sys.stdout.write(dumps(sarif(checks, __version__)))
    elif chosen == "markdown":
        from planner.report.comparison import markdown

        sys.stdout.write(markdown(checks))
    else:
        from planner.cli.output import show
        from planner.report.comparison import render_check

        for one in checks:
            show(*render_check(one))
    raise typer.Exit(max((one.exit_code for one in checks), key=ORDER.index))


def _beside(against: str, file: str) -> str:
    """The old file: the one that is named, or the one of the same name in a folder."""
    from pathlib import Path

    folder = Path(against)
    return str(folder / Path(file).name) if folder.is_dir() else against
