"""The pulp problem under construction, with types for mypy and with names and meanings for readers.

pulp has no type stubs. The protocols below name the few operations that rows are written with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

INTEGER, CONTINUOUS = "Integer", "Continuous"
"""The kinds of variables, as pulp spells them."""


class Expression(Protocol):
    """A linear expression: a variable, a sum of variables with coefficients, or a constant."""

    def __add__(self, other: Expression | float, /) -> Expression: ...
    def __radd__(self, other: Expression | float, /) -> Expression: ...
    def __sub__(self, other: Expression | float, /) -> Expression: ...
    def __rsub__(self, other: Expression | float, /) -> Expression: ...
    def __mul__(self, other: float, /) -> Expression: ...
    def __rmul__(self, other: float, /) -> Expression: ...
    def __le__(self, other: Expression | float, /) -> Row: ...
    def __ge__(self, other: Expression | float, /) -> Row: ...


class Variable(Expression, Protocol):
    """A variable of the program."""

    name: str
    lowBound: float | None  # noqa: N815 (pulp's spelling)
    upBound: float | None  # noqa: N815
    cat: str


class Row(Protocol):
    """A constraint: a sum of variables with coefficients, plus a constant, is ≤, = or ≥ 0."""

    name: str
    constant: float
    sense: int
    """−1: at most 0, 0: equal to 0, 1: at least 0."""

    def items(self) -> Iterable[tuple[Variable, float]]: ...


Group = Literal["layers", "order", "chunks", "recompute", "time", "memory", "ends"]
"""Groups of rows, as the module docstring of `program` numbers them."""


def _empty_problem() -> Any:
    import pulp  # which loads the solver, and takes longer than many an answer: only where a program is written

    return pulp.LpProblem("split", pulp.LpMinimize)


@dataclass(frozen=True, slots=True)
class Formulation:
    """The variables and rows of one integer program, and what they mean."""

    problem: Any = field(default_factory=_empty_problem)
    meanings: dict[str, str] = field(default_factory=dict)
    """The quantity that each variable counts or measures, by the variable's name."""
    groups: dict[str, Group] = field(default_factory=dict)
    """The group of each row, by the row's name."""

    def variable(
        self, name: str, meaning: str, most: float | None = None, *, integer: bool = False, least: float | None = 0
    ) -> Expression:
        """A new variable between `least` and `most` (None: without limit)."""
        self.meanings[name] = meaning
        category = INTEGER if integer else CONTINUOUS
        variable: Expression = self.problem.add_variable(name, lowBound=least, upBound=most, cat=category)
        return variable

    def named(
        self, group: Group, name: str, meaning: str, expression: Expression, *, least: float | None = 0
    ) -> Expression:
        """A variable equal to `expression`, so that a long sum enters many rows as one term.

        Its own row is called `is_` and the name. An expression that may be negative needs `least=None`.
        """
        variable = self.variable(name, meaning, least=least)
        self.add_row(group, f"is_{name}", equal(variable, expression))
        return variable

    def add_row(self, group: Group, name: str, row: Row) -> None:
        """Demand that `row` holds."""
        self.groups[name] = group
        self.problem.addConstraint(row, name)

    def minimise(self, expression: Expression) -> None:
        """Make `expression` the objective."""
        self.problem.setObjective(expression)

    @property
    def variables(self) -> list[Variable]:
        """All variables, in the order in which they were made."""
        order = {name: number for number, name in enumerate(self.meanings)}
        return sorted(self.problem.variables(), key=lambda variable: order[variable.name])

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which they were added."""
        return list(self.problem.constraints())


def constant(value: float) -> Expression:
    """A number as an expression."""
    import pulp

    expression: Expression = pulp.LpAffineExpression(constant=value)
    return expression


def scaled(coefficient: float, variable: Expression) -> Expression:
    """`coefficient` times a variable; the variable stays in the expression even if the coefficient is 0."""
    import pulp

    expression: Expression = pulp.LpAffineExpression([(variable, coefficient)])
    return expression


def equal(left: Expression, right: Expression | float) -> Row:
    """The row that says that both sides are equal."""
    row: Row = left == right  # type: ignore[assignment]  # pulp's == makes a row
    return row


def add_up(expressions: Iterable[Expression]) -> Expression:
    """The sum of `expressions`."""
    import pulp

    total: Expression = pulp.lpSum(expressions)
    return total


def value(expression: Expression) -> float:
    """The value of an expression after the solver has run."""
    import pulp

    return float(pulp.value(expression))


def count(expression: Expression) -> int:
    """The value of an expression of whole numbers after the solver has run."""
    return round(value(expression))
