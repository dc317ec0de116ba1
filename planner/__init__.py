"""Plans how to lay a large model out on N GPUs.

    from planner import ClusterSpec, TrainingSpec, plan

    cluster = ClusterSpec(hardware="h100", num_gpus=2048)
    best = plan("405b", cluster, TrainingSpec(seq_length=8192, global_batch_size=2048))
    print(best.parallelism, best.step.step_s)
    best.save("plan.json")

Names are loaded when they are first asked for, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner.distribution import __version__ as __version__

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.decide.check import check
    from planner.decide.resume import replan
    from planner.errors import (
        Infeasible,
        PlannerError,
        ProbeError,
        ProbeMismatch,
        SolverError,
        SpecError,
        Unsupported,
    )
    from planner.export.export import export as export_plan
    from planner.export.import_run import read as read_configuration
    from planner.layout.evaluate import evaluate
    from planner.plan_file import read_plan as read_plan
    from planner.report.page import report_page as report_page
    from planner.report.page import write_report
    from planner.report.terminal import panel_text as panel_text
    from planner.search.search import plan
    from planner.search.why.explain import explain
    from planner.specs.cluster import ClusterSpec
    from planner.specs.hardware import HardwareSpec
    from planner.specs.model import ModelSpec
    from planner.specs.registry import load_hardware, load_model
    from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
    from planner.trainers.load import load_runtime
    from planner.trainers.spec import RuntimeSpec
    from planner.validate.score import validate_runs


__all__ = [
    "ClusterSpec",
    "HardwareSpec",
    "Infeasible",
    "ModelSpec",
    "Parallelism",
    "Plan",
    "PlannerError",
    "ProbeError",
    "ProbeMismatch",
    "RuntimeSpec",
    "SearchLimits",
    "SolverError",
    "SpecError",
    "TrainingSpec",
    "Unsupported",
    "check",
    "evaluate",
    "explain",
    "export_plan",
    "load_hardware",
    "load_model",
    "load_runtime",
    "plan",
    "read_configuration",
    "replan",
    "validate_runs",
    "write_report",
]

_HOMES = {
    "ClusterSpec": "planner.specs.cluster",
    "HardwareSpec": "planner.specs.hardware",
    "Infeasible": "planner.errors",
    "ModelSpec": "planner.specs.model",
    "Parallelism": "planner.specs.training",
    "Plan": "planner.answer",
    "PlannerError": "planner.errors",
    "ProbeError": "planner.errors",
    "ProbeMismatch": "planner.errors",
    "RuntimeSpec": "planner.trainers.spec",
    "SearchLimits": "planner.specs.training",
    "SolverError": "planner.errors",
    "SpecError": "planner.errors",
    "TrainingSpec": "planner.specs.training",
    "Unsupported": "planner.errors",
    "check": "planner.decide.check",
    "evaluate": "planner.layout.evaluate",
    "explain": "planner.search.why.explain",
    "export_plan": "planner.export.export:export",
    "load_hardware": "planner.specs.registry",
    "load_model": "planner.specs.registry",
    "load_runtime": "planner.trainers.load",
    "panel_text": "planner.report.terminal",
    "plan": "planner.search.search",
    "read_configuration": "planner.export.import_run:read",
    "read_plan": "planner.plan_file",
    "replan": "planner.decide.resume",
    "report_page": "planner.report.page",
    "validate_runs": "planner.validate.score",
    "write_report": "planner.report.page",
}
"""The module that each name is loaded from, and its name there where that is another (a folder has the same one)."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, there = _HOMES[name].partition(":")
    return getattr(import_module(module), there or name)


def __dir__() -> list[str]:
    return sorted((*__all__, "__version__"))
