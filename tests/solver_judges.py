"""One node solved by HiGHS, by CBC and by brute force, and whether they agree."""

import math
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any

import pulp
from brute_force import brute_force_s

from planner.errors import SolverError
from planner.search.ilp import solver
from planner.search.ilp.node import Node
from planner.search.ilp.program import build, solve
from planner.search.ilp.solver import Claim, violated_row

AGREE = 2e-5
"""Part of a step, and seconds, by which two optima may differ: each solver lets a row be violated by 1e-6."""


@dataclass
class Judged:
    """The optima of a node in seconds; ∞ where nothing fits."""

    highs_s: float
    """HiGHS's first answer, unchecked; NaN if it has none."""
    checked_s: float
    """The answer that the search gets; NaN if it gets none."""
    bound_s: float
    """The bound that the search gets, 0 if it is not confirmed; ∞ if nothing fits."""
    cbc_s: float
    """NaN if CBC has no proven optimum in its time."""
    cbc_found_s: float
    """The step of the best split that CBC found; ∞ without any."""
    brute_s: float | None
    """None where there are too many splits."""
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Say who is wrong."""
        if self.brute_s is not None and not same(self.checked_s, self.brute_s):
            self.wrong.append("checked against brute force")
        if self.brute_s is not None and not same(self.highs_s, self.brute_s):
            self.wrong.append("HiGHS against brute force")
        if self.brute_s is not None and not math.isnan(self.cbc_s) and not same(self.cbc_s, self.brute_s):
            self.wrong.append("CBC against brute force")
        if not math.isnan(self.cbc_s) and not same(self.highs_s, self.cbc_s):
            self.wrong.append("HiGHS against CBC")
        if not math.isnan(self.cbc_s) and not same(self.checked_s, self.cbc_s):
            self.wrong.append("checked against CBC")
        least_s = self.cbc_found_s if self.brute_s is None else self.brute_s
        if self.bound_s > least_s + AGREE * (1 + least_s):
            self.wrong.append("bound above an optimum")


def same(one_s: float, other_s: float) -> bool:
    """True if both are the same number of seconds, or both ∞."""
    return one_s == other_s or abs(one_s - other_s) <= AGREE * (1 + abs(other_s))


def judged(node: Node, small: bool, time_limit_s: float = 60.0, cbc_limit_s: float = 5.0) -> Judged:
    """Solve a node by all of them; HiGHS's first answer is heard on its way to be checked."""
    heard: list[Claim] = []

    def run(*arguments: Any, **named: Any) -> Claim:
        heard.append(honest(*arguments, **named))
        return heard[-1]

    honest = solver.run
    try:
        solver.run = run
        solution = solve(node, time_limit_s)
        checked_s = math.inf if solution is None else solution.objective_s
        bound_s = math.inf if solution is None else solution.bound_s
    except SolverError:
        checked_s, bound_s = math.nan, 0.0
    finally:
        solver.run = honest
    highs_s = {"optimal": heard[0].objective_s, "infeasible": math.inf}.get(heard[0].outcome, math.nan)
    cbc_s, cbc_found_s = cbc_optimum_s(node, cbc_limit_s)
    return Judged(highs_s, checked_s, bound_s, cbc_s, cbc_found_s, brute_force_s(node) if small else None)


def cbc_optimum_s(node: Node, time_limit_s: float) -> tuple[float, float]:
    """CBC's optimum of the node (∞: nothing fits, NaN: no proof in time), and the best split that it found."""
    program = build(node)
    with tempfile.TemporaryDirectory() as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # until pulp 4, which takes CBC away
            cbc = pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_s, gapRel=node.gap_fraction, threads=1)
        cbc.tmpDir = folder
        program.formulation.problem.solve(cbc)
    status = program.formulation.problem.sol_status
    if status == pulp.LpSolutionInfeasible:
        return math.inf, math.inf
    for variable in program.formulation.variables:
        if variable.cat == pulp.LpInteger and variable.varValue is not None:
            variable.varValue = float(round(variable.varValue))
    if violated_row(program.formulation) is not None:
        return math.nan, math.inf
    found_s = float(pulp.value(program.formulation.problem.objective))
    return found_s if status == pulp.LpSolutionOptimal else math.nan, found_s
