"""`plan probe --rehearse`: bytes of the plan's stages, planned and counted, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.report.pieces import bullets, columns, section
from planner.specs.units import gib

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.probe.rehearse.result import RehearsalResult


def show_rehearsal(
    plan: Plan, stages: Any, tolerance: float | None, json: bool, output: str | None, force: bool
) -> None:
    """Count, print and save. Raises ProbeMismatch where a stage needs other bytes than planned."""
    from planner.cli.output import dumps, show
    from planner.errors import ProbeError, ProbeMismatch, SpecError
    from planner.files import STDOUT, write_text

    if tolerance is not None and not tolerance > 0:
        raise SpecError(f"--tolerance {tolerance:g}: must be positive")
    try:
        from planner.probe.probe import ProbeOptions, probe_bytes
        from planner.probe.rehearse.rehearse import BYTES_TOLERANCE
    except ModuleNotFoundError as error:
        raise ProbeError(f"the probe needs {error.name}", "pip install 'planner[probe]'") from None
    options = ProbeOptions(
        device="cuda", stages=stages, tolerance_fraction=BYTES_TOLERANCE if tolerance is None else tolerance
    )
    result = probe_bytes(plan, options)
    if output != STDOUT:
        if json:
            sys.stdout.write(dumps(result.model_dump(mode="json")))
        else:
            show(render(result))
    if output is not None:
        write_text(output, dumps(result.model_dump(mode="json")), force)
    if not result.agrees:
        raise ProbeMismatch("the count contradicts the plan", "the report names the stages, and what they hold")


def render(result: RehearsalResult) -> Group:
    """The whole report."""
    return Group(*_sections(result))


def _sections(result: RehearsalResult) -> Iterator[RenderableType]:
    yield Text(f"plan  {result.slice.asked}", style="bold")
    yield Text(f"run   {result.slice.run}")
    yield Text(f"on    nothing: tensors without memory, as on {result.architecture}, torch {result.torch_version}")
    yield Text("held  against the planner's price of eager torch, which is what the probe runs")
    yield section("Planned and counted, GiB", _comparisons(result))
    claims = [f"verified: {', '.join(result.slice.verified)}", f"not counted: {', '.join(result.slice.extrapolated)}"]
    yield section("Verified here, and not", bullets(claims))
    wrong = [f"{one.name} of stage {one.stage}" for one in result.comparisons if one.agrees is False]
    within = f"within {100 * result.tolerance_fraction:g}%"
    verdict = (
        f"the count contradicts the plan: {', '.join(wrong)}" if wrong else f"the count agrees with the plan {within}"
    )
    yield Text(f"\n{verdict}", style="bold")


def _comparisons(result: RehearsalResult) -> Table:
    table = columns("l", "l", "r", "r", "r", "l")
    table.show_header = True
    for column, head in zip(table.columns, ("", "stage", "planned", "counted", "error", ""), strict=True):
        column.header = head
    for one in result.comparisons:
        error = one.error_fraction
        table.add_row(
            one.name,
            "" if one.stage is None else str(one.stage),
            f"{gib(one.predicted):,.3f}",
            f"{gib(one.measured):,.3f}",
            "" if error is None else f"{100 * error:+.2f}%",
            {None: "", True: "ok", False: "OFF"}[one.agrees],
        )
    return table
