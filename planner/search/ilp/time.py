"""Row 5 of the integer program: T is at least every lower bound of the schedule on every rank, in seconds."""

from __future__ import annotations

import math
from itertools import pairwise

from planner.search.ilp.formulation import Expression, Formulation, add_up, constant
from planner.search.ilp.node import PASSES
from planner.search.ilp.rank_sums import RankSums

_WORDS = {"forward_total_s": "forward seconds", "backward_total_s": "backward seconds"}


def add_time(program: Formulation, sums: RankSums) -> Expression:
    """Add row 5 and return T, the seconds of the pipeline."""
    node = sums.node
    most_s = None if math.isinf(node.cutoff_s) else node.cutoff_s
    pipeline_s = program.variable("T", "seconds of the pipeline, from the first forward to the last backward", most_s)
    if node.bound == "one_f_one_b":
        _add_one_f_one_b(program, sums, pipeline_s)
    elif node.bound == "interleaved":
        _add_interleaved(program, sums, pipeline_s)
    else:
        _add_any_order(program, sums, pipeline_s)
    return pipeline_s


def _add_any_order(program: Formulation, sums: RankSums, pipeline_s: Expression) -> None:
    """Add T ≥ trip to the rank + M·t + trip back, for every rank.

    There is no trip back if weight gradients may follow the last input gradient.
    """
    node = sums.node
    splits = node.bound == "split_backward"
    passes = PASSES[:1] if splits else PASSES
    _add_trips(program, sums, pipeline_s, "input_grad_total_s" if splits else "backward_total_s")
    before_s = constant(0)
    for rank in range(node.pp):
        quickest_s = sum(min(sums.per_layer(rank, name)) for name in passes)
        busy_s = node.num_microbatches * sums.total(rank, "total_s")
        hops_s = len(passes) * rank * float(node.p2p_s)
        program.add_row("time", f"time_{rank}", pipeline_s >= busy_s + before_s + hops_s)
        ends_s = sum(sums.of_ends(rank, name, last_row=False) for name in passes)
        meaning = f"seconds of one micro-batch on the first-row stages 0 … {rank}, at least"
        trip_s = before_s + sums.layers.first_row[rank] * quickest_s + ends_s
        before_s = program.named("time", f"before_{rank}", meaning, trip_s)


def _add_trips(program: Formulation, sums: RankSums, pipeline_s: Expression, back: str) -> None:
    """Add T ≥ one micro-batch's whole trip + M − 1 more passes of any stage, there or `back`.

    These rows matter if M is small.
    """
    node = sums.node
    there = "forward_total_s"
    hops = sum(a != b for a, b in pairwise(node.placement)) if node.pp > 1 else 0
    trip_s = add_up(sums.total(rank, name) for rank in range(node.pp) for name in (there, back)) + 2 * hops * float(
        node.p2p_s
    )
    trip_s = program.named("time", "trip", "seconds of one micro-batch through all stages and back", trip_s)
    for name in (there, back):
        stages_s: list[Expression] = []
        if node.vpp == 1:
            stages_s = [sums.total(rank, name) for rank in range(node.pp)]
        elif node.num_stages > 2:  # any stage but the first and the last
            stages_s = [sums.layers.chunks.length * min(min(sums.per_layer(rank, name)) for rank in range(node.pp))]
        for number, stage_s in enumerate(stages_s):
            later_s = (node.num_microbatches - 1) * stage_s
            program.add_row("time", f"trip_{number}_{name}", pipeline_s >= trip_s + later_s)


def _add_one_f_one_b(program: Formulation, sums: RankSums, pipeline_s: Expression) -> None:
    """Add the rows of 1F1B: a rank is idle for the part of the trip below it that k passes cannot fill.

    Rank r has at most k = min(M, pp − r) micro-batches in flight. If transfers block, a rank also spends c between any
    two of its 2M actions. But the first rank exchanges nothing between a backward and the next forward, and the last
    rank nothing between a forward and its backward.
    """
    node, pp, steps = sums.node, sums.node.pp, sums.node.num_microbatches
    hop_s = 2 * float(node.p2p_s)
    pause_s = float(node.p2p_s) if node.blocking_p2p and pp > 1 else 0.0
    forward_s: list[Expression] = []
    backward_s: list[Expression] = []
    before_s = [constant(0)]
    for rank in range(pp):
        for name, quantity, passes_s in zip(("forward", "backward"), PASSES, (forward_s, backward_s), strict=True):
            meaning = f"seconds of one micro-batch's {name} on rank {rank}"
            passes_s.append(program.named("time", f"{name}_{rank}", meaning, sums.total(rank, quantity)))
        meaning = f"seconds of one micro-batch's forward and backward on the ranks 0 … {rank}"
        trip_s = before_s[-1] + forward_s[rank] + backward_s[rank]
        before_s.append(program.named("time", f"trip_{rank}", meaning, trip_s))
    for rank in range(pp):
        k = min(steps, pp - rank)
        pauses = steps - 1 if rank == pp - 1 else steps + k - 1 if rank == 0 else 2 * steps - 1
        busy_s = steps * (forward_s[rank] + backward_s[rank]) + pauses * pause_s
        below_s = before_s[pp] - before_s[rank + 1] + (pp - 1 - rank) * hop_s - k * pause_s
        first_s, last_s = below_s - (k - 1) * forward_s[rank], below_s - (k - 1) * backward_s[rank]
        waits_s = [constant(0), first_s, last_s]
        if steps > k:
            waits_s.append(first_s + last_s)
        for number, wait_s in enumerate(waits_s):
            least_s = busy_s + before_s[rank] + rank * hop_s + wait_s
            program.add_row("time", f"time_{rank}_{number}", pipeline_s >= least_s)


def _add_interleaved(program: Formulation, sums: RankSums, pipeline_s: Expression) -> None:
    """Add the rows of interleaved 1F1B: T ≥ head + M·t + tail + the part of the trip below that k passes cannot fill.

    A rank has at most k chunks in flight. Let s be the rank's first virtual stage and e its last. Head and tail are the
    trips through the chunks before s. The first gradient comes back after Σ_{j≥s} f_j + Σ_{j>e} b_j, the last one after
    Σ_{j>e} f_j + Σ_{j≥s} b_j.
    """
    node, pp, hop_s = sums.node, sums.node.pp, float(sums.node.p2p_s)
    num_chunks = node.num_microbatches * node.vpp
    all_s = {}
    for name in PASSES:
        meaning = f"{_WORDS[name]} of one micro-batch on all ranks"
        all_s[name] = program.named(
            "time", f"all_{name}", meaning, add_up(sums.total(rank, name) for rank in range(pp))
        )
    behind_s = _add_behind(program, sums)
    _add_trips(program, sums, pipeline_s, "backward_total_s")
    before_s = dict.fromkeys(PASSES, constant(0))
    for rank in range(pp):
        trips_s = before_s["forward_total_s"] + before_s["backward_total_s"] + 2 * rank * hop_s
        meaning = f"seconds that rank {rank} works, and of the trips to its first virtual stage and back"
        busy_s = node.num_microbatches * sums.total(rank, "total_s") + trips_s
        busy_s = program.named("time", f"busy_{rank}", meaning, busy_s)
        k = min(round(node.in_flight[rank] * node.vpp), num_chunks)
        hops_s = (node.num_stages - 1 - rank + pp - 1 - rank) * hop_s
        waits_s = [constant(0)]
        for name, back in zip(PASSES, reversed(PASSES), strict=True):
            slowest_s = sums.layers.chunks.length * max(sums.per_layer(rank, name)) + sums.of_ends(rank, name)
            wait_s = all_s[name] - before_s[name] + behind_s[back][rank + 1] + hops_s - k * slowest_s
            meaning = f"seconds of the trip below rank {rank} beyond the {_WORDS[name]} of {k} chunks; below 0: no wait"
            waits_s.append(program.named("time", f"wait_{rank}_{name}", meaning, wait_s, least=None))
        if num_chunks > k:
            waits_s.append(waits_s[1] + waits_s[2])
        for number, wait_s in enumerate(waits_s):
            program.add_row("time", f"time_{rank}_{number}", pipeline_s - busy_s >= wait_s)
        for name in PASSES:
            quickest_s = sums.layers.first_row[rank] * min(sums.per_layer(rank, name))
            trip_s = before_s[name] + (quickest_s + sums.of_ends(rank, name, last_row=False))
            meaning = f"{_WORDS[name]} of one micro-batch on the first-row stages 0 … {rank}, at least"
            before_s[name] = program.named("time", f"before_{rank}_{name}", meaning, trip_s)


def _add_behind(program: Formulation, sums: RankSums) -> dict[str, list[Expression]]:
    """The least seconds of a micro-batch on the last row's stages r … pp − 1, for each pass and each rank r."""
    pp = sums.node.pp
    behind_s = {name: [constant(0)] * (pp + 1) for name in PASSES}
    for rank in reversed(range(pp)):
        for name in PASSES:
            quickest_s = sums.layers.last_row[rank] * min(sums.per_layer(rank, name))
            stage_s = quickest_s + sums.of_ends(rank, name, first_row=False)
            meaning = f"{_WORDS[name]} of one micro-batch on the last-row stages {rank} … {pp - 1}, at least"
            behind_s[name][rank] = program.named(
                "time", f"behind_{rank}_{name}", meaning, behind_s[name][rank + 1] + stage_s
            )
    return behind_s
