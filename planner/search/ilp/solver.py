"""HiGHS is asked for the answer to an integer program, and what it claims is held against the program itself.

Nothing is believed because a solver says so. A split counts if its values satisfy every row, to float precision and
what HiGHS tolerates. A claim about all splits, "none is faster than this" or "none fits", cannot be read off a split.
So HiGHS is asked a second time, without its presolve, for a split below the claimed bound, for half as long as the
first run took. (Presolve rewrites the program before anything is solved, and is where HiGHS 1.15.1 went wrong.) What
that run contradicts, or fails on, is no bound, and the search has only its own closed form for that node; what it does
not decide in its time rests on the first run.

A tiny integer program whose optimum is known tells if a solver works on this machine.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from planner.record import record
from planner.search.ilp.formulation import INTEGER, Formulation
from planner.search.ilp.formulation import value as value_of

Outcome = Literal["optimal", "found", "infeasible", "nothing"]
"""`found` is a split without a proof, `nothing` neither a split nor a proof that there is none."""

LEAST_TIME_S = 0.05
BELOW = 1e-5
"""A split is faster than a bound if it is so by this fraction and by as many seconds.

HiGHS lets a row be violated by 1e-6, so that less than a few times that is no difference.
"""

_NO_HEURISTICS = {
    f"mip_heuristic_run_{name}": False for name in ("rins", "rens", "root_reduced_cost", "feasibility_jump")
}
"""Heuristics of HiGHS that are switched off; they solve programs of their own, which takes longer than this one."""
_SOUND = {"presolve_rule_off": 1 << 9}
"""A presolve rule of HiGHS that is switched off: it substitutes equations of two variables.

With it HiGHS 1.15.1 calls some feasible programs infeasible.
"""


@record
class Claim:
    """The answer of a solver, as it gave it."""

    outcome: Outcome
    values: Sequence[float] = ()
    """The values of the variables, in the order of the problem; empty without a split."""
    objective_s: float = math.nan
    """The objective that the solver says its values have."""
    bound_s: float = math.nan
    """The objective below which there is nothing, as the solver says."""
    failure: str = ""
    """The reason why the solver ended without an answer; empty if its time was up."""

    def refused(self, failure: str) -> Claim:
        """The claim of a solver whose answer is no answer, for this reason."""
        return replace(self, outcome="nothing", values=(), failure=failure)


def run(problem: Any, time_limit_s: float, gap_fraction: float, presolve: bool = True) -> Claim:
    """Minimise the problem; whatever the solver raises is its failure."""
    import pulp

    without = {} if presolve else {"presolve": "off"}
    solver = pulp.HiGHS(
        msg=False, timeLimit=time_limit_s, gapRel=gap_fraction, threads=1, **_NO_HEURISTICS, **_SOUND, **without
    )
    try:
        problem.solve(solver)
        return _claim(problem)
    except Exception as error:
        return Claim("nothing", failure=f"{type(error).__name__} {error}".strip())


def run_below(problem: Any, bound_s: float, time_limit_s: float) -> Claim:
    """Minimise the same problem without presolve, for splits that are faster than `bound_s`: there should be none."""
    import highspy

    try:
        model = problem.solverModel
        model.clearSolver()
        model.setOptionValue("presolve", "off")
        model.setOptionValue("time_limit", time_limit_s)
        if math.isfinite(bound_s):
            objective = [(variable.index, cost) for variable, cost in problem.objective.items() if cost]
            columns, costs = zip(*objective, strict=True)
            most_s = below(bound_s) - problem.objective.constant
            model.addRow(-highspy.kHighsInf, most_s, len(columns), list(columns), list(costs))
        model.run()
        status = model.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Claim("infeasible")
        values = tuple(model.getSolution().col_value)
        if model.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            return Claim("found", values, model.getInfo().objective_function_value)
        is_late = status == highspy.HighsModelStatus.kTimeLimit
        return Claim("nothing", failure="" if is_late else f"status {model.modelStatusToString(status)}")
    except Exception as error:
        return Claim("nothing", failure=f"{type(error).__name__} {error}".strip())


def below(bound_s: float) -> float:
    """The seconds below which a split is faster than `bound_s`, beyond what is noise."""
    return bound_s - BELOW * (1 + abs(bound_s))


def _claim(problem: Any) -> Claim:
    """The answer that pulp read from HiGHS."""
    import highspy
    import pulp

    status, model = problem.sol_status, problem.solverModel
    if status == pulp.LpSolutionInfeasible:
        return Claim("infeasible", bound_s=math.inf)
    info = model.getInfo()
    if status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        is_late = model.getModelStatus() == highspy.HighsModelStatus.kTimeLimit
        failure = "" if is_late else f"status {model.modelStatusToString(model.getModelStatus())}"
        return Claim("nothing", failure=failure)
    values = tuple(variable.varValue for variable in problem.variables())
    # one rank leaves nothing to choose: HiGHS solves a linear program, which has no dual bound of a MIP
    bound_s = info.mip_dual_bound if problem.isMIP() else info.objective_function_value
    outcome: Outcome = "optimal" if status == pulp.LpSolutionOptimal else "found"
    return Claim(outcome, values, float(info.objective_function_value), float(bound_s))


AGAIN = 0.5
LEAST_AGAIN_S = 0.02
"""The second run has this share of the seconds of the first, and at least so many.

Without presolve a program of many layers takes ten times as long; small ones are all decided.
"""
TOLERANCE = 1e-5
"""Part of the size of a row's terms by which it may be violated, as HiGHS's rounded integers do by up to 1e-6."""


@record
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
    claim = _checked(program, run(program.problem, max(time_limit_s, LEAST_TIME_S), gap_fraction))
    took_s = time.monotonic() - begin_s
    left_s = max(time_limit_s - took_s, LEAST_TIME_S)
    if claim.outcome == "nothing":
        if not claim.failure:
            return ""
        again = _checked(program, run(program.problem, left_s, gap_fraction, presolve=False))
        return Checked(True, again.objective_s) if again.values else claim.failure
    if claim.outcome == "found":
        return Checked(True, claim.objective_s)
    if not proves:
        return Checked(bool(claim.values), claim.objective_s)
    again_s = min(left_s, max(LEAST_AGAIN_S, AGAIN * took_s))
    again = _checked(program, run_below(program.problem, claim.bound_s, again_s))
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


SolverName = Literal["HiGHS", "CBC"]
OPTIMUM = 11.0


def solver_trouble(name: SolverName) -> str:
    """The reason why the solver does not find the optimum; empty where it does."""
    try:
        found = _objective(name)
    except Exception as error:  # whatever breaks a solver is the answer
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return "" if found == OPTIMUM else f"finds {found} where the optimum is {OPTIMUM:g}"


def _objective(name: SolverName) -> float | None:
    """Maximise 3x + 2y with x + y ≤ 4, x + 3y ≤ 7 and whole x ≤ 3: 11 at (3, 1)."""
    import pulp

    problem = pulp.LpProblem("self_test", pulp.LpMaximize)
    x, y = (problem.add_variable(letter, 0, most, cat="Integer") for letter, most in (("x", 3), ("y", None)))
    problem += 3 * x + 2 * y
    problem += x + y <= 4
    problem += x + 3 * y <= 7
    problem.solve(_solver(pulp, name))
    value = pulp.value(problem.objective)
    return None if value is None else float(round(value, 6))


def _solver(pulp: Any, name: SolverName) -> Any:
    if name == "HiGHS":
        return pulp.HiGHS(msg=False, threads=1)
    with warnings.catch_warnings():  # PuLP 4 will no longer bring CBC along
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(msg=False, threads=1)
