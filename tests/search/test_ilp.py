"""The integer program against brute force: every split and recompute count, under the same rows written out here."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby, product

import pytest
from brute_force import Candidate, brute_force_s, candidates, fits, pipeline_s, step_s
from solver_nodes import DENSE, interleaved_node, random_node, recurring_node

from planner.physics.cost import PartCost
from planner.search.ilp.node import Node, Solution, recurring
from planner.search.ilp.program import solve
from planner.specs.model import LayerKind
from planner.specs.units import GIB

TIME_LIMIT_S = 1e6


def chosen(node: Node, solution: Solution) -> Candidate:
    """The solver's answer among all candidates; it is there exactly once."""
    kinds = list(dict.fromkeys(kind for kind, _ in node.runs))
    equal = [
        candidate
        for candidate in candidates(node)
        if candidate.counts == solution.counts
        and solution.recomputed == tuple(tuple(rank[kind] for kind in kinds) for rank in candidate.recomputed)
    ]
    assert len(equal) == 1
    return equal[0]


def check_optimum(node: Node) -> bool:
    """Whether anything fits; the solver finds it, and nothing is faster."""
    best, solution = brute_force_s(node), solve(node, TIME_LIMIT_S)
    if solution is None:
        assert math.isinf(best)
        return False
    answer = chosen(node, solution)
    assert fits(node, answer)
    assert step_s(node, answer) == pytest.approx(best, rel=1e-6)
    assert solution.bound_s <= best * (1 + 1e-6)
    assert solution.bound_s == pytest.approx(best, rel=1e-5)
    return True


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_splits_and_recompute_counts_are_the_best_there_are(first: int) -> None:
    feasible = [check_optimum(random_node(seed)) for seed in range(first, first + 20)]
    assert sum(feasible) > 8


def test_the_random_shapes_are_of_all_sorts() -> None:
    nodes = [random_node(seed) for seed in range(160)]
    assert {(node.whole, len(node.runs), node.empty_ends) for node in nodes} >= set(
        product(("none", "all", "per_stage"), (1, 2), (False, True))
    ) | {("one_count", 1, False), ("one_count", 1, True)}
    assert {math.isinf(brute_force_s(node)) for node in nodes} == {True, False}


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_a_kind_that_recurs_is_split_as_any_other(first: int) -> None:
    nodes = [recurring_node(seed) for seed in range(first, first + 20)]
    feasible = [check_optimum(node) for node in nodes]
    assert any(feasible)
    assert sum(recurring(node.runs) is not None for node in nodes) > 10


PATTERNS = {"FSFSFS": 2, "SFSFS": 2, "SSSSSFSSSSSF": 6, "SSSSSFSSS": 6, "SSFSSFS": 3, "FSSFSSF": 3, "SFFS": 3}
PATTERNS |= {"FFFSSSFFF": 6, "SSFSF": 5, "FSSSFSF": 6, "FSFMFSFMF": 4, "SFSMSFSM": 4, "FSMFSM": 3}
NONE = ["SSSS", "FFFSSS", "FSM", "SFSSFFSFSFF"]


@pytest.mark.parametrize("pattern", [*PATTERNS, *NONE])
def test_what_recurs_is_counted_by_a_floor(pattern: str) -> None:
    kinds = {"F": LayerKind("full", "dense"), "S": LayerKind("sliding", "dense"), "M": LayerKind("full", "moe")}
    repeated = recurring([(kinds[kind], len(list(same))) for kind, same in groupby(pattern)])
    assert (None if repeated is None else repeated.period) == PATTERNS.get(pattern)
    if repeated is None:
        return
    assert len(repeated.places) == len(set(pattern)) - 1
    for number, (kind, places) in product(range(len(pattern) + 1), repeated.places.items()):
        count = [kinds[kind] for kind in pattern[:number]].count(kind)
        assert count == sum((number + repeated.period - 1 - place) // repeated.period for place in places)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_interleaved_chunks_are_equal_and_the_best_there_are(first: int) -> None:
    feasible = [check_optimum(interleaved_node(seed)) for seed in range(first, first + 20)]
    assert any(feasible)


@pytest.mark.parametrize("seed", range(40))
def test_nothing_slower_than_the_cutoff_is_answered(seed: int) -> None:
    node = random_node(seed)
    solution = solve(node, TIME_LIMIT_S)
    if solution is None:
        return
    pipeline = pipeline_s(node, chosen(node, solution))
    fastest = min(pipeline_s(node, candidate) for candidate in candidates(node) if fits(node, candidate))
    assert solve(replace(node, cutoff_s=0.999 * fastest), TIME_LIMIT_S) is None
    again = solve(replace(node, cutoff_s=1.001 * pipeline), TIME_LIMIT_S)
    assert again.bound_s == pytest.approx(solution.bound_s, rel=1e-5)


def test_a_gap_is_no_excuse_for_a_wrong_bound() -> None:
    for seed in range(30):
        node = replace(random_node(seed), gap_fraction=0.1)
        solution, best = solve(node, TIME_LIMIT_S), brute_force_s(node)
        if solution is not None:
            assert solution.bound_s <= best * (1 + 1e-6)
            assert step_s(node, chosen(node, solution)) <= best * 1.1 / (1 - 0.1)


def test_more_stages_than_layers_need_empty_ends() -> None:
    part = PartCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
    base = random_node(
        3, runs=((DENSE, 2),), layers={(DENSE, "none"): part, (DENSE, "full"): part}, pp=4, placement=(0, 1, 2, 3),
        num_microbatches=8, in_flight=[4.0, 3.0, 2.0, 1.0], whole="none", usable_bytes=1e6 * GIB,
    )  # fmt: skip
    assert solve(replace(base, empty_ends=False), TIME_LIMIT_S) is None
    solution = solve(replace(base, empty_ends=True), TIME_LIMIT_S)
    assert solution.counts == (0, 1, 1, 0)
