"""Fit a GPU's efficiency block to its measured kernels, layers and stages: `scripts/calibrate kernels`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import yaml

from planner.errors import SpecError, exit_code_of
from planner.profile import kernels, stages
from planner.profile.kernels import Problem
from planner.profile.solve import least_squares, soft_l1
from planner.profile.tables import has_table, measured_gpus
from planner.shape import FloatArray
from planner.specs.base import Spec
from planner.specs.efficiency import AttentionEfficiency
from planner.specs.hardware import HardwareSpec
from planner.specs.registry import load_hardware

BENCH = "bench."
NUM_FOLDS = 8
SCALE = 0.03
"""Relative error above which a row counts less: libraries choose badly for some shapes."""
GUESS_SPREAD = 0.2
"""By how much first guesses vary, as a standard deviation of the logarithm."""


class Residuals(NamedTuple):
    """|error| of a table in percent, and its signed mean."""

    num_rows: int
    bias: float
    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, log_errors: FloatArray) -> Residuals:
        size = np.abs(np.expm1(log_errors)) * 100
        return cls(
            len(size),
            float(np.mean(np.expm1(log_errors)) * 100),
            float(np.median(size)),
            float(np.percentile(size, 90)),
            float(size.max()),
        )

    def __str__(self) -> str:
        numbers = f"bias {self.bias:+5.1f}%  median {self.median:4.1f}%  p90 {self.p90:4.1f}%  worst {self.worst:5.1f}%"
        return f"n {self.num_rows:4d}  {numbers}"


def with_values(spec: Any, values: Mapping[str, float]) -> Any:
    """A copy of `spec` (or mapping) with the numbers at dotted paths replaced."""
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if isinstance(spec, Spec):
            inner = getattr(spec, head)
            spec = spec.model_copy(update={head: with_values(inner, {rest: value}) if rest else value})
        else:
            spec = {**spec, path: value}
    return spec


def hardware_with(hardware: HardwareSpec, values: Mapping[str, float]) -> HardwareSpec:
    """`hardware` with the efficiencies among `values` in place."""
    ours = {path: value for path, value in values.items() if not path.startswith(BENCH)}
    return hardware.model_copy(update={"efficiency": with_values(hardware.efficiency, ours)})


def log_errors(problem: Problem, hardware: HardwareSpec, values: Mapping[str, float]) -> FloatArray:
    """log(predicted / measured) of every row."""
    bench = {path.removeprefix(BENCH): value for path, value in values.items() if path.startswith(BENCH)}
    predicted = problem.predict(hardware_with(hardware, values), bench)
    return np.asarray(np.log(predicted / problem.measured_s))


def fit(problem: Problem, hardware: HardwareSpec, keep: Any = slice(None)) -> dict[str, float]:
    """The free numbers that explain the rows `keep` best, from any of a few first guesses."""
    names = list(problem.free)
    start, low, high = (np.log([problem.free[name][i] for name in names]) for i in range(3))

    def values(x: FloatArray) -> dict[str, float]:
        found: dict[str, float] = dict(zip(names, np.exp(x).tolist(), strict=True))
        return found | {path: found[other] for path, other in problem.alike.items()}

    def residuals(x: FloatArray) -> FloatArray:
        return np.asarray((log_errors(problem, hardware, values(x)) * problem.weights)[keep])

    moved = np.random.default_rng(0).normal(0.0, GUESS_SPREAD, (problem.num_guesses, len(start)))
    moved[0] = 0.0
    found = [least_squares(residuals, start + move, low, high, SCALE) for move in moved]
    return values(min(found, key=lambda x: soft_l1(residuals(x), SCALE)))


def left_out(problem: Problem, hardware: HardwareSpec) -> FloatArray:
    """log errors of rows whose whole group was left out of the fit."""
    names = np.unique(problem.groups)
    folds = [names[i :: min(NUM_FOLDS, len(names))] for i in range(min(NUM_FOLDS, len(names)))]
    errors = np.zeros(len(problem.measured_s))
    for fold in folds:
        out = np.isin(problem.groups, fold)
        errors[out] = log_errors(problem, hardware, fit(problem, hardware, ~out))[out]
    return errors


PROBLEMS: tuple[tuple[str, Callable[[str], Problem]], ...] = (
    ("stream", kernels.stream),
    ("gemm", kernels.gemm),
    ("gemm", kernels.gemm_fp8),
    ("grouped_gemm", kernels.gemm_grouped),
    ("attention", lambda gpu: kernels.attention(gpu, "cudnn")),
    ("attention", lambda gpu: kernels.attention(gpu, "flash")),
    ("stages", stages.steps),
)
"""Table and what it is to explain, in order: later ones build on the numbers of earlier ones."""


def problems(gpu: str) -> Sequence[Problem]:
    """Of the tables that there are of a GPU; one without rows (nothing timed in 8 bits) is no problem."""
    found = (problem(gpu) for table, problem in PROBLEMS if has_table(gpu, table))
    return [problem for problem in found if len(problem.measured_s)]


def fit_all(gpu: str, hardware: HardwareSpec, leave_out: bool = True) -> HardwareSpec:
    """Fit every table in turn, later ones on the numbers of earlier ones, and print what is left over."""
    for problem in problems(gpu):
        values = fit(problem, hardware)
        _report(problem, log_errors(problem, hardware, values), left_out(problem, hardware) if leave_out else None)
        hardware = hardware_with(hardware, values)
    return hardware


def _report(problem: Problem, errors: FloatArray, left: FloatArray | None) -> None:
    labels = problem.labels if problem.labels is not None else np.full(len(errors), "")
    for label in np.unique(labels):
        of = labels == label
        print(f"{problem.name + ' ' + label:28s} {Residuals.of(errors[of])}")
        if left is not None:
            print(f"{'  left out':28s} {Residuals.of(left[of])}", flush=True)


def efficiency_block(efficiency: Spec) -> str:
    """The efficiencies as YAML, to four digits, defaults left out."""
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
    start: dict[str, Any] = {"cudnn": AttentionEfficiency()} if has_table(gpu, "attention") else {}
    if has_table(gpu, "stages"):
        start |= {"sustained_fraction": 1.0, "backward_sustained_fraction": 1.0}
    efficiency = hardware.efficiency.model_copy(update=start)
    fitted = fit_all(gpu, hardware.model_copy(update={"efficiency": efficiency}))
    print(efficiency_block(fitted.efficiency))


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
