"""Rows 1 to 4 of the integer program: the layers of the model on each rank, and those that are recomputed whole.

There are two ways to keep the layers in order, and each is exact for the models that it is used for. If the model is a
few runs of equal layers, a binary variable of each rank is 1 if a run is finished there (`_add_runs`). If the layers
repeat with a period p (for instance, every second one has a sliding window), then among the first n layers there are
⌊(n + c) / p⌋ at place p − 1 − c of the pattern. That is the only integer s with (n + c − p + 1) / p ≤ s ≤ (n + c) / p
(`_add_recurring`).

The pulp problem that they are written to has names and meanings for readers, and types for mypy: pulp has no stubs, so
protocols name the few operations that rows need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from typing import Any, Literal, NamedTuple, Protocol

from planner.record import record
from planner.search.ilp.node import FULL, Node, Recurring, recurring
from planner.specs.model import LayerKind

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


@record
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


class Chunks(NamedTuple):
    """Numbers of layers of interleaved virtual stages: all hold the same number, except for the first and the last.

    Without interleaving all three are 0 and are in no row.
    """

    length: Expression
    """Layers of every virtual stage but the first and the last."""
    missing_first: Expression
    """Number of layers that the first virtual stage holds fewer than `length`."""
    missing_last: Expression
    """Number of layers that the last virtual stage holds fewer than `length`."""


@record
class LayersOnRanks:
    """Layers of each rank, as expressions that the other rows are made of."""

    chunks: Chunks
    first_row: list[Expression]
    """Layers of each rank's first virtual stage."""
    totals: list[Expression]
    """Layers of each rank."""
    by_kind: list[dict[LayerKind, Expression]]
    """Layers of each rank by kind; `add_layers` gives each sum a variable, since it enters many rows."""
    in_flight: list[dict[LayerKind, Expression]]
    """Layers of each rank by kind, each counted once for each micro-batch of its chunk in flight."""

    def on_last_row(self, rank: int) -> Expression:
        """Layers of a rank's last virtual stage, if stages interleave."""
        is_last = rank == len(self.totals) - 1
        return self.chunks.length - self.chunks.missing_last if is_last else self.chunks.length

    def counts(self, node: Node) -> tuple[int, ...]:
        """Layers of each virtual stage as the solver chose them."""
        if node.vpp == 1:
            return tuple(map(count, self.totals))
        inner = [count(self.chunks.length)] * (node.pp * (node.vpp - 2))
        return (*map(count, self.first_row), *inner, *(count(self.on_last_row(rank)) for rank in range(node.pp)))


def add_layers(program: Formulation, node: Node) -> LayersOnRanks:
    """Add rows 1 to 3."""
    chunks = _add_chunks(program, node) if node.vpp > 1 else Chunks(constant(0), constant(0), constant(0))
    pattern = recurring(node.runs)
    sums = _add_recurring(program, node, pattern, chunks) if pattern else _add_runs(program, node, chunks)
    by_kind = [
        {
            kind: program.named("layers", f"layers_{rank}_{number}", f"{kind} layers on rank {rank}", expression)
            for number, (kind, expression) in enumerate(kinds.items())
        }
        for rank, kinds in enumerate(sums.by_kind)
    ]
    if node.vpp == 1:
        for rank, total in enumerate(sums.totals):
            may_be_empty = node.empty_ends and rank in (0, node.pp - 1) and node.pp > 1
            program.add_row("chunks", f"held_{rank}", total >= (0 if may_be_empty else 1))
    return replace(sums, by_kind=by_kind)


def _add_chunks(program: Formulation, node: Node) -> Chunks:
    """Add row 3 for interleaved stages: the first and the last stage may hold fewer layers than a chunk.

    They hold no layer only if the trainer allows that.
    """
    most = node.num_layers
    chunk = program.variable("chunk", "layers of every virtual stage but the first and the last", most, integer=True)
    missing = []
    for end in ("first", "last"):
        meaning = f"layers that the {end} virtual stage holds fewer than a chunk"
        missing_at_end = program.variable(f"missing_{end}", meaning, most, integer=True)
        program.add_row("chunks", f"held_missing_{end}", missing_at_end <= chunk - (0 if node.empty_ends else 1))
        missing.append(missing_at_end)
    return Chunks(chunk, *missing)


def _add_recurring(program: Formulation, node: Node, pattern: Recurring, chunks: Chunks) -> LayersOnRanks:
    """Add rows 1 and 2 for layers that repeat: the end of each virtual stage, and the layers of each kind before it.

    `ends[j]` layers are on the virtual stages 0 … j, and `before[j]` of them are of one kind. The layers that are left
    are of the commonest kind.
    """
    ends: list[Expression] = []
    for stage in range(node.num_stages - 1):
        if node.vpp > 1:
            ends.append((stage + 1) * chunks.length - chunks.missing_first)
        else:
            meaning = f"layers on the virtual stages 0 … {stage}"
            ends.append(program.variable(f"filled_{stage}", meaning, node.num_layers, integer=True))
    if node.vpp > 1:
        missing = add_up((chunks.missing_first, chunks.missing_last))
        program.add_row("layers", "layers", equal(node.num_stages * chunks.length - missing, node.num_layers))
    ends.append(constant(node.num_layers))
    lengths = [_difference(ends, stage) for stage in range(node.num_stages)]
    stages_of = [[j for j, rank in enumerate(node.placement) if rank == r] for r in range(node.pp)]
    totals = [add_up(lengths[stage] for stage in stages) for stages in stages_of]
    weights = [node.in_flight_of(rank) for rank in range(node.pp)]
    kept = [_weighted(weights[rank], [lengths[stage] for stage in stages]) for rank, stages in enumerate(stages_of)]
    counted: list[dict[LayerKind, Expression]] = [{} for _ in stages_of]
    counted_in_flight: list[dict[LayerKind, Expression]] = [{} for _ in stages_of]
    for kind, places in pattern.places.items():
        before = [_add_places(program, node, pattern.period, places, stage, end) for stage, end in enumerate(ends[:-1])]
        before.append(constant(sum(length for run_kind, length in node.runs if run_kind == kind)))
        for rank, stages in enumerate(stages_of):
            of_kind = [_difference(before, stage) for stage in stages]
            counted[rank][kind] = add_up(of_kind)
            counted_in_flight[rank][kind] = _weighted(weights[rank], of_kind)
    by_kind = _with_commonest(node, counted, totals)
    return LayersOnRanks(chunks, lengths[: node.pp], totals, by_kind, _with_commonest(node, counted_in_flight, kept))


def _with_commonest(
    node: Node, counted: Sequence[dict[LayerKind, Expression]], totals: Sequence[Expression]
) -> list[dict[LayerKind, Expression]]:
    """Sums by kind for each rank; the commonest kind is not counted, so it gets the rest of the total."""
    left = [total - add_up(kinds.values()) for kinds, total in zip(counted, totals, strict=True)]
    return [{kind: counted[rank].get(kind, left[rank]) for kind in node.kinds} for rank in range(node.pp)]


def _weighted(weights: Sequence[float], numbers: Sequence[Expression]) -> Expression:
    return add_up(weight * number for weight, number in zip(weights, numbers, strict=True))


def _add_places(
    program: Formulation, node: Node, period: int, places: Sequence[int], stage: int, end: Expression
) -> Expression:
    """Layers at `places` of the pattern on the virtual stages 0 … `stage`, which hold the first `end` layers."""
    counts = []
    for place in places:
        name, meaning = (
            f"recurring_{stage}_{place}",
            f"layers at place {place} of the pattern on the stages 0 … {stage}",
        )
        number = program.variable(name, meaning, node.num_layers, integer=True)
        program.add_row("order", f"{name}_most", period * number <= end + period - 1 - place)
        program.add_row("order", f"{name}_least", period * number >= end - place)
        counts.append(number)
    return add_up(counts)


def _add_runs(program: Formulation, node: Node, chunks: Chunks) -> LayersOnRanks:
    """Add rows 1 and 2 for runs of equal layers: each rank's first chunk and, if stages interleave, its later ones."""
    lengths = [length for _, length in node.runs]
    filled = _add_filled(program, node, lengths)
    first = [
        [_difference([up_to[run] for up_to in filled], rank) for run in range(len(lengths))] for rank in range(node.pp)
    ]
    for rank in range(1, node.pp):
        for run, number in enumerate(first[rank]):
            program.add_row("layers", f"grows_{rank}_{run}", number >= 0)
    first_row = [add_up(numbers) for numbers in first]
    later = [constant(0)] * node.pp
    if node.vpp > 1:
        later = _add_later_chunks(program, node, chunks, first_row)
        program.add_row("layers", "layers", equal(add_up(later) + filled[-1][-1], lengths[-1]))
    totals = [row + rest for row, rest in zip(first_row, later, strict=True)]
    by_kind, in_flight = [], []
    for rank, (numbers, rest) in enumerate(zip(first, later, strict=True)):
        by_kind.append(_of_runs(node, numbers, rest))
        first_weight, *weights = node.in_flight_of(rank)
        rest_in_flight = sum(weights) * chunks.length
        if weights and rank == node.placement[-1]:
            rest_in_flight = rest_in_flight - weights[-1] * chunks.missing_last
        in_flight.append(_of_runs(node, [first_weight * number for number in numbers], rest_in_flight))
    return LayersOnRanks(chunks, first_row, totals, by_kind, in_flight)


def _of_runs(node: Node, numbers: Sequence[Expression], rest: Expression) -> dict[LayerKind, Expression]:
    """Layers by kind: `numbers` layers of each run on the first chunk, `rest` layers of the last run on later ones."""
    parts: dict[LayerKind, list[Expression]] = {kind: [] for kind in node.kinds}
    for (kind, _), number in zip(node.runs, numbers, strict=True):
        parts[kind].append(number)
    parts[node.runs[-1][0]].append(rest)
    return {kind: add_up(numbers) for kind, numbers in parts.items()}


def _add_filled(program: Formulation, node: Node, lengths: Sequence[int]) -> list[list[Expression]]:
    """Layers `filled[r][i]` of run i on the first-row stages 0 … r; a run begins once the run before is finished."""
    last_rank, last_run = node.pp - 1, len(lengths) - 1
    filled: list[list[Expression]] = []
    for rank in range(node.pp):
        row: list[Expression] = []
        for run, length in enumerate(lengths):
            if rank == last_rank and not (node.vpp > 1 and run == last_run):
                row.append(constant(length))
            else:
                meaning = f"layers of run {run} on the first-row stages 0 … {rank}"
                row.append(program.variable(f"filled_{rank}_{run}", meaning, length, integer=True))
        filled.append(row)
        for run in range(last_run if rank < last_rank else 0):
            finished = row[run]  # a run of one layer is finished where it is filled
            if lengths[run] > 1:
                meaning = f"1 if run {run} is finished on the first-row stages 0 … {rank}"
                finished = program.variable(f"finished_{rank}_{run}", meaning, 1, integer=True)
                program.add_row("order", f"order_{rank}_{run}_full", row[run] >= lengths[run] * finished)
            program.add_row("order", f"order_{rank}_{run}_next", row[run + 1] <= lengths[run + 1] * finished)
    return filled


def _add_later_chunks(
    program: Formulation, node: Node, chunks: Chunks, first_row: Sequence[Expression]
) -> list[Expression]:
    """Add row 3 for the first row of stages, and return the layers of each rank's later chunks.

    All layers of the later chunks are of the last run.
    """
    later: list[Expression] = []
    for rank in range(node.pp):
        missing = chunks.missing_first if rank == 0 else constant(0)
        program.add_row("chunks", f"chunk_first_{rank}", equal(first_row[rank], chunks.length - missing))
        later_chunks = (node.vpp - 1) * chunks.length
        later.append(later_chunks - (chunks.missing_last if rank == node.placement[-1] else 0))
    return later


def _difference(ends: Sequence[Expression], index: int) -> Expression:
    return ends[index] - (ends[index - 1] if index else 0)


@record
class RecomputedLayers:
    """Layers that are recomputed whole, as expressions."""

    by_kind: list[dict[LayerKind, Expression]]
    """Layers of each rank by kind."""
    settings: list[dict[LayerKind, Expression]]
    """The numbers that the trainer is told for each rank and kind; with `one_count` they are for one virtual stage."""


def add_recompute(program: Formulation, node: Node, layers: LayersOnRanks) -> RecomputedLayers:
    """Add row 4: the layers of each kind on each rank that are recomputed whole, at most those that it holds."""
    if node.whole == "all":
        return RecomputedLayers(layers.by_kind, layers.by_kind)
    if node.whole == "none":
        none = [dict.fromkeys(node.kinds, constant(0)) for _ in layers.by_kind]
        return RecomputedLayers(none, none)
    settings: list[dict[LayerKind, Expression]] = []
    if node.whole == "one_count":
        meaning = "layers of every virtual stage that are recomputed whole"
        common = program.variable("recomputed", meaning, node.num_layers, integer=True)
        settings = [dict.fromkeys(node.kinds, common) for _ in layers.by_kind]
        by_kind = [dict.fromkeys(node.kinds, node.vpp * common) for _ in layers.by_kind]
    else:
        for rank in range(node.pp):
            settings.append({})
            for number, kind in enumerate(node.kinds):
                meaning = f"{kind} layers on rank {rank} that are recomputed whole"
                name = f"recomputed_{rank}_{number}"
                settings[rank][kind] = program.variable(name, meaning, node.num_layers, integer=True)
        by_kind = settings
    for rank, kinds in enumerate(layers.by_kind):
        for number, (kind, on_rank) in enumerate(kinds.items()):
            program.add_row("recompute", f"recompute_{rank}_{number}", by_kind[rank][kind] <= on_rank)
    return RecomputedLayers(by_kind, settings)


@record
class RankSums:
    """Sums over what each rank holds, in seconds or bytes, linear in its layers; a slow rank's seconds are longer.

    A quantity is named as a field or property of `PartCost`, such as `forward_total_s`.
    """

    node: Node
    layers: LayersOnRanks
    recomputed: RecomputedLayers

    def total(self, rank: int, quantity: str) -> Expression:
        """A quantity of all that a rank holds."""
        return self.of_layers(rank, quantity) + self.of_ends(rank, quantity)

    def of_layers(self, rank: int, quantity: str) -> Expression:
        """A quantity of the layers on a rank, each in its recompute mode."""
        node, slowness = self.node, self.node.slowness(rank, quantity)
        terms = []
        for kind, number in self.layers.by_kind[rank].items():
            plain = slowness * float(getattr(node.layers[kind, node.base], quantity))
            terms.append(scaled(plain, number))
            if node.whole != "none":
                full = slowness * float(getattr(node.layers[kind, FULL], quantity))
                terms.append((full - plain) * self.recomputed.by_kind[rank][kind])
        return add_up(terms)

    def in_flight_bytes(self, rank: int) -> Expression:
        """Bytes that the layers of an interleaved rank keep, each for its chunk's micro-batches in flight.

        Recomputed layers are one number per chunk (one_count), or are spread evenly over the chunks (per_stage). In the
        second case each chunk with more than the mean in flight is taken to have one more of them.
        """
        node, weights = self.node, self.node.in_flight_of(rank)
        mean = sum(weights) / len(weights)
        uneven = 0.0 if node.whole == "one_count" else sum(max(weight - mean, 0.0) for weight in weights)
        terms = []
        for kind, number in self.layers.in_flight[rank].items():
            plain = float(node.layers[kind, node.modes[0]].live_bytes)
            terms.append(plain * number)
            if node.whole in ("one_count", "per_stage"):
                saved = plain - float(node.layers[kind, FULL].live_bytes)
                terms.append(-saved * (mean * self.recomputed.by_kind[rank][kind] + uneven))
        return add_up(terms)

    def of_ends(self, rank: int, quantity: str, *, first_row: bool = True, last_row: bool = True) -> float:
        """A quantity of the embedding and the head that a rank holds.

        The embedding is on a stage of the first row of virtual stages, the head on a stage of the last row. Either row
        can be left out.
        """
        node, parts = self.node, []
        if rank == 0 and first_row:
            parts.append(node.embedding)
        if rank == node.placement[-1] and last_row:
            parts.append(node.head)
        return node.slowness(rank, quantity) * sum(float(getattr(part, quantity)) for part in parts)

    def per_layer(self, rank: int, quantity: str) -> list[float]:
        """A quantity of one layer on a rank, for each kind and each recompute mode that the layer may be in."""
        node, slowness = self.node, self.node.slowness(rank, quantity)
        return [
            slowness * float(getattr(node.layers[kind, mode], quantity)) for kind in node.kinds for mode in node.modes
        ]
