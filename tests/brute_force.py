"""The integer program's rows written out once more: every split of a node, whether it fits, and how long it takes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from toys import legal_counts

from planner.schedule.orders import build_schedule
from planner.search.ilp.node import Node
from planner.specs.model import LayerKind
from planner.specs.training import Recompute

WAYS = ("forward_total_s", "backward_total_s")


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
    mode: Recompute = "full" if node.whole == "all" else "none"
    least = min(node.layers[kind, mode].transient_bytes for kind, _ in node.runs)
    for rank in range(node.pp):
        moments = [
            node.layers[kind, mode].transient_bytes for kind, count in candidate.on_rank(rank, node.pp).items() if count
        ]
        moments += [
            node.layers[kind, "full"].transient_bytes for kind, count in candidate.recomputed[rank].items() if count
        ]
        moment = max([least, *moments])
        needed = total(node, candidate, rank, "static_bytes")
        in_flight = node.in_flight_of(rank)
        if node.vpp == 1:
            needed += in_flight[0] * total(node, candidate, rank, "live_bytes", ends=False)
        else:
            (kind, _), *_ = node.runs
            chunks = candidate.counts[rank :: node.pp]
            kept = sum(number * count for number, count in zip(in_flight, chunks, strict=True))
            needed += kept * node.layers[kind, mode].live_bytes
        needed += in_flight[0] * node.embedding.live_bytes if rank == 0 else 0.0
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
    (kind, _), *_ = node.runs
    layer = node.layers[kind, mode]
    f = [count * layer.forward_total_s for count in candidate.counts]
    b = [count * layer.backward_total_s for count in candidate.counts]
    for seconds, quantity in ((f, "forward_total_s"), (b, "backward_total_s")):
        seconds[0] += getattr(node.embedding, quantity)
        seconds[-1] += getattr(node.head, quantity)
    chunk = candidate.counts[1]
    trip = sum(f) + sum(b) + 2 * (n - 1) * hop
    worst = trip + (steps - 1) * chunk * max(layer.forward_total_s, layer.backward_total_s) if n > 2 else 0.0
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


def pipeline_s(node: Node, candidate: Candidate) -> float:
    return one_f_one_b_s(node, candidate) if node.vpp == 1 else interleaved_s(node, candidate)


def step_s(node: Node, candidate: Candidate) -> float:
    """Pipeline, exchanges as far as they keep the step waiting, and the slowest optimizer."""
    optimizer = max(total(node, candidate, rank, "optimizer_s") for rank in range(node.pp))
    reduced, gathered = node.gradient_overlap_fraction, node.parameter_overlap_fraction
    gradients = exposed_s(node, candidate, "reduce_s", "backward_total_s", reduced, node.lead_passes)
    parameters = exposed_s(node, candidate, "gather_s", "forward_total_s", gathered, 1 / node.vpp)
    return pipeline_s(node, candidate) + gradients + parameters + optimizer


def exposed_s(node: Node, candidate: Candidate, exchange: str, way: str, hides: float, lead: float) -> float:
    """What a rank's exchange takes beyond what hides it, less `lead` passes of each rank before it.

    A chunk of it follows the last pass, and all of it the rank's passes; a part of it shows whatever hides it.
    """
    exposed, before = 0.0, 0.0
    for rank in range(node.pp):
        whole, hidden = total(node, candidate, rank, exchange), hides * total(node, candidate, rank, way)
        shown = [node.contention_fraction * whole, (whole - hidden) / node.vpp]
        shown += [whole - node.passes_behind * hidden] if node.vpp > 1 else []
        exposed = max(exposed, max(shown) - before)
        before += lead * total(node, candidate, rank, way)
    return exposed


def brute_force_s(node: Node) -> float:
    return min((step_s(node, one) for one in candidates(node) if fits(node, one)), default=math.inf)
