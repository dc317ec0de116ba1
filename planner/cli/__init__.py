"""The `plan` command: parse, call, print. Nothing imports this package."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
import traceback

from planner.errors import PlannerError, defect, printable

INTERRUPTED, CLOSED_PIPE = 130, 1


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code; whatever goes wrong is one `error:` and one `hint:` on stderr."""
    gc.set_threshold(200_000)  # what imports make stays: looking through it again and again is a tenth of a start
    given = sys.argv[1:] if arguments is None else arguments
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started it
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 — for the whole run
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show × shows ?
            stream.reconfigure(errors="replace")
    try:
        from planner.cli.app import run

        code = run(given)
        sys.stdout.flush()
        if arguments is None:
            gc.freeze()  # a process that ends need not be looked through
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except Exception as error:  # the outermost frame: a defect must not look like an answer either
        if "--debug" in given:
            sys.stderr.write(printable(traceback.format_exc()))
        known = error if isinstance(error, PlannerError) else _as_planner_error(error)
        sys.stderr.write(known.lines())
        if "--json" in given and not known.follows_answer:
            _print_json(known)
        return known.exit_code


def _print_json(error: PlannerError) -> None:
    """The error on stdout, in one line, so that it may end a file of JSON lines too."""
    from planner.answer import SCHEMA_VERSION

    try:
        print(json.dumps({"schema_version": SCHEMA_VERSION, **error.to_json()}), flush=True)
    except OSError:  # stdout is full or closed, and stderr has said what is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _as_planner_error(error: Exception) -> PlannerError:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return PlannerError("standard output: no space left on device", "free some space")
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != "planner":
        from planner.distribution import EXTRA_OF_MODULE, install_line

        name = error.name.partition(".")[0]
        extras = [EXTRA_OF_MODULE[name]] if name in EXTRA_OF_MODULE else []
        return PlannerError(f"{name} is not installed", f"{install_line(*extras)} brings it")
    if isinstance(error, FileNotFoundError):
        from planner.files import require_working_folder

        try:
            require_working_folder()
        except PlannerError as known:
            return known
    return defect(error)
