"""The integer program against brute force: every split and recompute count, under the same rows written out here."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import pytest
from toys import legal_counts

from planner.physics.cost import PartCost
from planner.schedule.orders import build_schedule, in_flight_microbatches
from planner.search.ilp import Node, Solution, solve
from planner.specs.model import LayerKind
from planner.specs.units import GIB

DENSE, MOE = LayerKind("full", "dense"), LayerKind("full", "moe")
TIME_LIMIT_S = 20.0


def random_part(rng: random.Random, scale: float = 1.0, **changes: float) -> PartCost:
    seconds = {"forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1, "tp_forward_s": 0.3, "tp_backward_s": 0.3}
    sizes = {"live_bytes": GIB, "transient_bytes": GIB / 2, "weights_bytes": GIB, "optimizer_bytes": 2 * GIB}
    ends = {"reduce_s": 2, "gather_s": 1, "optimizer_s": 0.5}
    numbers = {name: scale * most * rng.uniform(0.3, 1) for name, most in (seconds | sizes | ends).items()}
    return PartCost(**(numbers | changes))


def recomputed_whole(plain: PartCost, rng: random.Random) -> PartCost:
    """Twice the forward, next to nothing kept."""
    return replace(
        plain,
        input_grad_s=plain.input_grad_s + plain.forward_s,
        live_bytes=rng.uniform(0.05, 0.3) * plain.live_bytes,
        transient_bytes=plain.transient_bytes + plain.live_bytes,
    )


def random_node(seed: int, **changes: Any) -> Node:
    """At most 8 layers of one or two kinds on at most 3 stages; memory is tight in half of all cases."""
    rng = random.Random(seed)
    pp, steps = rng.randint(1, 3), rng.randint(1, 12)
    lengths = [rng.randint(max(2, pp), 8)]
    if rng.random() < 0.5:
        lengths.insert(0, rng.randint(1, 8 - min(lengths[0], 7)))
    runs = tuple(zip((DENSE, MOE), lengths, strict=False))
    plain = {kind: random_part(rng) for kind, _ in runs}
    layers = {(kind, "none"): part for kind, part in plain.items()}
    layers |= {(kind, "full"): recomputed_whole(part, rng) for kind, part in plain.items()}
    node = {
        "runs": runs,
        "layers": layers,
        "embedding": random_part(rng, 0.3),
        "head": random_part(rng, 0.8),
        "pp": pp,
        "vpp": 1,
        "num_microbatches": steps,
        "base": "none",
        "whole": rng.choice(["none", "all", "per_stage"] + ["one_count"] * (len(runs) == 1)),
        "in_flight": in_flight_microbatches("1f1b" if pp > 1 else "none", pp, 1, steps),
        "usable_bytes": rng.choice([1e6, rng.uniform(3, 12) * sum(lengths) / pp]) * GIB,
        "p2p_s": rng.choice([0.0, 0.05]),
        "bound": "one_f_one_b",
        "placement": tuple(range(pp)),
        "blocking_p2p": rng.random() < 0.5,
        "gap_fraction": 0.0,
        "empty_ends": rng.random() < 0.5,
        "gradient_overlap_fraction": rng.choice([0.0, 0.9]),
        "parameter_overlap_fraction": rng.choice([0.0, 0.9]),
    }
    return Node(**(node | changes))


def interleaved_node(seed: int) -> Node:
    """One kind of layers in two or three equal chunks on each of two or three ranks."""
    rng = random.Random(1000 + seed)
    pp, vpp = rng.choice([(2, 2), (2, 3), (3, 2)])
    steps = pp * rng.randint(1, 4)
    plain = random_part(rng)
    return random_node(
        seed,
        runs=((DENSE, rng.randint(pp * vpp - 2, 13)),),
        layers={(DENSE, "none"): plain, (DENSE, "full"): recomputed_whole(plain, rng)},
        pp=pp,
        vpp=vpp,
        num_microbatches=steps,
        whole=rng.choice(["none", "all"]),
        in_flight=in_flight_microbatches("interleaved-1f1b", pp, vpp, steps),
        bound="interleaved",
        placement=tuple(range(pp)) * vpp,
        usable_bytes=rng.choice([1e6, rng.uniform(8, 25)]) * GIB,
    )


@dataclass(frozen=True)
class Candidate:
    """Layers of each virtual stage by kind, and of each rank how many are recomputed whole."""

    counts: tuple[int, ...]
    held: tuple[dict[LayerKind, int], ...]
    recomputed: tuple[dict[LayerKind, int], ...]

    def on_rank(self, rank: int, pp: int) -> dict[LayerKind, int]:
        return {kind: sum(stage[kind] for stage in self.held[rank::pp]) for kind in self.held[0]}


def candidates(node: Node) -> Iterator[Candidate]:
    """Every split of the node's layers with every recompute count."""
    model = [kind for kind, length in node.runs for _ in range(length)]
    kinds = list(dict.fromkeys(model))
    for counts in legal_counts(len(model), node.pp, node.vpp, node.empty_ends):
        starts = [sum(counts[:stage]) for stage in range(len(counts))]
        held = tuple(
            {kind: model[start : start + count].count(kind) for kind in kinds}
            for start, count in zip(starts, counts, strict=True)
        )
        ranks = [Candidate(counts, held, ()).on_rank(rank, node.pp) for rank in range(node.pp)]
        for recomputed in recompute_counts(node, kinds, ranks):
            yield Candidate(counts, held, recomputed)


def recompute_counts(
    node: Node, kinds: list[LayerKind], ranks: list[dict[LayerKind, int]]
) -> Iterator[tuple[dict[LayerKind, int], ...]]:
    if node.whole == "none":
        yield tuple(dict.fromkeys(kinds, 0) for _ in ranks)
    elif node.whole == "all":
        yield tuple(ranks)
    elif node.whole == "one_count":
        for number in range(min(rank[kind] for rank in ranks for kind in kinds) + 1):
            yield tuple(dict.fromkeys(kinds, number) for _ in ranks)
    else:
        choices = [[range(rank[kind] + 1) for kind in kinds] for rank in ranks]
        for numbers in product(*(product(*rank) for rank in choices)):
            yield tuple(dict(zip(kinds, rank, strict=True)) for rank in numbers)


def total(node: Node, candidate: Candidate, rank: int, quantity: str, ends: bool = True) -> float:
    """A quantity of everything on a rank."""
    value = 0.0
    for kind, count in candidate.on_rank(rank, node.pp).items():
        again = candidate.recomputed[rank][kind]
        value += (count - again) * getattr(node.layers[kind, "none"], quantity)
        value += again * getattr(node.layers[kind, "full"], quantity)
    if ends and rank == 0:
        value += getattr(node.embedding, quantity)
    if ends and rank == node.pp - 1:
        value += getattr(node.head, quantity)
    return value


def fits(node: Node, candidate: Candidate) -> bool:
    """Static bytes, in-flight micro-batches and the largest moment on every rank."""
    modes = {"none": ["none"], "all": ["full"]}.get(node.whole, ["none", "full"])
    moment = max(part.transient_bytes for (_, mode), part in node.layers.items() if mode in modes)
    for rank in range(node.pp):
        needed = total(node, candidate, rank, "static_bytes")
        needed += node.in_flight[rank] * total(node, candidate, rank, "live_bytes", ends=False)
        needed += node.in_flight[0] * node.embedding.live_bytes if rank == 0 else 0.0
        last = rank == node.pp - 1
        needed += node.head.live_bytes if last else 0.0
        needed += max(moment, node.head.transient_bytes) if last else moment
        if needed > node.usable_bytes:
            return False
    return True


def one_f_one_b_s(node: Node, candidate: Candidate) -> float:
    """PHYSICS: trip to the rank and back, its work, and what of the trip below it k in flight cannot fill."""
    pp, steps, hop = node.pp, node.num_microbatches, node.p2p_s
    pause = hop if node.blocking_p2p and pp > 1 else 0.0
    f = [total(node, candidate, rank, "forward_total_s") for rank in range(pp)]
    b = [total(node, candidate, rank, "backward_total_s") for rank in range(pp)]
    worst = 0.0
    for r in range(pp):
        k = min(steps, pp - r)
        trip = sum(f[q] + b[q] + 2 * hop for q in range(r))
        below = sum(f[q] + b[q] + 2 * hop for q in range(r + 1, pp))
        before_backward = max(0.0, below - (k - 1) * f[r] - k * pause)
        after_forward = max(0.0, below - (k - 1) * b[r] - k * pause)
        waits = (before_backward + after_forward) if steps > k else max(before_backward, after_forward)
        worst = max(worst, steps * (f[r] + b[r]) + num_exchanges(r, pp, steps) * pause + trip + waits)
    return worst


def num_exchanges(rank: int, pp: int, num_microbatches: int) -> int:
    """Between how many pairs of neighbouring actions a rank sends or receives: counted along its 1F1B list."""
    actions = build_schedule("1f1b", pp, 1, num_microbatches).ranks[rank]
    kinds = [action.kind for action in actions]
    first, last = rank == 0, rank == pp - 1
    sends = {"F": not last, "B": not first}
    receives = {"F": not first, "B": not last}
    return sum(sends[before] or receives[after] for before, after in pairwise(kinds))


def interleaved_s(node: Node, candidate: Candidate) -> float:
    """The same with chunks: k chunk passes, none longer than a full chunk with what the rank holds beside it."""
    pp, steps, hop, n = node.pp, node.num_microbatches, node.p2p_s, node.pp * node.vpp
    mode = "full" if node.whole == "all" else "none"
    layer = node.layers[DENSE, mode]
    f = [count * layer.forward_total_s for count in candidate.counts]
    b = [count * layer.backward_total_s for count in candidate.counts]
    for seconds, quantity in ((f, "forward_total_s"), (b, "backward_total_s")):
        seconds[0] += getattr(node.embedding, quantity)
        seconds[-1] += getattr(node.head, quantity)
    chunk, worst = candidate.counts[1], 0.0
    for r in range(pp):
        last = n - pp + r
        k = min(round(node.in_flight[r] * node.vpp), steps * node.vpp)
        hops = (n - 1 - r + pp - 1 - r) * hop
        beside = [total(node, candidate, r, q) - sum(candidate.counts[r::pp]) * getattr(layer, q) for q in WAYS]
        before = sum(f[r:]) + sum(b[last + 1 :]) + hops - k * (chunk * layer.forward_total_s + beside[0])
        after = sum(f[last + 1 :]) + sum(b[r:]) + hops - k * (chunk * layer.backward_total_s + beside[1])
        waits = max(0.0, before, after, before + after if steps * node.vpp > k else 0.0)
        busy = steps * (sum(f[r::pp]) + sum(b[r::pp])) + sum(f[:r]) + sum(b[:r]) + 2 * r * hop
        worst = max(worst, busy + waits)
    return worst


WAYS = ("forward_total_s", "backward_total_s")


def pipeline_s(node: Node, candidate: Candidate) -> float:
    return one_f_one_b_s(node, candidate) if node.vpp == 1 else interleaved_s(node, candidate)


def step_s(node: Node, candidate: Candidate) -> float:
    """Pipeline, exposed exchanges of the first rank, and the slowest optimizer."""
    gradients = total(node, candidate, 0, "reduce_s")
    gradients -= node.gradient_overlap_fraction * total(node, candidate, 0, "backward_total_s")
    parameters = total(node, candidate, 0, "gather_s")
    parameters -= node.parameter_overlap_fraction * total(node, candidate, 0, "forward_total_s")
    optimizer = max(total(node, candidate, rank, "optimizer_s") for rank in range(node.pp))
    return pipeline_s(node, candidate) + max(0.0, gradients) + max(0.0, parameters) + optimizer


def brute_force_s(node: Node) -> float:
    return min((step_s(node, one) for one in candidates(node) if fits(node, one)), default=math.inf)


def chosen(node: Node, solution: Solution) -> Candidate:
    """The solver's answer among all candidates; it is there exactly once."""
    kinds = list(dict.fromkeys(kind for kind, _ in node.runs))
    same = [
        one
        for one in candidates(node)
        if one.counts == solution.counts
        and solution.recomputed == tuple(tuple(rank[kind] for kind in kinds) for rank in one.recomputed)
    ]
    assert len(same) == 1
    return same[0]


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
    fastest = min(pipeline_s(node, one) for one in candidates(node) if fits(node, one))
    assert solve(replace(node, cutoff_s=0.999 * fastest), TIME_LIMIT_S) is None
    again = solve(replace(node, cutoff_s=1.001 * pipeline), TIME_LIMIT_S)
    assert again is not None
    assert again.bound_s == pytest.approx(solution.bound_s, rel=1e-5)


def test_a_gap_is_no_excuse_for_a_wrong_bound() -> None:
    for seed in range(30):
        node = replace(random_node(seed), gap_fraction=0.1)
        solution, best = solve(node, TIME_LIMIT_S), brute_force_s(node)
        if solution is not None:
            assert solution.bound_s <= best * (1 + 1e-6)
            assert step_s(node, chosen(node, solution)) <= best * 1.1 / (1 - 0.1)


@pytest.mark.parametrize("whole", ["none", "all", "one_count", "per_stage"])
def test_no_room_is_no_answer(whole: str) -> None:
    node = random_node(7, pp=2, placement=(0, 1), in_flight=[2.0, 1.0], num_microbatches=4, whole=whole)
    node = replace(node, runs=node.runs[:1], usable_bytes=0.5 * GIB)
    assert solve(node, TIME_LIMIT_S) is None


def test_more_stages_than_layers_need_empty_ends() -> None:
    part = PartCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
    base = random_node(
        3, runs=((DENSE, 2),), layers={(DENSE, "none"): part, (DENSE, "full"): part}, pp=4, placement=(0, 1, 2, 3),
        num_microbatches=8, in_flight=[4.0, 3.0, 2.0, 1.0], whole="none", usable_bytes=1e6 * GIB,
    )  # fmt: skip
    assert solve(replace(base, empty_ends=False), TIME_LIMIT_S) is None
    solution = solve(replace(base, empty_ends=True), TIME_LIMIT_S)
    assert solution is not None
    assert solution.counts == (0, 1, 1, 0)


def test_a_heavy_head_gets_fewer_layers() -> None:
    part = PartCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
    head = PartCost(forward_s=2.0, input_grad_s=2.0, weight_grad_s=2.0)
    node = random_node(
        1, runs=((DENSE, 8),), layers={(DENSE, "none"): part, (DENSE, "full"): part}, embedding=PartCost(), head=head,
        pp=2, placement=(0, 1), num_microbatches=16, in_flight=[2.0, 1.0], whole="none", usable_bytes=1e6 * GIB,
        p2p_s=0.0, empty_ends=False,
    )  # fmt: skip
    solution = solve(node, TIME_LIMIT_S)
    assert solution is not None
    assert solution.counts == (5, 3)
