"""The integer program of one shape: it chooses the number of layers on each rank, and of those that are recomputed.

Ranks r = 0 … pp − 1, virtual stages j = chunk·pp + r; the first row of virtual stages is j = r. Maximal runs of equal
layers are numbered i, kinds κ. t, f, b are seconds of one micro-batch (forward plus backward, forward, backward;
exchanges included), M micro-batches, c seconds of a transfer.

    filled[r,i] ∈ ℕ      layers of run i on the first-row stages 0 … r (or, of a kind that recurs, on the stages 0 … j)
    chunk ∈ ℕ            layers of every virtual stage (interleaving only); the end stages have missing[end] ∈ ℕ fewer
    recomputed[r,κ] ∈ ℕ  layers of kind κ on rank r that are recomputed whole
    T, gradients, parameters, optimizer ≥ 0

    minimise T + gradients + parameters + optimizer
    1. layers     filled grows with r and reaches each run's length; the last run also fills the later chunks
                  → layers.add_layers
    2. order      run i + 1 starts on or after the stage that finishes run i (binary finished[r,i])
                  → layers._add_filled; layers that recur: layers._add_places
    3. chunks     no stage is empty, unless it holds the embedding or the head and the trainer allows that; interleaved
                  stages are equal, but for the first and the last: the order stalls on unequal ones
                  → layers._add_chunks, layers._add_later_chunks
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

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import SolverError
from planner.search.ilp.formulation import Expression, Formulation, count, value
from planner.search.ilp.layers import LayersOnRanks, add_layers
from planner.search.ilp.node import Node, Solution
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
