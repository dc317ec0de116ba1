"""`plan doctor`: what this machine has of what the planner needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from planner.cli import options as o

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.profile.findings import Command, Extra, Findings, Gpu, Package

Deep = Annotated[
    bool, o.text("What is looked at", "--deep", None, "Import torch too, in a process of its own: seconds to minutes.")
]
MAIN_JOB = "plan"
SOLVERS = ("highspy", "pulp")
"""The packages that solve integer programs."""


def doctor_command(deep: Deep = False, json: o.Json = False) -> None:
    """Say what is installed, what each command needs and whether it can run here: one screen to paste into an issue.

    GPUs are found by their driver's tools and torch by its files, so that nothing slow is imported. Names of users and
    machines are left out. Ends with 1 where the planner lacks something that it depends on, with 4 where the solver
    does not work.

    \b
    Example:
      plan doctor
      plan doctor --deep --json
    """
    from planner.cli.app import COMMANDS
    from planner.cli.output import dumps, show, width
    from planner.profile.doctor import examine

    findings = examine((MAIN_JOB, *COMMANDS), o.DEFAULT_HARDWARE, deep, width())
    if json:
        sys.stdout.write(dumps(findings.model_dump(mode="json") | {"troubles": findings.troubles}))
    else:
        show(*render(findings))
    if findings.troubles:
        raise _trouble(findings)


def _trouble(findings: Findings) -> Exception:
    """The error for a core that does not work; stdout has said all of it."""
    from planner.distribution import install_line
    from planner.errors import PlannerError, SolverError

    broken = any(solver.is_needed and solver.trouble for solver in findings.solvers)
    packages = findings.installed.packages
    if any(package.trouble for package in packages):
        hint = f"{install_line()} brings what is missing"
    elif broken:
        again = " ".join(f"'{package.name}{package.needs}'" for package in packages if package.name in SOLVERS)
        hint = f"pip install --force-reinstall --no-deps {again}"
    else:
        hint = "set TMPDIR to a folder that can be written"
    error = (SolverError if broken else PlannerError)("; ".join(findings.troubles), hint)
    error.follows_answer = True
    return error


def render(findings: Findings) -> Iterator[RenderableType]:
    """The screen: a title and one block a subject."""
    from rich.text import Text

    from planner.report.pieces import columns

    calibration = findings.calibration
    yield Text(f"{findings.version} (calibration of {calibration.date}, {_days(calibration.age_days)} old)", "bold")
    table = columns("l", None)
    for head, text in _lines(findings):
        table.add_row(head, text)
    yield table
    yield Text()
    troubles = findings.troubles
    yield Text("The core works." if not troubles else f"It does not all work: {'; '.join(troubles)}", "bold")


def _lines(findings: Findings) -> Iterator[tuple[str, str]]:
    has = findings.installed
    yield "Python", f"{findings.python}, {findings.system}"
    yield "installed", f"as {has.kind} in {has.folder}"
    yield "depends on", ", ".join(map(_package, has.packages))
    for solver in findings.solvers:
        works = "solves a small program" if not solver.trouble else solver.trouble
        yield "solver" if solver.is_needed else "", f"{solver.name} {works}{'' if solver.is_needed else ' (optional)'}"
    needed = {name for command in findings.commands for name in command.extras}
    for extra in has.extras:
        if extra.name in needed:
            yield f"[{extra.name}]", _extra(extra)
    others = [_state(extra) for extra in has.extras if extra.name not in needed]
    yield "extras", f"of developers, which no command needs: {', '.join(others)}"
    yield from _commands(findings.commands)
    yield "GPU", _gpus(findings)
    torch = findings.torch
    if torch is None:
        yield "torch", "not installed: plan probe and plan profile need it, plans do not"
    else:
        built = f", built for {torch.build}" if torch.build else ""
        yield "torch", f"{torch.version}{built}{f'; {torch.imported}' if torch.imported else ''}"
    profile = findings.profile
    yield "profile", f"{profile.name}, {profile.reason}; {profile.evidence}"
    yield "calibration", f"{findings.calibration.numbers} ({findings.calibration.source})"
    kept = f"{findings.history.num_runs} kept runs in {findings.history.path}"
    yield "history", findings.history.trouble or kept
    yield "temp", f"{findings.temp.path}, {findings.temp.trouble or 'writable'}"
    terminal = findings.terminal
    where = "terminal" if terminal.is_terminal else "no terminal"
    yield "terminal", f"{terminal.num_columns} columns, {terminal.encoding}, {where}"
    yield "variables", f"set: {', '.join(findings.variables) or 'none of ours'}; there is no cache and no other file"


def _commands(commands: tuple[Command, ...]) -> Iterator[tuple[str, str]]:
    free = [command.name for command in commands if not command.extras]
    yield "commands", f"{', '.join(free)}: run"
    for command in commands:
        if command.extras:
            needs = " and ".join(f"[{extra}]" for extra in command.extras)
            runs = "runs" if command.can_run else "cannot run"
            yield "", f"{command.name} needs {needs}: {runs}{f', {command.note}' if command.note else ''}"


def _extra(extra: Extra) -> str:
    """The versions of an extra, or what it lacks and the line that installs that."""
    lacks = [package for package in extra.packages if package.trouble]
    return f"{', '.join(map(_package, lacks))}: {extra.install}" if lacks else ", ".join(map(_package, extra.packages))


def _state(extra: Extra) -> str:
    num_lacking = sum(1 for package in extra.packages if package.trouble)
    lacks = f"lacks {num_lacking} of {len(extra.packages)}" if num_lacking else "complete"
    return f"[{extra.name}] {lacks}"


def _package(package: Package) -> str:
    if not package.version:
        return f"{package.name} missing"
    wrong = f" ({package.trouble}: {package.needs})" if package.trouble else ""
    return f"{package.name} {package.version}{wrong}"


def _gpus(findings: Findings) -> str:
    found = findings.gpus
    if not found.gpus:
        return f"none found{f': {found.trouble}' if found.trouble else ''}; plans need none"
    counts: dict[Gpu, int] = {}
    for gpu in found.gpus:
        counts[gpu] = counts.get(gpu, 0) + 1
    listed = "; ".join(f"{count} × {_gpu(gpu)}" for gpu, count in counts.items())
    return f"{listed} ({found.found_by}){f'; {found.trouble}' if found.trouble else ''}"


def _gpu(gpu: Gpu) -> str:
    memory = f", {gpu.memory_gib:.1f} GiB" if gpu.memory_gib is not None else ""
    return f"{gpu.name}{memory}{f', driver {gpu.driver}' if gpu.driver else ''}"


def _days(count: int) -> str:
    return f"{count} day{'' if count == 1 else 's'}"
