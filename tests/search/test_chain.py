"""Splits without an integer program: bounds of all splits at once, and the dynamic program for 1F1B.

What equal chunks make of the order of layers, against every legal split.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from solver_nodes import DENSE, random_node, random_part, recomputed_whole, recurring_node
from toys import NO_LIMIT_S, case_of, legal_counts, solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.layout.candidate import Candidate, Split
from planner.schedule.orders import placement
from planner.search.chain import _Line, best_split
from planner.search.chunks import fewest_of_kinds, promising, splits_of
from planner.search.enumerate import enumerate_shapes, scalar
from planner.search.frontier import nodes_of, recompute_choices
from planner.search.ilp.node import Node, RecomputeChoice
from planner.search.ilp.program import solve
from planner.search.priced_shapes import priced_shapes
from planner.shape import Shape
from planner.specs.model import LayerKind
from planner.specs.units import GIB


def nodes() -> list[Node]:
    """Nodes of 1F1B that a dynamic program takes; memory is tight in half of them."""
    drawn = [random_node(seed) for seed in range(120)] + [recurring_node(seed) for seed in range(60)]
    return [node for node in drawn if best_split(node) is not None]


def test_a_dynamic_program_is_never_above_the_integer_one_and_finds_what_fits() -> None:
    decided = 0
    for node in nodes():
        found, program = best_split(node), solve(node, NO_LIMIT_S)
        if program is None:
            continue
        assert found.bound_s <= program.objective_s * (1 + 1e-6)
        assert sum(found.counts) == node.num_layers
        assert found.objective_s >= program.objective_s * (1 - 1e-6), "its split is one of the program's"
        decided += found.objective_s <= found.bound_s * (1 + 1e-4)
    assert decided >= 20


def line_node(seed: int, has_ends: bool) -> Node:
    """A chain of one kind of layers on up to five stages, with or without seconds outside the pipeline."""
    rng = random.Random(seed)
    pp, plain = rng.randint(2, 5), random_part(rng)
    length, steps = rng.randint(max(pp, 4), 14), rng.choice([3, 8, 16])
    node = random_node(
        seed, pp=pp, placement=tuple(range(pp)), runs=((DENSE, length),),
        layers={(DENSE, "none"): plain, (DENSE, "full"): recomputed_whole(plain, rng)},
        in_flight=[float(min(pp - rank, steps)) for rank in range(pp)], num_microbatches=steps,
        whole=rng.choice(["none", "all"]), usable_bytes=rng.choice([1e6, rng.uniform(1.5, 7) * length / pp]) * GIB,
    )  # fmt: skip
    if has_ends:
        return node
    none = {"reduce_s": 0.0, "gather_s": 0.0, "optimizer_s": 0.0}
    layers = {key: replace(part, **none) for key, part in node.layers.items()}
    return replace(node, layers=layers, embedding=replace(node.embedding, **none), head=replace(node.head, **none))


@pytest.mark.parametrize("has_ends", [False, True])
def test_the_closed_form_of_one_kind_has_the_optimum_of_the_integer_program(has_ends: bool) -> None:
    """So has the dynamic program. A few limits are tried: they leave 1e-4 open, and ends more."""
    held = 0
    for node in (line_node(seed, has_ends) for seed in range(60)):
        program, line, cells = solve(node, NO_LIMIT_S), _Line.of(node, 0).best(), best_split(node)
        if program is None:
            assert not line.counts
            assert not cells.counts
            continue
        held, best_s = held + 1, program.objective_s
        assert sum(line.counts) == node.num_layers
        assert min(line.free_bytes) >= -1e-6 * node.usable_bytes
        assert line.bound_s <= best_s * (1 + 1e-6)
        assert line.objective_s >= best_s * (1 - 1e-6)
        if not has_ends:
            assert cells.objective_s == pytest.approx(best_s, rel=1e-7)
            assert line.objective_s == pytest.approx(best_s, rel=1e-4)
            assert line.bound_s == pytest.approx(best_s, rel=1e-4)
    assert 30 < held < 60


@pytest.mark.parametrize(("layers", "pp", "memory_gib"), [(2, 2, 3.4), (12, 3, 5.0)])
def test_the_number_of_recomputed_layers_is_the_best_of_all(layers: int, pp: int, memory_gib: float) -> None:
    """A rank may have room for one layer that is recomputed, and for no two: larger numbers then fit no better."""
    limits = {"pp": (pp,), "tp": (1,), "vpp": (1,), "recompute": ("none", "full"), "gap_fraction": 0.0, "top": 1}
    cluster = toy_cluster(pp, memory_gib=memory_gib)
    problem = toy_problem(toy_model(layers), cluster, toy_training(8), memory_headroom_gib=0.0, **limits)
    assert solved(problem).step.step_s == pytest.approx(problem.best_step_s(), rel=1e-6)


def test_a_cutoff_leaves_no_split_and_the_same_bound() -> None:
    for node in nodes()[:30]:
        free = best_split(node)
        if not free.counts:
            continue
        cut = best_split(replace(node, cutoff_s=0.9 * free.bound_s))
        assert cut.counts == ()
        assert cut.bound_s >= 0.9 * free.bound_s


def test_what_a_dynamic_program_does_not_take_is_left_to_the_solver() -> None:
    node = random_node(3, pp=3, placement=(0, 1, 2), in_flight=[3.0, 2.0, 1.0], num_microbatches=8, whole="none")
    assert best_split(node) is not None
    assert best_split(replace(node, bound="any_order")) is None
    assert best_split(replace(node, rank_factors=(1.0, 1.2, 1.0))) is None


@pytest.mark.parametrize("kinds", [{}, {"sliding_window": 256, "sliding_window_pattern": 2}], ids=["one kind", "two"])
def test_no_bound_of_a_split_is_above_its_replay(kinds: dict[str, int]) -> None:
    """Every split of every interleaved node of a small job, under each way to recompute."""
    problem = toy_problem(toy_model(8, **kinds), toy_cluster(8, memory_gib=3.0), toy_training(16), pp=(2, 4), tp=(1, 2))
    shapes, _ = enumerate_shapes(case_of(problem))
    priced, held = priced_shapes(problem.pricing, shapes, problem.limits), 0
    for _, block in nodes_of(priced):
        for row in range(0, len(block.schedules), 5):
            shape = scalar(block.shapes.shape, row)
            for choice in recompute_choices(problem.model, problem.runtime, problem.limits):
                splits = splits_of(shape, problem.pricing, choice)
                if splits is None or shape.pp == 1:
                    continue
                layout = Candidate(problem.pricing, problem.pricing.table(shape), Split(()), block.schedules[row])
                others_s, candidates = promising(layout, choice, splits, math.inf)
                assert others_s == math.inf or not candidates or candidates[-1][0] <= others_s
                for least_s, candidate in candidates[:6]:
                    held += 1
                    assert least_s <= candidate.step_s * (1 + 1e-9)
    assert held >= 15


def test_a_table_of_shapes_is_made_of_their_kernels() -> None:
    """Whatever the sharding and the pipeline: the same prices as of each shape by itself."""
    problem = toy_problem(toy_model(8), toy_cluster(8), toy_training(16))
    shapes, _ = enumerate_shapes(case_of(problem))
    priced = priced_shapes(problem.pricing, shapes, problem.limits)
    rows = np.arange(0, len(priced.kernel), 7)
    together = priced.cost_table(rows)
    for place, row in enumerate(rows.tolist()):
        alone, known = problem.pricing.table(scalar(shapes, row)), together.take(place)
        for key, part in alone.layers.items():
            for quantity in ("total_s", "live_bytes", "static_bytes", "reduce_s", "gather_s", "optimizer_s"):
                assert getattr(known.layers[key], quantity) == pytest.approx(getattr(part, quantity), rel=1e-12)
        assert known.tail_s == pytest.approx(alone.tail_s, rel=1e-12)
        assert known.embedding.optimizer_s == pytest.approx(alone.embedding.optimizer_s, rel=1e-12)
        assert known.p2p_s == pytest.approx(alone.p2p_s, rel=1e-12)


def test_one_split_is_all_that_a_single_rank_has() -> None:
    problem = toy_problem(toy_model(8))
    for whole in ("none", "all", "one_count"):
        assert splits_of(Shape(), problem.pricing, RecomputeChoice("none", whole)) == [(8,)]
    assert splits_of(Shape(pp=2), problem.pricing, RecomputeChoice("none", "none")) is None


DENSE_OF_CHUNKS, MOE, CHUNKED = LayerKind("full", "dense"), LayerKind("full", "moe"), LayerKind("chunked", "dense")
MODELS = {
    "experts after dense layers": (DENSE_OF_CHUNKS,) * 3 + (MOE,) * 10, "every second": (DENSE_OF_CHUNKS, MOE) * 6,
    "three kinds": (CHUNKED, MOE, CHUNKED, DENSE_OF_CHUNKS) * 3,
    "no pattern": (
        MOE, DENSE_OF_CHUNKS, DENSE_OF_CHUNKS, MOE, MOE, MOE, DENSE_OF_CHUNKS, CHUNKED, MOE, DENSE_OF_CHUNKS,
        DENSE_OF_CHUNKS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_a_rank_never_holds_fewer_of_a_kind(name: str, schedule: str) -> None:
    layers, some = MODELS[name], False
    kinds = list(dict.fromkeys(layers))
    for pp, vpp, empty_ends in product((2, 3, 4), (2,) if schedule == "zb-v" else (2, 3, 4), (False, True)):
        ranks = placement(schedule, pp, vpp)
        found = []
        for counts in legal_counts(len(layers), pp, vpp, empty_ends):
            ends = np.cumsum([0, *counts])
            held = [[layers[a:b].count(kind) for a, b in pairwise(ends)] for kind in kinds]
            found.append([[sum(np.array(row)[np.array(ranks) == rank]) for rank in range(pp)] for row in held])
        fewest = fewest_of_kinds(layers, ranks, empty_ends)
        assert fewest.shape == (len(kinds), pp)
        if found:
            np.testing.assert_array_equal(fewest, np.min(found, axis=0))
            some = some or bool(fewest.any())
        else:
            assert not fewest.any()
    assert some
