"""The free numbers of a measured table that explain it best, and what they leave unexplained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from planner.profile.kernel_problems import FitProblem
from planner.profile.least_squares import least_squares, soft_l1
from planner.shape import FloatArray
from planner.specs.base import Spec
from planner.specs.hardware import HardwareSpec

BENCH = "bench."
NUM_FOLDS = 8
SCALE = 0.03
"""Relative error above which a row counts less: libraries choose badly for some shapes."""
GUESS_SPREAD = 0.2
"""Spread of first guesses, as a standard deviation of the logarithm."""


class Residuals(NamedTuple):
    """Errors of a table in percent: quantiles of |error|, and the signed mean."""

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


def number_at(spec: Any, path: str) -> float:
    """The number at a dotted path of `spec` (or mapping)."""
    for name in path.split("."):
        spec = getattr(spec, name) if isinstance(spec, Spec) else spec[name]
    return float(spec)


def hardware_with(hardware: HardwareSpec, values: Mapping[str, float]) -> HardwareSpec:
    """`hardware` with the efficiencies that `values` holds."""
    efficiencies = {path: value for path, value in values.items() if not path.startswith(BENCH)}
    return hardware.model_copy(update={"efficiency": with_values(hardware.efficiency, efficiencies)})


def log_errors(problem: FitProblem, hardware: HardwareSpec, values: Mapping[str, float]) -> FloatArray:
    """log(predicted / measured) of every row."""
    bench = {path.removeprefix(BENCH): value for path, value in values.items() if path.startswith(BENCH)}
    predicted = problem.predict(hardware_with(hardware, values), bench)
    return np.asarray(np.log(predicted / problem.measured_s))


def fit(
    problem: FitProblem,
    hardware: HardwareSpec,
    keep: Any = slice(None),
    near: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The free numbers that explain the rows `keep` best, from a few first guesses or from `near`."""
    names = list(problem.free)
    start, low, high = (np.log([problem.free[name][i] for name in names]) for i in range(3))

    def values(x: FloatArray) -> dict[str, float]:
        numbers: dict[str, float] = dict(zip(names, np.exp(x).tolist(), strict=True))
        return numbers | {path: numbers[free_path] for path, free_path in problem.alike.items()}

    def residuals(x: FloatArray) -> FloatArray:
        return np.asarray((log_errors(problem, hardware, values(x)) * problem.weights)[keep])

    moved = np.random.default_rng(0).normal(0.0, GUESS_SPREAD, (problem.num_guesses, len(start)))
    moved[0] = 0.0
    guesses = start + moved if near is None else [np.log([near[name] for name in names])]
    solutions = [least_squares(residuals, guess, low, high, SCALE) for guess in guesses]
    return values(min(solutions, key=lambda x: soft_l1(residuals(x), SCALE)))


def left_out(problem: FitProblem, hardware: HardwareSpec) -> FloatArray:
    """Log errors of every row, predicted by a fit without the row's group that starts from the fit of all rows."""
    near = fit(problem, hardware)
    names = np.unique(problem.groups)
    folds = [names[i :: min(NUM_FOLDS, len(names))] for i in range(min(NUM_FOLDS, len(names)))]
    errors = np.zeros(len(problem.measured_s))
    for fold in folds:
        out = np.isin(problem.groups, fold)
        errors[out] = log_errors(problem, hardware, fit(problem, hardware, ~out, near))[out]
    return errors
