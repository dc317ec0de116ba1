"""The command tree: `plan` itself is the main job, every other command is loaded when it is named."""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from planner.cli.options import (
    ASSUMED,
    FINETUNE,
    JOB,
    LAYOUT,
    OUTPUT,
    RUN,
    SEARCH,
    PlanOptions,
    command_rows,
    declared,
    first_screen,
)
from planner.distribution import DISTRIBUTION, __version__
from planner.errors import SpecError, one_line
from planner.trainers.shipped import calibration_date

_log = logging.getLogger(__name__)


class CommandRow(NamedTuple):
    """A command: where it stands in the help, the module that has it, and its line in lists."""

    group: str
    """The purpose that it serves; empty for an old spelling, which no list shows."""
    module: str
    function: str
    """Its name in the module. Heavy imports belong inside it."""
    says: str
    """The first sentence of its help, which lists and completions show without loading the module."""


COMMANDS = {name: CommandRow(*row) for name, row in command_rows().items()}
"""Every command beside the main job, in the order of the help."""
GROUPS = {
    group: ", ".join(name for name, row in COMMANDS.items() if row.group == group)
    for group in dict.fromkeys(row.group for row in COMMANDS.values())
    if group
}
"""The names of the commands by what a person does."""
OTHER = "Other"
TOPICS = {
    "job": JOB,
    "fine-tuning": FINETUNE,
    "run": RUN,
    "layout": LAYOUT,
    "search": SEARCH,
    "assumptions": ASSUMED,
    "output": OUTPUT,
}
"""Words after -h, and the headings that they show."""
ALL, LISTED = "all", "commands"
_SETTINGS = {"help_option_names": ["-h", "--help"]}
_ClickException: Any = typer.BadParameter.__mro__[2]
"""Typer carries its own copy of click from some version on; this is the class of whichever it uses."""


class _OneLine(logging.Formatter):
    """Notes and warnings as lines that hold nothing but text, whatever the file that they quote holds."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


class _Sections:
    """Help with the options under the headings they were declared with, in plain text that fits 80 columns."""

    topic = ""
    """The word that was given after -h."""
    is_of_a_job = False
    """True for a command that has the options of `plan`."""

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        shared, found = set() if self.topic == ALL or not self.is_of_a_job else shared_options(), False
        for title, params in self.headings(ctx).items():
            own = [param for param in params if param.name not in shared or title == "Arguments"]
            found = found or len(own) < len(params)
            _section(formatter, title, own, ctx)
        job = f"The options of the job are those of plan (--model, --tp, --switch, …): plan -h {ALL}, or -h {ALL} here."
        formatter.write_paragraph()
        formatter.write_text(job if found else "And -q, --no-color, --debug, as everywhere.")

    def headings(self: Any, ctx: Any) -> dict[str, list[Any]]:
        """The arguments and options under their headings, those of every command last."""
        found: dict[str, list[Any]] = {"Arguments": []}
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            panel = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or OTHER
            found.setdefault(panel, []).append(param)
        last = found.pop(OTHER, [])
        return {**found, OTHER: last} if self.topic == ALL else found


def _section(formatter: Any, title: str, params: list[Any], ctx: Any) -> None:
    """One heading with a line for each argument or option."""
    records = [(param, param.get_help_record(ctx)) for param in params]
    lines = [
        (param.metavar or record[0] if param.param_type_name == "argument" else record[0], record[1])
        for param, record in records
        if record is not None
    ]
    if lines:
        with formatter.section(title):
            formatter.write_dl(lines)


def shared_options() -> set[str]:
    """The options that the main job has too, by their names in Python."""
    return {field.name for field in fields(PlanOptions)} | {"quiet", "no_color", "debug"}


class _Once:
    """Options that are given twice: lists are joined; of others the last counts, and stderr names what was dropped."""

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        for param in self.get_params(ctx):
            names = {name for name in param.opts if name.startswith("-")}
            if not names or getattr(param, "multiple", False) or getattr(param, "is_flag", False):
                continue
            at = [i for i, word in enumerate(args) if word.partition("=")[0] in names]
            if len(at) > 1:
                args = _joined(args, at, sorted(names)[0])
        parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        return parsed


JOINED = ("--switch", "--assume", "--allow", "--show", "--keep", "--measured", "--skip")
"""Options whose values are lists, so that two of them are one longer list."""


def _joined(words: list[str], at: list[int], name: str) -> list[str]:
    """The words with one option for several of a name: a longer list, or the last value."""
    values = [words[i].partition("=")[2] if "=" in words[i] else " ".join(words[i + 1 : i + 2]) for i in at]
    if name not in JOINED:
        if len({*values}) > 1:
            _log.warning("%s: given %d times, the last counts: %s", name, len(at), ", ".join(values)[:80])
        return words
    dropped = {j for i in at for j in ((i,) if "=" in words[i] else (i, i + 1))}
    return [*(word for i, word in enumerate(words) if i not in dropped), name, ",".join(values)]


class Subcommand(_Once, _Sections, TyperCommand):
    """A command beside the main job."""


class Commands(_Once, _Sections, TyperGroup):
    """Loads a command's module when the command is named."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        if self.topic in ("", ALL):
            super().format_help_text(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        headings = self.headings(ctx)
        if not self.topic:
            with formatter.section("Options"):
                formatter.write_dl(first_screen())
        for title in headings if self.topic == ALL else filter(None, [TOPICS.get(self.topic)]):
            _section(formatter, title, headings[title], ctx)
        if self.topic in ("", ALL, LISTED):
            says = [(name, row.says) for name, row in COMMANDS.items() if row.group]
            with formatter.section("Commands"):
                formatter.write_dl(says if self.topic else list(GROUPS.items()))
        formatter.write_paragraph()
        formatter.write_text(f"More: plan COMMAND -h, plan -h {ALL}, or -h with {', '.join((*TOPICS, LISTED))}.")

    is_completed = False
    """True where a shell asks for the names of commands that begin as a word does, and runs none of them."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        self.is_completed = True
        return super().shell_complete(ctx, incomplete)

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, row in COMMANDS.items() if row.group]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name].says) if self.is_completed else _named(cmd_name)
        if ctx.resilient_parsing:  # completing a word that is not whole yet
            return None
        from planner.specs.problems import nearest

        raise SpecError(
            f"unknown command {cmd_name[:60]!r}",
            f"plan --model 405b --gpus 2048, or one of the commands {', '.join(COMMANDS)}{nearest(cmd_name, COMMANDS)}",
        )


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; PlannerError where it is wrong or cannot be done."""
    _start_lightly(arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.addLevelName(logging.WARNING, "warning")
    logging.addLevelName(logging.INFO, "note")
    try:
        code = _run(arguments or ["--help"])
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _ClickException as error:
        raise _usage_error(error) from None
    return code if isinstance(code, int) else 0


def _start_lightly(words: list[str]) -> None:
    """Leave out what libraries do when they are imported, and no command has a use for."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")  # it would look through all that is installed
    if not {"probe", "profile"} & set(words):  # numpy starts a thread for each core; torch may read the variable too
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _run(words: list[str]) -> Any:
    """A command that is named first needs nothing of the main job, whose options take as long to build as its own."""
    if words[0] == "help":  # as git and others have it
        words = [*words[1:2], "-h", *words[2:]]
    name, *rest = words
    if name in _SETTINGS["help_option_names"] and len(rest) == 1 and rest[0] not in COMMANDS:
        return _help(rest[0])
    if name in _SETTINGS["help_option_names"] and rest and rest[0] in COMMANDS:
        name, rest = rest[0], [*rest[1:], "-h"]
    if name in COMMANDS:
        command = _named(name, rest)
        if len(rest) == 2 and rest[0] in _SETTINGS["help_option_names"] and rest[1] == ALL:
            command.topic, rest = ALL, rest[:1]
        return command.main(args=rest, prog_name=f"plan {name}", standalone_mode=False)
    return _root(words).main(args=words, prog_name="plan", standalone_mode=False)


def _help(topic: str) -> Any:
    """The help of one topic, or of all options."""
    words = (ALL, LISTED, *TOPICS)
    if topic not in words:
        from planner.specs.problems import among

        raise SpecError(f"-h: {topic[:60]!r} is no topic", among(words, topic))
    root = _root()
    root.topic = topic
    return root.main(args=["-h"], prog_name="plan", standalone_mode=False)


def _root(words: list[str] | None = None) -> Any:
    app = typer.Typer(
        cls=Commands, invoke_without_command=True, subcommand_metavar="[COMMAND]", context_settings=_SETTINGS,
        rich_markup_mode=None,
    )  # fmt: skip
    app.callback()(_function("plan", "planner.cli.plan_command", "plan_command", words))
    root = typer.main.get_command(app)
    root.params += [*_parameters(_everywhere), *_parameters(_at_the_top)]
    return root


def _named(name: str, words: list[str] | None = None) -> Any:
    """The command of a row, whose module is loaded; for some words the options that they name."""
    row = COMMANDS[name]
    app = typer.Typer(context_settings=_SETTINGS, add_completion=False, rich_markup_mode=None)
    function = _function(name, row.module, row.function, words)
    app.command(name, cls=Subcommand)(function)
    command: Any = typer.main.get_command(app)
    command.is_of_a_job = getattr(function, "is_of_a_job", False)
    command.params += _parameters(_everywhere)
    return command


def _function(name: str, module: str, function: str, words: list[str] | None) -> Any:
    """A command with the parameters that typer shall see."""
    return declared(getattr(import_module(module), function), name, words)


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
        typer.echo(_versions())
        raise typer.Exit


def _versions() -> str:
    """One line: ours with the day of its calibration, and what it runs on; torch is looked up, not imported."""
    import platform
    from importlib import metadata

    ours = f"{DISTRIBUTION} {__version__} (calibration of {calibration_date()})"
    parts = [ours, f"Python {platform.python_version()}"]
    for name in ("pulp", "highspy", "torch"):
        try:
            parts.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            parts.append(f"{name} not installed")
    return ", ".join(parts)


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
    hint = f"`{command} -h` lists the options, with an example"
    missing = getattr(getattr(error, "param", None), "metavar", None) or ""
    if missing.startswith("PLAN.json"):
        hint = f"plan --model 405b --gpus 2048 -o plan.json makes one, for {command} plan.json"
    elif getattr(getattr(error, "param", None), "name", None) == "to":
        from planner.export.targets import TARGETS

        hint = f"--to {'|'.join(TARGETS)}"
    elif getattr(error, "option_name", None) == "--shard-size":
        hint = "one layout says it as --fsdp N"
    return SpecError(error.format_message().rstrip("."), hint)
