"""Fits the numbers that single GPUs do not show to published runs: `scripts/calibrate runs`.

There are a few coefficients, each with a meaning, bounds and a first guess. The first guess counts as much as one row,
so that thin evidence moves nothing. Errors are reported in sample and with each family left out of the fit that
predicts it, beside the share of rows that lie within their 80% intervals.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.errors import SpecError, Unsupported, exit_code_of
from planner.layout.runs import Run, parse_run
from planner.profile.coefficients import COEFFICIENTS, Coefficient
from planner.profile.least_squares import least_squares
from planner.shape import FloatArray
from planner.specs.base import Spec
from planner.trainers.load import load_runtime
from planner.validate.rows import HELD_OUT, Row, load_rows
from planner.validate.score import weighted_quantile

SCALE = 0.05
"""Relative error above which a row counts less: single iterations and nodes of a bad day."""
TOLERANCE = 1e-4
"""Share of the sum of errors: a fit ends when an iteration gains less."""
ALL = slice(None)
FAMILY_WEIGHT = 12.0
"""Largest weight of a family in the fit: its rows share one cluster, so that more rows are no more evidence."""
INFERRED = 0.5
"""Weight of a row in which one field was inferred (trust B)."""


def replaced(spec: Any, path: str, value: float) -> Any:
    """A copy of `spec` (a Spec, a tuple or a mapping) with the number at a dotted path replaced."""
    head, _, rest = path.partition(".")
    if isinstance(spec, tuple):
        index = int(head)
        return (*spec[:index], replaced(spec[index], rest, value), *spec[index + 1 :])
    inner = replaced(getattr(spec, head) if isinstance(spec, Spec) else spec[head], rest, value) if rest else value
    return spec.model_copy(update={head: inner}) if isinstance(spec, Spec) else {**spec, head: inner}


@dataclass(slots=True)
class Priced:
    """A published run with its layout, which is priced again and again with other coefficients."""

    row: Row
    run: Run
    known: dict[tuple[float, ...], float]
    width: float = 0.0
    """Half the 80% interval of the logarithm of the step's seconds."""

    @classmethod
    def of(cls, row: Row) -> Priced:
        return cls(row, parse_run({"id": row.id, "run": row.run}), {})

    @classmethod
    def all_of(cls, rows: Sequence[Row]) -> list[Priced]:
        """One priced run for each row. Rows that publish the same run share it."""
        runs: dict[str, Priced] = {}
        return [runs.setdefault(row.run_key, cls.of(row)) for row in rows]

    def applies(self, coefficient: Coefficient) -> bool:
        """True if the run has the hardware or the runtime that the coefficient belongs to."""
        if coefficient.of == "hardware":
            return self.run.cluster.hardware.name in coefficient.names
        runtime = self.run.runtime
        if runtime.name not in coefficient.names:
            return False
        if coefficient.feature is not None:
            return bool(self.row.run.get("features", {}).get(coefficient.feature))
        # not where a feature of the run says what it is
        return bool(getattr(runtime, coefficient.path) == getattr(load_runtime(runtime.name), coefficient.path))

    def step_s(self, values: Mapping[Coefficient, float]) -> float:
        """Seconds of the step with these coefficients."""
        applicable = {c: value for c, value in values.items() if self.applies(c)}
        key = tuple(applicable.values())
        if key not in self.known:
            self.known[key] = self._step_s(applicable)
        return self.known[key]

    def _step_s(self, values: Mapping[Coefficient, float]) -> float:
        run = self.run
        hardware, runtime = run.cluster.hardware, run.runtime
        for coefficient, value in values.items():
            if coefficient.of == "runtime":
                runtime = replaced(runtime, coefficient.path, value)
            else:
                hardware = replaced(hardware, coefficient.path, value)
        cluster = type(run.cluster)(**{**dict(run.cluster), "hardware": hardware})
        step = replace(run, cluster=cluster, runtime=runtime, says_switches=True).evaluate().step
        assert step.step_s_interval is not None
        self.width = float(np.log(step.step_s_interval[1] / step.step_s))
        return step.step_s


def is_supported(row: Row) -> bool:
    """True if the planner models everything that the run used."""
    try:
        Priced.of(row)
    except Unsupported:
        return False
    return True


class Fit:
    """Published runs and the free coefficients that explain them."""

    def __init__(self, rows: Sequence[Row], coefficients: Sequence[Coefficient]) -> None:
        self.priced = Priced.all_of(rows)
        self.coefficients = tuple(coefficients)
        self.measured = np.log([row.measured.step_s for row in rows])
        self.weights = np.array([row.weight for row in rows])
        self.families = np.array([row.family for row in rows])
        trusted = [INFERRED if row.trust == "B" else 1.0 for row in rows]
        pulls = self.weights * trusted * [not row.held_out for row in rows]
        totals = {family: pulls[self.families == family].sum() for family in set(self.families.tolist())}
        self.pulls = pulls * [FAMILY_WEIGHT / max(FAMILY_WEIGHT, totals[f]) for f in self.families.tolist()]
        self.start, self.low, self.high = (
            np.log([getattr(c, name) for c in self.coefficients]) for name in ("start", "low", "high")
        )

    def log_errors(self, x: FloatArray, rows: FloatArray | slice = ALL) -> FloatArray:
        """log(predicted / measured) of every row, or of the chosen rows; `x` holds the logarithms of the
        coefficients."""
        values = dict(zip(self.coefficients, np.exp(x).tolist(), strict=True))
        return np.log([priced_run.step_s(values) for priced_run in np.array(self.priced)[rows]]) - self.measured[rows]

    def solve(self, left_out: str | None = None, near: FloatArray | None = None) -> FloatArray:
        """Logarithms of the coefficients that explain the rows best, without the family `left_out`."""
        pulling = (self.families != left_out) & (self.pulls > 0)
        spread = np.array([c.spread for c in self.coefficients])

        def residuals(x: FloatArray) -> FloatArray:
            return np.concatenate((self.log_errors(x, pulling), SCALE * (x - self.start) / spread))

        both = np.concatenate((self.pulls[pulling], np.ones(len(self.start))))
        return least_squares(
            residuals, self.start if near is None else near, self.low, self.high, SCALE, both, TOLERANCE
        )


def _line(name: str, errors: FloatArray, weights: FloatArray, widths: FloatArray) -> str:
    size = np.abs(np.expm1(errors)) * 100
    median, p90 = (weighted_quantile(size, weights, q) for q in (0.5, 0.9))
    mean, bias = np.average(size, weights=weights), np.average(np.expm1(errors) * 100, weights=weights)
    share_in_interval = np.average(np.abs(errors) <= widths, weights=weights)
    return (
        f"{name:24s} n {len(size):4d}  median {median:5.1f}%  p90 {p90:5.1f}%  mean {mean:5.1f}%  bias {bias:+5.1f}%  "
        f"worst {size.max():5.1f}%  in 80% {share_in_interval:4.0%}"
    )


def left_out_errors(fit: Fit, best: FloatArray) -> FloatArray:
    """log(predicted / measured) of every row by the fit without its family, each started at `best`."""
    errors = fit.log_errors(best)
    for family in dict.fromkeys(fit.families.tolist()):
        if family in HELD_OUT:
            continue
        rows = fit.families == family
        errors[rows] = fit.log_errors(fit.solve(family, best), rows)
    return errors


def report(fit: Fit, leave_out: bool = True) -> FloatArray:
    """Fit, print the coefficients and the errors in sample and left out, and return the coefficients."""
    best = fit.solve()
    for coefficient, value in zip(fit.coefficients, np.exp(best).tolist(), strict=True):
        at = " (at its bound)" if value in (coefficient.low, coefficient.high) else ""
        print(f"{coefficient.name:34s} {value:9.4g} {coefficient.unit:4s} from {coefficient.start:g}{at}", flush=True)
    tables = {"": fit.log_errors(best)}
    widths = np.array([one.width for one in fit.priced])
    if leave_out:
        tables["  left out"] = left_out_errors(fit, best)
    for family in (*dict.fromkeys(fit.families.tolist()), "all"):
        rows = (fit.families == family) | (family == "all")
        for name, errors in tables.items():
            print(_line(name or family, errors[rows], fit.weights[rows], widths[rows]))
    return best


def main(arguments: Sequence[str]) -> None:
    """`runs [FAMILY …]`: fit the coefficients to the published runs (of some families) and print what is left over."""
    counted = [row for row in load_rows() if row.counts]
    families = list(dict.fromkeys(row.family for row in counted))
    unknown = [name for name in arguments if name not in families]
    if unknown:
        raise SpecError(f"scripts/calibrate runs: {unknown[0]!r} is unknown", f"one of {', '.join(families)}")
    rows = [row for row in counted if not arguments or row.family in arguments]
    rows = [row for row in rows if is_supported(row)]
    priced = Priced.all_of(rows)
    free = [c for c in COEFFICIENTS if any(run.applies(c) for run in priced)]
    report(Fit(rows, free))


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
