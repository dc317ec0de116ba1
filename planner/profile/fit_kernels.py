"""Fits a GPU's efficiency block to its measured kernels, layers and stages: `scripts/calibrate kernels`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import yaml

from planner.errors import SpecError, exit_code_of
from planner.profile.fitting import Residuals, fit, hardware_with, left_out, log_errors
from planner.profile.kernel_problems import (
    FitProblem,
    attention_problem,
    gemm_problem,
    grouped_gemm_problem,
    narrow_gemm_problem,
    stream_problem,
)
from planner.profile.stage_problem import steps_problem
from planner.profile.tables import has_table, measured_gpus, read_table
from planner.shape import FloatArray
from planner.specs.base import Spec
from planner.specs.efficiency import AttentionEfficiency
from planner.specs.hardware import HardwareSpec
from planner.specs.registry import load_hardware

PROBLEMS: tuple[tuple[str, Callable[[str], FitProblem]], ...] = (
    ("stream", stream_problem),
    ("gemm", gemm_problem),
    ("gemm", narrow_gemm_problem),
    ("gemm", lambda gpu: narrow_gemm_problem(gpu, "mxfp8")),
    ("grouped_gemm", grouped_gemm_problem),
    ("attention", lambda gpu: attention_problem(gpu, "cudnn")),
    ("attention", lambda gpu: attention_problem(gpu, "flash")),
    ("stages", steps_problem),
)
"""Tables and the problems that they give, in order: later ones build on the numbers of earlier ones."""


def problems(gpu: str) -> Sequence[FitProblem]:
    """The fit problems of a GPU's tables. A table without rows (nothing timed in 8 bits) gives none."""
    problems_of_gpu = (problem(gpu) for table, problem in PROBLEMS if has_table(gpu, table))
    return [problem for problem in problems_of_gpu if len(problem.measured_s)]


def fit_all(gpu: str, hardware: HardwareSpec, leave_out: bool = True) -> HardwareSpec:
    """Fit every table in turn, later ones on the numbers of earlier ones, and print the residuals."""
    for problem in problems(gpu):
        values = fit(problem, hardware)
        _report(problem, log_errors(problem, hardware, values), left_out(problem, hardware) if leave_out else None)
        hardware = hardware_with(hardware, values)
    return hardware


def _report(problem: FitProblem, errors: FloatArray, left_out_errors: FloatArray | None) -> None:
    labels = problem.labels if problem.labels is not None else np.full(len(errors), "")
    for label in np.unique(labels):
        rows = labels == label
        print(f"{problem.name + ' ' + label:28s} {Residuals.of(errors[rows])}")
        if left_out_errors is not None:
            print(f"{'  left out':28s} {Residuals.of(left_out_errors[rows])}", flush=True)


def efficiency_block(efficiency: Spec) -> str:
    """The efficiencies as YAML with four digits, without defaults."""
    return yaml.safe_dump({"efficiency": _rounded(efficiency.model_dump(exclude_defaults=True))}, sort_keys=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(arguments: Sequence[str]) -> None:
    """`kernels [GPU]`: fit the tables under data/GPU (h200) and print residuals and the block for its profile."""
    gpu = arguments[0] if arguments else "h200"
    if gpu not in measured_gpus():
        raise SpecError(f"scripts/calibrate kernels: no tables of {gpu!r}", f"one of {', '.join(measured_gpus())}")
    hardware = load_hardware(gpu)
    timed = read_table(gpu, "attention").text("backend") if has_table(gpu, "attention") else ()
    start: dict[str, Any] = {"cudnn": AttentionEfficiency()} if "cudnn" in timed else {}
    if has_table(gpu, "stages"):
        start |= {"sustained_fraction": 1.0, "backward_sustained_fraction": 1.0}
    efficiency = hardware.efficiency.model_copy(update=start)
    fitted = fit_all(gpu, hardware.model_copy(update={"efficiency": efficiency}))
    print(efficiency_block(fitted.efficiency))


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
