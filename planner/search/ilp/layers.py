"""Rows 1 to 3 of the integer program: which layers of the model are on which rank, as integers and sums of them.

Two ways to say that layers stay in order, each exact where it is used. Where the model is a few runs of equal layers a
binary says of each rank whether a run is finished there. Where the layers repeat every p (every second slides), the
first n hold ⌊(n + c) / p⌋ of those at place p − 1 − c: the one integer s with (n + c − p + 1) / p ≤ s ≤ (n + c) / p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pulp

from planner.specs.model import LayerKind

Expression = Any
"""A pulp expression, a variable or a number."""

Runs = Sequence[tuple[LayerKind, int]]
"""Maximal runs of equal layers: kind and length."""


MAX_PLACES = 4
"""Counted ones of a pattern that repeats: each is an integer for every virtual stage."""


class Recurring(NamedTuple):
    """A pattern of layers that repeats."""

    period: int
    places: dict[LayerKind, list[int]]
    """Where in the pattern the layers of each kind are, but those of the commonest."""


def recurring(runs: Runs) -> Recurring | None:
    """The pattern that repeats; None where no kind comes back, or too many places are to be counted."""
    layers = [kind for kind, length in runs for _ in range(length)]
    kinds = list(dict.fromkeys(layers))
    period = next((p for p in range(1, len(layers)) if layers[p:] == layers[:-p]), len(layers))
    places = {kind: [place for place in range(period) if layers[place] == kind] for kind in kinds}
    del places[max(kinds, key=lambda kind: len(places[kind]))]
    if len(runs) == len(kinds) or sum(map(len, places.values())) > MAX_PLACES:
        return None
    return Recurring(period, places)


class Rows:
    """A program under construction."""

    problem: Any

    def _variable(self, name: str, most: float | None = None, integer: bool = False) -> Any:
        category = pulp.LpInteger if integer else pulp.LpContinuous
        return self.problem.add_variable(name, lowBound=0, upBound=most, cat=category)

    def _named(self, name: str, expression: Expression) -> Any:
        """A variable equal to `expression`, so that a long sum enters many rows as one term."""
        variable = self._variable(name)
        self.problem += variable == expression, f"is_{name}"
        return variable


class HeldLayers(Rows):
    """Variables and rows of what each rank holds, added to `problem`."""

    first_row: list[Expression]
    """Layers of each rank's first virtual stage."""
    totals: list[Expression]
    """Layers of each rank."""
    by_kind: list[dict[LayerKind, Any]]
    """Layers of each rank by kind, a variable each: they enter every other row."""
    chunk: Any = None
    """Layers of every virtual stage but the first and the last, where stages interleave."""

    def __init__(
        self, problem: Any, runs: Runs, *, pp: int, vpp: int, placement: Sequence[int], empty_ends: bool
    ) -> None:
        self.problem, self.runs = problem, runs
        self.pp, self.vpp, self.placement, self.empty_ends = pp, vpp, placement, empty_ends
        self.num_layers = sum(length for _, length in runs)
        self.kinds = list(dict.fromkeys(kind for kind, _ in runs))
        if vpp > 1:
            self.chunk = self._variable("chunk", self.num_layers, integer=True)
            self.missing = [
                self._variable(f"missing_{end}", self.num_layers, integer=True) for end in ("first", "last")
            ]
            for end in self.missing:
                problem += end <= self.chunk - (0 if empty_ends else 1), f"held_{end.name}"
        special = recurring(runs)
        if special is not None:
            self._add_recurring(special)
        else:
            self._add_runs()
        if vpp == 1:
            for rank, total in enumerate(self.totals):
                empty = empty_ends and rank in (0, pp - 1) and pp > 1
                problem += total >= (0 if empty else 1), f"held_{rank}"

    @property
    def last_row(self) -> list[Expression]:
        """Layers of the last pp virtual stages, where stages interleave."""
        return [self.chunk] * (self.pp - 1) + [self.chunk - self.missing[1]]

    def counts(self) -> tuple[int, ...]:
        """Layers of each virtual stage as the solver chose them."""
        if self.vpp == 1:
            return tuple(map(as_count, self.totals))
        later = [as_count(self.chunk)] * (self.pp * (self.vpp - 1))
        later[-1] -= as_count(self.missing[1])
        return (*map(as_count, self.first_row), *later)

    def _name_kinds(self, rows: Sequence[dict[LayerKind, Expression]]) -> list[dict[LayerKind, Any]]:
        return [
            {
                kind: self._named(f"layers_{rank}_{number}", expression)
                for number, (kind, expression) in enumerate(row.items())
            }
            for rank, row in enumerate(rows)
        ]

    def _add_recurring(self, pattern: Recurring) -> None:
        """`ends[j]` layers lie up to virtual stage j, `found[j]` of them of a kind; the commonest is what is left."""
        num_stages = self.pp * self.vpp
        ends: list[Expression] = [
            (stage + 1) * self.chunk - self.missing[0]
            if self.vpp > 1
            else self._variable(f"filled_{stage}", self.num_layers, integer=True)
            for stage in range(num_stages - 1)
        ]
        if self.vpp > 1:
            self.problem += num_stages * self.chunk - pulp.lpSum(self.missing) == self.num_layers, "layers"
        layers = [_difference([*ends, self.num_layers], stage) for stage in range(num_stages)]
        self.first_row = layers[: self.pp]
        on_rank = [[j for j, rank in enumerate(self.placement) if rank == r] for r in range(self.pp)]
        self.totals = [pulp.lpSum(layers[stage] for stage in stages) for stages in on_rank]
        rows: list[dict[LayerKind, Expression]] = [{} for _ in on_rank]
        for kind, places in pattern.places.items():
            whole = sum(length for held, length in self.runs if held == kind)
            found = [*(self._found(pattern.period, places, stage, end) for stage, end in enumerate(ends)), whole]
            for row, stages in zip(rows, on_rank, strict=True):
                row[kind] = pulp.lpSum(_difference(found, stage) for stage in stages)
        left = [total - pulp.lpSum(row.values()) for row, total in zip(rows, self.totals, strict=True)]
        self.by_kind = self._name_kinds(
            [{kind: row.get(kind, rest) for kind in self.kinds} for row, rest in zip(rows, left, strict=True)]
        )

    def _found(self, period: int, places: Sequence[int], stage: int, end: Expression) -> Expression:
        """Layers at `places` of the pattern among the first `end`."""
        counts = [self._variable(f"recurring_{stage}_{place}", self.num_layers, integer=True) for place in places]
        for place, count in zip(places, counts, strict=True):
            self.problem += period * count <= end + period - 1 - place, f"{count.name}_most"
            self.problem += period * count >= end - place, f"{count.name}_least"
        return pulp.lpSum(counts)

    def _add_runs(self) -> None:
        """`first[r][i]` layers of run i on rank r's first chunk, `rest[r]` of the last run on its others."""
        lengths, pp = [length for _, length in self.runs], self.pp
        num_runs, interleaved = len(lengths), self.vpp > 1
        filled: list[list[Expression]] = []
        for rank in range(pp):
            row: list[Expression] = []
            for run, length in enumerate(lengths):
                complete = rank == pp - 1 and not (interleaved and run == num_runs - 1)
                row.append(length if complete else self._variable(f"filled_{rank}_{run}", length, integer=True))
            filled.append(row)
            for run in range(num_runs - 1 if rank < pp - 1 else 0):
                finished = row[run]  # a run of one layer is finished where it is filled
                if lengths[run] > 1:
                    finished = self._variable(f"finished_{rank}_{run}", 1, integer=True)
                    self.problem += row[run] >= lengths[run] * finished, f"order_{rank}_{run}_full"
                self.problem += row[run + 1] <= lengths[run + 1] * finished, f"order_{rank}_{run}_next"
        first = [[_difference([row[run] for row in filled], rank) for run in range(num_runs)] for rank in range(pp)]
        for rank in range(1, pp):
            for run, count in enumerate(first[rank]):
                self.problem += count >= 0, f"grows_{rank}_{run}"
        self.first_row = [pulp.lpSum(row) for row in first]
        rest = self._add_later_chunks() if interleaved else [0] * pp
        if interleaved:
            self.problem += pulp.lpSum(rest) + filled[-1][-1] == lengths[-1], "layers"
        self.totals = [row + later for row, later in zip(self.first_row, rest, strict=True)]
        rows = []
        for row, later in zip(first, rest, strict=True):
            parts: dict[LayerKind, list[Expression]] = {kind: [] for kind in self.kinds}
            for (kind, _), count in zip(self.runs, row, strict=True):
                parts[kind].append(count)
            parts[self.runs[-1][0]].append(later)
            rows.append({kind: pulp.lpSum(counts) for kind, counts in parts.items()})
        self.by_kind = self._name_kinds(rows)

    def _add_later_chunks(self) -> list[Expression]:
        """Row 3: the first row is of chunks; what each rank's others hold, all of the last run."""
        rest: list[Expression] = []
        for rank in range(self.pp):
            missing = self.missing[0] if rank == 0 else 0
            self.problem += self.first_row[rank] == self.chunk - missing, f"chunk_first_{rank}"
            rest.append((self.vpp - 1) * self.chunk - (self.missing[1] if rank == self.placement[-1] else 0))
        return rest


def _difference(ends: Sequence[Expression], index: int) -> Expression:
    return ends[index] - (ends[index - 1] if index else 0)


def as_count(expression: Expression) -> int:
    """The value of a solved expression."""
    return round(float(pulp.value(expression)))
