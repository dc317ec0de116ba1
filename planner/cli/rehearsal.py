"""`plan probe --rehearse`: bytes of the plan's stages, planned and counted, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from planner.cli.probe_report import comparison_table
from planner.report.pieces import bullets, section
from planner.specs.units import gib

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.probe.result import RehearsalResult


def show_rehearsal(
    plan: Plan, stages: Any, tolerance: float | None, json: bool, output: str | None, force: bool
) -> None:
    """Count, print and save. Raises ProbeMismatch where a stage needs other bytes than planned."""
    from planner.cli.output import show_and_save
    from planner.distribution import install_line
    from planner.errors import ProbeError, ProbeMismatch, SpecError

    if tolerance is not None and not tolerance > 0:
        raise SpecError(f"--tolerance {tolerance:g}: must be positive")
    try:
        from planner.probe.probe import ProbeOptions, probe_bytes
        from planner.probe.rehearse import BYTES_TOLERANCE
    except ModuleNotFoundError as error:
        raise ProbeError(f"the probe needs {error.name}", install_line("probe")) from None
    options = ProbeOptions(
        device="cuda", stages=stages, tolerance_fraction=BYTES_TOLERANCE if tolerance is None else tolerance
    )
    result = probe_bytes(plan, options)
    show_and_save(result.model_dump(mode="json"), render(result), json, output, force)
    if not result.agrees:
        raise ProbeMismatch("the count contradicts the plan", "the report names the stages, and what they hold")


def _gib(num_bytes: float) -> str:
    return f"{gib(num_bytes):,.3f}"


def render(result: RehearsalResult) -> Group:
    """The whole report."""
    return Group(*_sections(result))


def _sections(result: RehearsalResult) -> Iterator[RenderableType]:
    yield Text(f"plan  {result.slice.asked}", style="bold")
    yield Text(f"run   {result.slice.run}")
    yield Text(f"on    nothing: tensors without memory, as on {result.architecture}, torch {result.torch_version}")
    yield Text("held  against the planner's price of eager torch, which is what the probe runs")
    counted = comparison_table(result.comparisons, ("planned", "counted"), {"bytes": _gib}, places=2)
    yield section("Planned and counted, GiB", counted)
    claims = [f"verified: {', '.join(result.slice.verified)}", f"not counted: {', '.join(result.slice.extrapolated)}"]
    yield section("Verified here, and not", bullets(claims))
    wrong = [f"{one.name} of stage {one.stage}" for one in result.comparisons if one.agrees is False]
    within = f"within {100 * result.tolerance_fraction:g}%"
    verdict = (
        f"the count contradicts the plan: {', '.join(wrong)}" if wrong else f"the count agrees with the plan {within}"
    )
    yield Text(f"\n{verdict}", style="bold")
