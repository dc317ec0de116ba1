"""Asks HiGHS for the answer to an integer program. The answer is a claim, which `checked` holds against the rows.

A claim about all splits, "none is faster than this" or "none fits", cannot be read off a split. So HiGHS is asked a
second time, without its presolve: is there a faster one? Presolve rewrites the program before anything is solved, and
is where HiGHS 1.15.1 went wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True)
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
