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
                  → formulation.add_recompute
    5. time       T ≥ every lower bound of the schedule of every rank (any order; k in flight) → program.add_time
    6. memory     static + in flight · live + transient ≤ usable on every rank → program.add_memory
    7. ends       gradients, parameters: any rank's exchange less the seconds that hide it, and less a chunk's pass of
                  each rank before it; optimizer: any rank's → program.add_ends

`describe` prints the program of a node with its numbers.

Sources: PHYSICS §5 for the bounds (Narayanan et al. 2021 for the orders). For 1F1B the bounds are equal to the replay
if stages differ little, so the optimum is a certificate. The gap to the replay is always reported.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise

from planner.errors import SolverError
from planner.physics.stage_memory import relaxed_peak_bytes
from planner.record import record
from planner.schedule.orders import Bound
from planner.search.ilp.formulation import (
    Expression,
    Formulation,
    Group,
    LayersOnRanks,
    RankSums,
    RecomputedLayers,
    Row,
    Variable,
    add_layers,
    add_recompute,
    add_up,
    constant,
    count,
    value,
)
from planner.search.ilp.node import PASSES, Node, Solution, recurring
from planner.search.ilp.solver import LEAST_TIME_S, Checked, solved
from planner.specs.model import LayerKind
from planner.specs.training import Recompute
from planner.specs.units import GIB

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
    trip_s = add_up(sums.total(rank, name) for rank in range(node.pp) for name in (there, back))
    trip_s = trip_s + 2 * hops * float(node.p2p_s)
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
        summed_s, meaning = add_up(sums.total(rank, name) for rank in range(pp)), f"{_WORDS[name]} of one micro-batch"
        all_s[name] = program.named("time", f"all_{name}", f"{meaning} on all ranks", summed_s)
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
            quickest_s = sums.layers.on_last_row(rank) * min(sums.per_layer(rank, name))
            stage_s = quickest_s + sums.of_ends(rank, name, first_row=False)
            meaning = f"{_WORDS[name]} of one micro-batch on the last-row stages {rank} … {pp - 1}, at least"
            trip_s = behind_s[name][rank + 1] + stage_s
            behind_s[name][rank] = program.named("time", f"behind_{rank}_{name}", meaning, trip_s)
    return behind_s


def add_memory(program: Formulation, sums: RankSums) -> list[Expression]:
    """Add row 6 and return the bytes that each rank needs, with the least transient bytes that it can have.

    Transient bytes are the largest of those of the loss and of the backward of any layer of the rank. For each kind and
    mode that needs more than the least, a binary variable is 1 if the rank holds such layers.
    """
    node = sums.node
    usable_gib = float(node.usable_bytes) / GIB
    least = min(float(node.layers[kind, node.modes[0]].transient_bytes) for kind in node.kinds)
    needed_bytes: list[Expression] = []
    for rank in range(node.pp):
        loss_bytes = float(node.head.transient_bytes) if rank == node.placement[-1] else 0.0
        transient_bytes = max(loss_bytes, least)
        short_bytes = node.short_bytes[rank] if node.short_bytes else 0.0
        peak = relaxed_peak_bytes(sums.total(rank, "static_bytes"), _live_bytes(sums, rank), transient_bytes)
        needed = peak + short_bytes
        needed_bytes.append(needed)
        program.add_row("memory", f"memory_{rank}", needed * (1 / GIB) <= usable_gib)
        for number, (on_rank, kind, mode) in enumerate(_layers_by_mode(sums, rank)):
            more_bytes = float(node.layers[kind, mode].transient_bytes) - transient_bytes
            if more_bytes > 0:
                meaning = f"1 if rank {rank} holds {kind} layers in mode {mode}"
                holds = program.variable(f"holds_{rank}_{number}", meaning, 1, integer=True)
                program.add_row("memory", f"holds_{rank}_{number}_any", on_rank <= node.num_layers * holds)
                with_backward = (needed + more_bytes * holds) * (1 / GIB)
                program.add_row("memory", f"memory_{rank}_{number}", with_backward <= usable_gib)
    return needed_bytes


def _live_bytes(sums: RankSums, rank: int) -> Expression:
    """Bytes that a rank keeps from forward to backward, for all micro-batches in flight."""
    node = sums.node
    in_flight = node.in_flight_of(rank)
    layers = in_flight[0] * sums.of_layers(rank, "live_bytes") if node.vpp == 1 else sums.in_flight_bytes(rank)
    live_bytes = layers + sums.of_ends(rank, "live_bytes")
    sending = sum(in_flight) - (in_flight[-1] if rank == node.placement[-1] else 0.0)
    live_bytes = live_bytes + sending * float(node.sent_bytes)
    if rank == 0:
        live_bytes = live_bytes + (in_flight[0] - 1) * float(node.embedding.live_bytes)
    return live_bytes


def _layers_by_mode(sums: RankSums, rank: int) -> Iterator[tuple[Expression, LayerKind, Recompute]]:
    """Layers of a rank by kind and recompute mode; those of the first mode may include those of the second."""
    first, *others = sums.node.modes
    for kind, on_rank in sums.layers.by_kind[rank].items():
        yield on_rank, kind, first
    for mode in others:
        for kind, on_rank in sums.recomputed.by_kind[rank].items():
            yield on_rank, kind, mode


_EXCHANGES = {"reduce_s": "gradient reduction", "gather_s": "parameter gathering"}


def add_ends(program: Formulation, sums: RankSums) -> Expression:
    """Add row 7 and return the seconds outside the pipeline that nothing hides: gradients + parameters + optimizer."""
    node = sums.node
    gradients_s = program.variable("gradients", "seconds of gradient reduction that nothing hides")
    parameters_s = program.variable("parameters", "seconds of parameter gathering that nothing hides")
    optimizer_s = program.variable("optimizer", "seconds of the slowest rank's optimizer")
    if node.sharded_each_time:
        _add_each_time(program, sums, gradients_s)
    if node.sharded_each_time < 2:
        hidden, lead = node.gradient_overlap_fraction, node.lead_passes
        _add_exchange(program, sums, gradients_s, "reduce_s", "backward_total_s", hidden, lead)
    if node.sharded_each_time < 3:
        hidden, lead = node.parameter_overlap_fraction, 1 / node.vpp
        _add_exchange(program, sums, parameters_s, "gather_s", "forward_total_s", hidden, lead)
    for rank in range(node.pp):
        program.add_row("ends", f"optimizer_{rank}", optimizer_s >= sums.total(rank, "optimizer_s"))
    return add_up((gradients_s, parameters_s, optimizer_s))


def _add_each_time(program: Formulation, sums: RankSums, gradients_s: Expression) -> None:
    """Add the rows of ZeRO-2 and ZeRO-3 at pp = 1.

    Gradients are reduced for every micro-batch, and with ZeRO-3 weights are gathered, too.
    """
    node, weights_too = sums.node, sums.node.sharded_each_time == 3
    exchanged_s = sums.total(0, "reduce_s") + (2 * sums.total(0, "gather_s") if weights_too else 0.0)
    behind_s = sums.total(0, "total_s" if weights_too else "backward_total_s")
    exposed_s = exchanged_s - node.fsdp_overlap_fraction * behind_s
    program.add_row("ends", "exposed_each_time", gradients_s >= node.num_microbatches * exposed_s)
    showing_s = node.num_microbatches * node.contention_fraction * exchanged_s
    program.add_row("ends", "showing_each_time", gradients_s >= showing_s)


def _add_exchange(
    program: Formulation, sums: RankSums, exposed_s: Expression, exchange: str, passing: str, hidden: float, lead: float
) -> None:
    """Add the rows of one exchange: its seconds on a rank beyond the share `hidden` of the rank's own passes.

    `lead` passes of each rank before it are taken off.
    """
    node = sums.node
    before_s = constant(0)
    for rank in range(node.pp):
        exchanged_s, passing_s = sums.total(rank, exchange), sums.total(rank, passing)
        late_s, hidden_s = exposed_s + before_s, hidden * passing_s
        name = f"{exchange}_{rank}"
        program.add_row("ends", f"showing_{name}", late_s >= node.contention_fraction * exchanged_s)
        program.add_row("ends", f"exposed_{name}_of_the_last_chunk", node.vpp * late_s >= exchanged_s - hidden_s)
        if node.vpp > 1:
            hidden_behind_s = node.passes_behind * hidden_s
            program.add_row("ends", f"exposed_{name}", late_s >= exchanged_s - hidden_behind_s)
        meaning = f"seconds that the ranks 0 … {rank} leave the next rank for its {_EXCHANGES[exchange]}"
        before_s = program.named("ends", f"before_{name}", meaning, before_s + lead * passing_s)


class SolverFailed(SolverError):
    """The solver gave no answer that holds, though time was left; other programs may still be solved."""


@record
class Program:
    """The integer program of a node, and the expressions that its solution is read from."""

    node: Node
    formulation: Formulation
    layers: LayersOnRanks
    recomputed: RecomputedLayers
    needed_bytes: list[Expression]
    """Bytes that each rank needs, with the least transient bytes it can have."""


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
    return Solution(
        counts=program.layers.counts(program.node),
        recomputed=tuple(tuple(map(count, kinds.values())) for kinds in program.recomputed.settings),
        objective_s=answer.objective_s,
        bound_s=answer.bound_s,
        free_bytes=tuple(float(program.node.usable_bytes) - value(needed) for needed in program.needed_bytes),
    )


WIDTH = 80
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


def describe(node: Node) -> str:
    """The integer program of a node with its numbers, in the groups of the docstring of `program`.

    A row is a line `name: 0.0123·filled_0_0 + … ≤ 76.2`, which is wrapped if it is long; numbers have six digits.
    """
    program = build(node).formulation
    sections = [
        ("shape", list(_shape(node))),
        ("variables", _variables(program)),
        ("minimise the seconds of a step", [_sum(program.problem.objective.items())]),
    ]
    for group, title in _GROUPS.items():
        rows = [_row(row) for row in program.rows if program.groups[row.name] == group]
        sections.append((title, rows or ["no rows"]))
    return "\n\n".join("\n".join((_wrapped(title, 0), *map(_wrapped, lines))) for title, lines in sections) + "\n"


def _shape(node: Node) -> Iterator[str]:
    """Lines with the numbers of the node that several rows share."""
    yield f"{node.num_layers} layers: {_layers(node)}"
    stages = "1 stage" if node.vpp == 1 else f"{node.vpp} virtual stages"
    yield f"{node.pp} ranks with {stages} each, {node.num_microbatches} micro-batches"
    yield f"rows of time hold for {_BOUNDS[node.bound]}; a transfer takes {_number(float(node.p2p_s))} s"
    yield f"recompute mode of a layer: {' or '.join(node.modes)}"
    in_flight = ", ".join(map(_number, node.in_flight))
    yield f"a rank can use {_number(float(node.usable_bytes) / GIB)} GiB"
    yield f"micro-batches in flight where a rank holds most, ranks 0 … {node.pp - 1}: {in_flight}"


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
    return [f"{name:<{name_width}}  {limits:<{range_width}}  {meaning}" for name, limits, meaning in cells]


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
    if row.name.startswith("is_"):
        (variable, _), *others = row.items()
        line = f"{variable.name} = {_sum([(other, -c) for other, c in others], -row.constant)}"
    else:
        line = f"{_sum(row.items())} {_SIGNS[row.sense]} {_number(-row.constant)}"
    return f"{row.name}: {line}"


def _wrapped(line: str, indent: int = 2) -> str:
    """A title or a line of a section; if it is too long, the lines after the first are indented further."""
    first, later = " " * indent, " " * (indent + 4)
    return textwrap.fill(
        line, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
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
