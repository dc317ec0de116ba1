"""`plan doctor`: what this machine has of what the planner needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.cli import options as o

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.profile.doctor import Extra, Findings, Package

SOLVERS = ("highspy", "pulp")
"""The packages that solve integer programs."""


def doctor_command(json: bool = False) -> None:
    """Say what is installed, and what commands lack here: one screen to paste into an issue.

    GPUs are found by their driver's tools and torch by its files, so that nothing slow is imported. Names of users and
    machines are left out. Ends with 1 where the planner lacks something that it depends on, with 4 where the solver
    does not work.

    \b
    Example:
      plan doctor
      plan doctor --json
    """
    from planner.cli.output import dumps, show
    from planner.profile.doctor import examine

    findings = examine(o.DEFAULT_HARDWARE)
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

    broken, packages = bool(findings.solvers["HiGHS"]), findings.packages
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

    yield Text(findings.version, "bold")
    table = columns("lw")
    for head, text in _lines(findings):
        table.add_row(head, text)
    yield table
    yield Text()
    troubles = findings.troubles
    yield Text("The core works." if not troubles else f"It does not all work: {'; '.join(troubles)}", "bold")


def _lines(findings: Findings) -> Iterator[tuple[str, str]]:
    from planner.profile.doctor import EXTRAS

    yield "Python", f"{findings.python}, {findings.system}"
    yield "installed", f"as {findings.kind} in {findings.folder}"
    yield "depends on", ", ".join(map(_package, findings.packages))
    works = (f"{name} {trouble or 'solves a small program'}" for name, trouble in findings.solvers.items())
    yield "solver", f"{'; '.join(works)} (optional)"
    for extra in findings.extras:
        if extra.name in EXTRAS:
            yield f"[{extra.name}]", f"{EXTRAS[extra.name]}: {_extra(extra)}"
    yield "GPU", _gpus(findings)
    yield "torch", findings.torch or "not installed: plan probe and plan profile need it, plans do not"
    yield "profile", findings.profile
    yield "calibration", findings.calibration
    yield "history", f"{findings.num_runs} kept runs in {findings.history}"
    yield "temp", f"{findings.temp}, {findings.temp_trouble or 'writable'}"


def _extra(extra: Extra) -> str:
    """The versions of an extra, or what it lacks and the line that installs that."""
    lacks = [package for package in extra.packages if package.trouble]
    return f"{', '.join(map(_package, lacks))}: {extra.install}" if lacks else ", ".join(map(_package, extra.packages))


def _package(package: Package) -> str:
    if not package.version:
        return f"{package.name} missing"
    wrong = f" ({package.trouble}: {package.needs})" if package.trouble else ""
    return f"{package.name} {package.version}{wrong}"


def _gpus(findings: Findings) -> str:
    """Each kind of GPU with their number, or why none is found."""
    if not findings.gpus:
        return f"none found{f': {findings.gpu_trouble}' if findings.gpu_trouble else ''}; plans need none"
    words = [
        f"{gpu.name}{f', {gpu.memory_gib:.1f} GiB' if gpu.memory_gib is not None else ''}"
        f"{f', driver {gpu.driver}' if gpu.driver else ''}"
        for gpu in findings.gpus
    ]
    return "; ".join(f"{words.count(one)} × {one}" for one in dict.fromkeys(words))
