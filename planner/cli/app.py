"""The command tree: `plan` itself is the main job, every other command is loaded when it is named."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from planner.cli.plan_command import plan_command
from planner.errors import SpecError, one_line
from planner.specs.problems import nearest

COMMANDS = {
    "evaluate": ("planner.cli.evaluate_command", "evaluate_command"),
    "explain": ("planner.cli.explain_command", "explain_command"),
    "sweep": ("planner.cli.sweep_command", "sweep_command"),
    "compare": ("planner.cli.compare_command", "compare_command"),
    "models": ("planner.cli.catalogue", "models_command"),
    "hardware": ("planner.cli.catalogue", "hardware_command"),
    "export": ("planner.cli.export_command", "export_command"),
    "import": ("planner.cli.import_command", "import_command"),
    "observe": ("planner.cli.observe_command", "observe_command"),
    "report": ("planner.cli.report_command", "report_command"),
    "schedule": ("planner.cli.schedule", "schedule_command"),
    "memory": ("planner.cli.memory_command", "memory_command"),
    "serve": ("planner.cli.serve_command", "serve_command"),
    "trace": ("planner.cli.trace_command", "trace_command"),
    "validate": ("planner.cli.validate_command", "validate_command"),
    "probe": ("planner.cli.probe_command", "probe_command"),
    "profile": ("planner.cli.profile_command", "profile_command"),
    "rebalance": ("planner.cli.rebalance_command", "rebalance_command"),
    "doctor": ("planner.cli.doctor_command", "doctor_command"),
}
"""Module and function of every command beside the main job. Heavy imports belong inside that function."""

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_ClickException: Any = typer.BadParameter.__mro__[2]
"""Typer carries its own copy of click from some version on; this is the class of whichever it uses."""


class _OneLine(logging.Formatter):
    """Notes and warnings as lines that hold nothing but text, whatever the file that they quote holds."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


class _Sections:
    """Help with the options under the headings they were declared with, in plain text that fits 80 columns."""

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            name, explanation = param.get_help_record(ctx) or ("", "")
            if param.param_type_name == "argument":
                sections["Arguments"].append((param.metavar or name, explanation))
            elif name:
                sections.setdefault(getattr(param, "rich_help_panel", None) or "Other", []).append((name, explanation))
        sections["Other"] = sections.pop("Other", [])
        sections = {title: records for title, records in sections.items() if records}
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if isinstance(self, Commands):
            with formatter.section("Commands"):
                formatter.write_dl([(name, _first_sentence(self.get_command(ctx, name).help)) for name in COMMANDS])


def _first_sentence(text: str) -> str:
    return text.split("\n\n")[0].split(". ")[0].replace("\n", " ")


class Subcommand(_Sections, TyperCommand):
    """A command beside the main job."""


class Commands(_Sections, TyperGroup):
    """Loads a command's module when the command is named or listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            module, function = COMMANDS[cmd_name]
            return _command(cmd_name, getattr(import_module(module), function))
        if ctx.resilient_parsing:  # completing a word that is not whole yet
            return None
        raise SpecError(
            f"unknown command {cmd_name[:60]!r}",
            f"plan --model 405b --gpus 2048, or one of the commands {', '.join(COMMANDS)}{nearest(cmd_name, COMMANDS)}",
        )


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; PlannerError where it is wrong or cannot be done."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.addLevelName(logging.WARNING, "warning")
    logging.addLevelName(logging.INFO, "note")
    try:
        code = _root().main(args=arguments or ["--help"], prog_name="plan", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _ClickException as error:
        raise _usage_error(error) from None
    return code if isinstance(code, int) else 0


def _root() -> Any:
    app = typer.Typer(
        cls=Commands, invoke_without_command=True, subcommand_metavar="[COMMAND]", context_settings=_SETTINGS,
        rich_markup_mode=None,
    )  # fmt: skip
    app.callback()(plan_command)
    root = typer.main.get_command(app)
    root.params += [*_parameters(_everywhere), *_parameters(_at_the_top)]
    return root


def _command(name: str, function: Any) -> Any:
    app = typer.Typer(context_settings=_SETTINGS, add_completion=False, rich_markup_mode=None)
    app.command(name, cls=Subcommand)(function)
    command = typer.main.get_command(app)
    command.params += _parameters(_everywhere)
    return command


def _parameters(function: Any) -> list[Any]:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return list(typer.main.get_command(app).params)


def _hush(quiet: bool) -> None:
    if quiet:
        logging.getLogger().setLevel(logging.ERROR)


def _uncolour(no_color: bool) -> None:
    if no_color:
        os.environ["NO_COLOR"] = "1"
        os.environ.pop("FORCE_COLOR", None)


def _show_version(version: bool) -> None:
    if version:
        from planner.cli.output import versions

        typer.echo(versions())
        raise typer.Exit


def _everywhere(
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", callback=_hush, expose_value=False, help="No warnings, no notes.")
    ] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", callback=_uncolour, expose_value=False, help="Plain text (also NO_COLOR=1).")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", expose_value=False, help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command; `main` looks for --debug itself, so that it works when parsing fails."""


def _at_the_top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, expose_value=False, help="Show versions."),
    ] = False,
) -> None:
    """Options of `plan` alone."""


def _usage_error(error: Any) -> SpecError:
    """The error for words that the parser did not understand."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "plan"
    return SpecError(error.format_message().rstrip("."), f"`{command} -h` lists the options, with an example")
