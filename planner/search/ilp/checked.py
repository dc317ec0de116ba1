"""Holds what a solver claims against the program itself: its values against every row, its objective, its bound.

Nothing is believed because a solver says so. A split counts if its values satisfy every row, to float precision and
what HiGHS tolerates. A bound, and "no split fits", is held against a second run without presolve, which looks for a
split below it for half as long as the first run took. What that run contradicts, or fails on, is no bound, and the
search has only its own closed form for that node; what it does not decide in its time rests on the first run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from planner.search.ilp import solver
from planner.search.ilp.formulation import INTEGER, Formulation
from planner.search.ilp.formulation import value as value_of
from planner.search.ilp.solver import LEAST_TIME_S, Claim, below

AGAIN = 0.5
LEAST_AGAIN_S = 0.02
"""The second run has this share of the seconds of the first, and at least so many.

Without presolve a program of many layers takes ten times as long; small ones are all decided.
"""
TOLERANCE = 1e-5
"""Part of the size of a row's terms by which it may be violated, as HiGHS's rounded integers do by up to 1e-6."""


@dataclass(frozen=True, slots=True)
class Checked:
    """An answer that holds: a split that satisfies every row, or that there is none."""

    has_split: bool
    """True if the variables of the program have the values of a split."""
    objective_s: float = math.inf
    bound_s: float = 0.0
    """The lower bound of the objective, which no second run contradicts; 0 if there is none."""


def solved(program: Formulation, time_limit_s: float, gap_fraction: float, proves: bool = True) -> Checked | str:
    """Solve the program; the variables then have the values of the split.

    A text is the reason why there is no answer, empty if time was up. Without `proves` only the split is made sure of.
    """
    begin_s = time.monotonic()
    claim = _checked(program, solver.run(program.problem, max(time_limit_s, LEAST_TIME_S), gap_fraction))
    took_s = time.monotonic() - begin_s
    left_s = max(time_limit_s - took_s, LEAST_TIME_S)
    if claim.outcome == "nothing":
        if not claim.failure:
            return ""
        again = _checked(program, solver.run(program.problem, left_s, gap_fraction, presolve=False))
        return Checked(True, again.objective_s) if again.values else claim.failure
    if claim.outcome == "found":
        return Checked(True, claim.objective_s)
    if not proves:
        return Checked(bool(claim.values), claim.objective_s)
    again_s = min(left_s, max(LEAST_AGAIN_S, AGAIN * took_s))
    again = _checked(program, solver.run_below(program.problem, claim.bound_s, again_s))
    if again.values and not again.objective_s >= claim.objective_s:  # the claim was wrong: this split is faster
        return Checked(True, again.objective_s)
    if claim.values:
        _assign(program, claim.values)
    is_late = again.outcome == "nothing" and not again.failure
    if again.outcome == "infeasible" or is_late:
        return Checked(bool(claim.values), claim.objective_s, claim.bound_s)
    if claim.values:
        return Checked(True, claim.objective_s)
    return f"it says that no split fits, and without presolve does not confirm it ({again.failure or again.outcome})"


def _checked(program: Formulation, claim: Claim) -> Claim:
    """The claim, with the objective that its values really have; nothing if they violate a row or are no numbers."""
    if claim.outcome in ("infeasible", "nothing"):
        return claim
    if len(claim.values) != len(program.problem.variables()):
        return claim.refused("its answer lacks variables")
    _assign(program, claim.values)
    violated = violated_row(program)
    if violated is not None:
        return claim.refused(f"its answer violates {violated}")
    objective_s = value_of(program.problem.objective)
    if not abs(objective_s - claim.objective_s) <= TOLERANCE * (1 + abs(objective_s)):
        return claim.refused(f"its objective {claim.objective_s:.6g} is {objective_s:.6g}")
    if claim.outcome == "optimal" and not below(claim.bound_s) <= objective_s:
        return claim.refused(f"its bound {claim.bound_s:.6g} is above its objective {objective_s:.6g}")
    bound_s = min(claim.bound_s, objective_s)
    return Claim(claim.outcome, claim.values, objective_s, bound_s)


def _assign(program: Formulation, values: Sequence[float]) -> None:
    """Give the variables these values, integers to the nearest whole number."""
    for variable, value in zip(program.problem.variables(), values, strict=True):
        is_whole = variable.cat == INTEGER and _is_number(value) and abs(value - round(value)) <= TOLERANCE
        variable.varValue = float(round(value)) if is_whole else value


def violated_row(program: Formulation) -> str | None:
    """The name of the first variable or row that the values of the variables violate; None if they hold."""
    for variable in program.problem.variables():
        value = variable.varValue
        if not _is_number(value) or (variable.cat == INTEGER and value != round(value)):
            return f"the range of {variable.name}"
        slack = TOLERANCE * (1 + abs(value))
        if variable.lowBound is not None and value < variable.lowBound - slack:
            return f"the range of {variable.name}"
        if variable.upBound is not None and value > variable.upBound + slack:
            return f"the range of {variable.name}"
    for row in program.rows:
        total, size = row.constant, 1 + abs(row.constant)
        for variable, coefficient in row.items():
            value = variable.varValue  # type: ignore[attr-defined]  # pulp's spelling
            total += coefficient * value
            size += abs(coefficient) * max(1.0, abs(value))
        most = TOLERANCE * size
        # sense −1 is ≤, 0 is =, 1 is ≥ 0
        if (row.sense <= 0 and not total <= most) or (row.sense >= 0 and not total >= -most):
            return f"row {row.name}"
    return None


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
