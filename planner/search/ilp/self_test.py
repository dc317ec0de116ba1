"""A tiny integer program whose optimum is known, to tell if a solver works on this machine."""

from __future__ import annotations

import warnings
from typing import Any, Literal

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
