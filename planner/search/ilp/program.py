"""The integer program of one shape: it chooses the number of layers on each rank, and of those that are recomputed.

Ranks r = 0 … pp − 1, virtual stages j = chunk·pp + r; the first row of virtual stages is j = r. Maximal runs of equal
layers are numbered i, kinds κ. t, f, b are seconds of one micro-batch (forward plus backward, forward, backward;
exchanges included), M micro-batches, c seconds of a transfer.

    filled[r,i] ∈ ℕ      layers of run i on the first-row stages 0 … r (or, of a kind that recurs, on the stages 0 … j)
    chunk ∈ ℕ            layers of every virtual stage (interleaving only); the end stages have missing[end] ∈ ℕ fewer
    recomputed[r,κ] ∈ ℕ  layers of kind κ on rank r that are recomputed whole
    T, gradients, parameters, optimizer ≥ 0

    minimise T + gradients + parameters + optimizer     the objective: seconds of a step
    1. layers     filled grows with r and reaches each run's length; the last run also fills the later chunks
                  → formulation.add_layers
    2. order      run i + 1 starts on or after the stage that finishes run i (binary finished[r,i])
                  → formulation._add_filled; layers that recur: formulation._add_places
    3. chunks     no stage is empty, unless it holds the embedding or the head and the trainer allows that; interleaved
                  stages are equal, but for the first and the last: the order stalls on unequal ones
                  → formulation._add_chunks, formulation._add_later_chunks
    4. recompute  recomputed[r,κ] ≤ layers of κ on r; one number for all if the trainer has one setting
                  → rows.add_recompute
    5. time       T ≥ every lower bound of the schedule on every rank (any order; at most k in flight)
                  → rows.add_time
    6. memory     static + in flight · live + transient ≤ usable on every rank
                  → rows.add_memory
    7. ends       gradients, parameters: any rank's exchange less the seconds that hide it, and less a chunk's pass of
                  each rank before it; optimizer: any rank's
                  → rows.add_ends

`describe` prints the program of a node with its numbers.

Sources: PHYSICS §5 for the bounds (Narayanan et al. 2021 for the orders). For 1F1B the bounds are equal to the replay
if stages differ little, so the optimum is a certificate. The gap to the replay is always reported.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import SolverError
from planner.layout.candidate import Candidate
from planner.schedule.orders import Bound
from planner.search.ilp.formulation import (
    Expression,
    Formulation,
    Group,
    LayersOnRanks,
    Row,
    Variable,
    add_layers,
    count,
    value,
)
from planner.search.ilp.node import Node, RecomputeChoice, Solution, node_of, recurring, split_of
from planner.search.ilp.rows import RankSums, RecomputedLayers, add_ends, add_memory, add_recompute, add_time
from planner.search.ilp.solver import LEAST_TIME_S, Checked, solved
from planner.specs.units import GIB


class SolverFailed(SolverError):
    """The solver gave no answer that holds, though time was left; other programs may still be solved."""


@dataclass(frozen=True, slots=True)
class Program:
    """The integer program of a node, and the expressions that its solution is read from."""

    node: Node
    formulation: Formulation
    layers: LayersOnRanks
    recomputed: RecomputedLayers
    needed_bytes: list[Expression]
    """Bytes that each rank needs, with the least transient bytes it can have."""

    @property
    def problem(self) -> Any:
        """The pulp problem."""
        return self.formulation.problem


def build(node: Node) -> Program:
    """Write the integer program of a node."""
    formulation = Formulation()
    layers = add_layers(formulation, node)
    recomputed = add_recompute(formulation, node, layers)
    sums = RankSums(node, layers, recomputed)
    pipeline_s = add_time(formulation, sums)
    needed_bytes = add_memory(formulation, sums)
    outside_s = add_ends(formulation, sums)
    formulation.minimise(pipeline_s + outside_s)
    return Program(node, formulation, layers, recomputed, needed_bytes)


def solve(node: Node, time_limit_s: float, proves: bool = True) -> Solution | None:
    """Solve the integer program of a node; None if no split fits and is faster than the cutoff.

    The answer is checked, and its bound and None are confirmed by a second run unless nothing is to be proven by them
    (`checked`). Raises SolverFailed if the solver gives no answer that holds, SolverError if time is up.
    """
    begin_s = time.monotonic()
    program = build(node)
    left_s = time_limit_s - (time.monotonic() - begin_s)
    answer = solved(program.formulation, left_s, node.gap_fraction, proves)
    if isinstance(answer, Checked):
        return _read(program, answer) if answer.has_split else None
    if answer:
        raise SolverFailed(
            f"the solver failed on a program over {node.pp} stages: {answer}",
            "pin axes, such as --pp or --recompute, so that it is asked for other programs",
        )
    raise SolverError(
        f"the solver found no split over {node.pp} stages in the {max(left_s, LEAST_TIME_S):.3g} s that were left",
        "raise --time-limit, or pin axes to shrink the search",
    )


def _read(program: Program, answer: Checked) -> Solution:
    """The split that the values of the variables say."""
    node = program.node
    return Solution(
        counts=program.layers.counts(node),
        recomputed=tuple(tuple(map(count, kinds.values())) for kinds in program.recomputed.settings),
        objective_s=answer.objective_s,
        bound_s=answer.bound_s,
        free_bytes=tuple(float(node.usable_bytes) - value(needed) for needed in program.needed_bytes),
    )


LEAST_SHORT_BYTES = 0.25 * GIB
"""Bytes left free beyond those that the last program saw left, so that few programs are enough."""


MAX_TRIES = 4
"""Most splits of a node that are looked for; each leaves more bytes free on the ranks that were too full."""


def shorter(short_bytes: Sequence[float], excess: Sequence[float], free_bytes: Sequence[float]) -> list[float]:
    """Bytes that the program must leave free on each rank.

    The last program saw `free_bytes` left on each rank, but its split exceeds the exact memory by `excess`. A rank that
    exceeds it must leave so much more free that it cannot hold the same layers again.
    """
    known = short_bytes or [0.0] * len(excess)
    return [
        short + (free + LEAST_SHORT_BYTES) * (more > 0)
        for short, more, free in zip(known, excess, free_bytes, strict=True)
    ]


def splits_tried(
    start: Candidate, choice: RecomputeChoice, solver: Callable[[Node], Solution | None], cutoff_s: float = math.inf
) -> Iterator[tuple[Solution | None, Candidate | None]]:
    """A solver's answers for a candidate's shape, each with its split, until one fits or there is none.

    Each leaves more bytes free on the ranks that the exact memory of the last showed to be too full.
    """
    short_bytes: list[float] = []
    for _ in range(MAX_TRIES):
        node = node_of(
            start.pricing, start.table, choice, start.schedule, short_bytes, cutoff_s, rank_factors=start.rank_factors
        )
        solution = solver(node)
        if solution is None or not solution.counts:
            yield solution, None
            return
        split = split_of(start.pricing, node, solution)
        candidate = start.with_split(replace(split, mtp_stage=start.split.mtp_stage))
        yield solution, candidate
        if candidate.fits:
            return
        short_bytes = shorter(short_bytes, candidate.excess_bytes, solution.free_bytes)


WIDTH = 120
_SIGNS = {-1: "≤", 0: "=", 1: "≥"}

_GROUPS: dict[Group, str] = {
    "layers": "1. layers: every layer is on one stage",
    "order": "2. order: a layer comes after the layers before it",
    "chunks": "3. chunks: only end stages may be empty; interleaved stages are equal, but for the first and the last",
    "recompute": "4. recompute: no more layers are recomputed whole than the rank holds",
    "time": "5. time, in seconds: T is at least every lower bound of the schedule on every rank",
    "memory": "6. memory, in GiB: every rank's static + in flight · live + transient bytes are at most what it can use",
    "ends": "7. ends, in seconds: exchanges that nothing hides, and the optimizer, of the rank where they take longest",
}

_BOUNDS: dict[Bound, str] = {
    "one_f_one_b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "any_order": "any order of passes",
    "split_backward": "any order of passes, with weight gradients apart",
}


def describe(node: Node, max_rows: int | None = None) -> str:
    """The integer program of a node with its numbers, in the groups of the docstring of `program`.

    A row is a line `name: 0.0123·filled_0_0 + … ≤ 76.2`, which is wrapped if it is long; numbers have six digits. With
    `max_rows` the list of variables and each group of rows end after that number of them.
    """
    program = build(node).formulation
    sections = [
        ("shape", list(_shape(node))),
        ("variables", _shortened(_variables(program), max_rows)),
        ("minimise the seconds of a step", [f"  {_sum(program.problem.objective.items())}"]),
    ]
    for group, title in _GROUPS.items():
        rows = [_row(row) for row in program.rows if program.groups[row.name] == group]
        sections.append((title, _shortened(rows, max_rows) if rows else ["  no rows"]))
    return "\n\n".join("\n".join((title, *lines)) for title, lines in sections) + "\n"


def _shape(node: Node) -> Iterator[str]:
    """Lines with the numbers of the node that several rows share."""
    yield _wrapped(f"{node.num_layers} layers: {_layers(node)}")
    stages = "1 stage" if node.vpp == 1 else f"{node.vpp} virtual stages"
    yield f"  {node.pp} ranks with {stages} each, {node.num_microbatches} micro-batches"
    yield f"  rows of time hold for {_BOUNDS[node.bound]}; a transfer takes {_number(float(node.p2p_s))} s"
    yield f"  recompute mode of a layer: {' or '.join(node.modes)}"
    in_flight = ", ".join(map(_number, node.in_flight))
    yield f"  a rank can use {_number(float(node.usable_bytes) / GIB)} GiB"
    yield _wrapped(f"micro-batches in flight where a rank holds most, ranks 0 … {node.pp - 1}: {in_flight}")


def _layers(node: Node) -> str:
    """The model's layers in order: as a pattern that repeats, or as runs of equal layers."""
    pattern = recurring(node.runs)
    if pattern is None:
        return ", ".join(f"run {number}: {length} {kind}" for number, (kind, length) in enumerate(node.runs))
    layers = [kind for kind, length in node.runs for _ in range(length)]
    return f"places 0 … {pattern.period - 1} of a pattern that repeats: {', '.join(map(str, layers[: pattern.period]))}"


def _variables(program: Formulation) -> list[str]:
    """Name, range and meaning of every variable, in columns."""
    cells = [(variable.name, _range(variable), program.meanings[variable.name]) for variable in program.variables]
    name_width, range_width = (max(len(cell[column]) for cell in cells) for column in (0, 1))
    return [f"  {name:<{name_width}}  {limits:<{range_width}}  {meaning}" for name, limits, meaning in cells]


def _range(variable: Variable) -> str:
    """The values that a variable may take."""
    least, most = variable.lowBound, variable.upBound
    if (variable.cat, least, most) == ("Integer", 0, 1):
        return "0 or 1"
    limits = "any number"
    if least is not None:
        limits = f"≥ {_number(least)}" if most is None else f"{_number(least)} … {_number(most)}"
    return f"whole, {limits}" if variable.cat == "Integer" else limits


def _row(row: Row) -> str:
    """A row as a line: variables on the left, the constant on the right; a definition as `variable = sum`."""
    terms = list(row.items())
    if row.name.startswith("is_"):
        (variable, _), *others = terms
        line = f"{row.name}: {variable.name} = {_sum([(other, -c) for other, c in others], -row.constant)}"
    else:
        line = f"{row.name}: {_sum(terms)} {_SIGNS[row.sense]} {_number(-row.constant)}"
    return _wrapped(line)


def _wrapped(line: str) -> str:
    """A line of a section; if it is too long, the lines after the first are indented further."""
    return textwrap.fill(
        line, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )


def _sum(terms: Iterable[tuple[Variable, float]], constant: float = 0.0) -> str:
    """A sum as text, such as `2·x − 0.5·y + 3`; terms with the coefficient 0 are left out."""
    parts = [(c, variable.name if abs(c) == 1 else f"{_number(abs(c))}·{variable.name}") for variable, c in terms if c]
    if constant or not parts:
        parts.append((constant, _number(abs(constant))))
    (first, text), *others = parts
    return ("−" if first < 0 else "") + text + "".join(f" {'−' if c < 0 else '+'} {part}" for c, part in others)


def _number(value: float) -> str:
    return f"{value:.6g}".replace("-", "−") if value else "0"


def _shortened(lines: Sequence[str], most: int | None) -> list[str]:
    """The first `most` lines, and a line with the number of those left out."""
    if most is None or len(lines) <= most:
        return list(lines)
    return [*lines[:most], f"  … and {len(lines) - most} more"]
