"""`plan serve` and `plan mcp`: the planner as a page in the browser, and as tools for an agent."""

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
from planner.cli.options import SearchOptions, Whole, command_line, converted, rows_of
from planner.distribution import install_line
from planner.errors import PlannerError, SpecError

if TYPE_CHECKING:
    from planner.serve.controls import Question

_log = logging.getLogger(__name__)
EXTRA = ("starlette", "uvicorn")
"""The packages of the extra `serve`."""
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
    try:
        from planner.serve.app import application
        from planner.serve.server import listen, serve
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        raise PlannerError(f"plan serve needs {error.name}, which is not installed", install_line("serve")) from None
    start = start_of(asked)
    listener = listen(8008 if port is None else port)
    defaults = {"hardware": o.DEFAULT_HARDWARE}
    app = application(partial(read_question, said=set()), start, defaults)
    serve(listener, app, lambda address: _ready(address, open))


def start_of(asked: SearchOptions) -> dict[str, str]:
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
    from planner.cli.inputs import read_job, read_limits
    from planner.search.case import Case
    from planner.serve.controls import Question

    rows = rows_of(SearchOptions)
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name not in rows:
            raise SpecError(f"--{name.replace('_', '-')[:60]}: no such option", "`plan -h` lists the options")
        row, kind = rows[name]
        values[name] = converted(row, kind, text) if row.metavar else True
    asked = SearchOptions(**values)
    job = read_job(asked, said)
    case = Case(job.model, job.cluster, job.training, job.runtime_spec, read_limits(asked, job))
    return Question(case, command_line(asked))


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
      plan mcp --folder runs --port 8010
    """

    root = Path(folder)
    if not root.is_dir():
        raise SpecError(f"--folder: {folder!r} is no folder", "name one, such as --folder .")
    try:
        from planner.serve.mcp_server import server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise PlannerError("plan mcp needs mcp, which is not installed", install_line("mcp")) from None
    made = server(root)
    if port is None:
        made.run("stdio")
    else:
        made.run("streamable-http", host="127.0.0.1", port=port)
