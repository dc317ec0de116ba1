"""A timeline as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per pipeline rank, with a thread for each of `TRACKS` and for whatever the caller adds, arrows from each
pass to the one on another rank that consumes its result, and counters. Times in the file are microseconds, in steps of
an eighth: these are whole nanoseconds too, so that no reader rounds slices into each other.

`snapshot` writes a stage's memory as a snapshot of torch, which pytorch.org/memory_viz opens.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from planner.answer import Plan, PricedLayout
from planner.layout.alive import MemoryTensor
from planner.layout.candidate import Candidate
from planner.layout.memory_curve import memory_curves
from planner.layout.price import reprice
from planner.layout.step import Passes, Together, beside_pipeline, exchanges_of_passes
from planner.report.format import ACTIONS, sizes
from planner.report.schedules import spans
from planner.schedule.actions import KINDS, Action, F
from planner.schedule.replay import Timeline, replay
from planner.specs.base import Fields, Said

_COLOURS = {"F": "thread_state_running", "B": "thread_state_runnable", "I": "thread_state_runnable", "W": "yellow"}
_STEPS_PER_S = 8e6

Event = Fields


class TraceSlice(NamedTuple):
    """A slice on a thread of a rank, such as an exchange; of one inside passes, seconds from the start of the pass."""

    thread: str
    name: str
    start_s: float
    end_s: float
    args: Said | None = None
    kind: str = ""
    """The kind of an action."""


class TraceCounter(NamedTuple):
    """Numbers of a rank over time, such as its memory: each holds from its time on."""

    rank: int
    name: str
    times_s: Sequence[float]
    series: Mapping[str, Sequence[float]]


Inner = Mapping[tuple[int, str], Sequence[TraceSlice]]
"""Slices inside every pass, by the model's virtual stage and the kind of action."""


def trace_events(
    timeline: Timeline,
    beside: Sequence[Sequence[TraceSlice]] = (),
    rank_names: Sequence[str] = (),
    inner: Inner | None = None,
    counters: Iterable[TraceCounter] = (),
    about: Said | None = None,
) -> Fields:
    """The trace as a JSON object.

    `beside` has what runs beside each rank's pipeline, such as the gradient reduction behind its last backward,
    `rank_names` replaces "rank 0" and so on; `about` says what the trace is of.
    """
    inner = inner or {}
    others = {slice.thread for slices in (*beside, *inner.values()) for slice in slices}
    threads = [*TRACKS, *sorted(others - {*TRACKS})]
    events: list[Event] = []
    for rank in range(timeline.schedule.pp):
        name = rank_names[rank] if rank_names else f"rank {rank}"
        events += _headings(rank, name, threads)
        slices = chain(_of_pipeline(timeline, rank), _insides(timeline, rank, inner), *beside[rank : rank + 1])
        events += (_slice(rank, threads, slice) for slice in slices)
        events += _counts(_activations(timeline, rank))
    events += _flows(timeline, inner)
    events += (event for counter in counters for event in _counts(counter))
    return {"traceEvents": events, "displayTimeUnit": "ms", **({"otherData": dict(about)} if about else {})}


def _headings(rank: int, name: str, threads: Sequence[str]) -> Iterator[Event]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for thread, thread_name in enumerate(threads):
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": thread_name}}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _time(seconds: float) -> float:
    """Microseconds, in eighths."""
    return round(seconds * _STEPS_PER_S) / 8


def _slice(rank: int, threads: Sequence[str], slice: TraceSlice) -> Event:
    place = {"pid": rank, "tid": threads.index(slice.thread)}
    start, end = _time(slice.start_s), _time(slice.end_s)
    event = {"ph": "X", **place, "name": slice.name, "ts": start, "dur": end - start}
    if slice.kind:
        event |= {"cat": ACTIONS[slice.kind], "cname": _COLOURS[slice.kind]}
    return event | ({"args": dict(slice.args)} if slice.args else {})


def _of_pipeline(timeline: Timeline, rank: int) -> Iterator[TraceSlice]:
    """Passes, waits and transfers of a rank."""
    schedule = timeline.schedule
    chunks = len(schedule.stage_to_rank) > schedule.pp
    for action, start_s, end_s in spans(timeline, rank):
        chunk = f", chunk {action.stage // schedule.pp}" if chunks else ""
        name = f"{ACTIONS[action.kind]} {action.microbatch}{chunk}"
        yield TraceSlice(COMPUTE, name, start_s, end_s, _arguments(timeline, action), action.kind)
    yield from _waits(timeline, rank)
    yield from _transfers(timeline, rank)


def _arguments(timeline: Timeline, action: Action) -> Fields:
    schedule = timeline.schedule
    direction, stage = divmod(action.stage, schedule.num_model_stages)
    chunk = stage // schedule.pp
    arguments = {"action": str(action), "micro-batch": action.microbatch, "stage": stage, "chunk": chunk}
    return arguments if schedule.num_directions == 1 else arguments | {"direction": direction}


def _waits(timeline: Timeline, rank: int) -> Iterator[TraceSlice]:
    """Gaps between computations, named by what ends them."""
    free_s = 0.0
    for index, (action, start_s, end_s) in enumerate(spans(timeline, rank)):
        if start_s - free_s > 1e-9 * timeline.makespan_s:
            awaited = "activation" if action.kind == "F" else "transfer" if action.kind == "W" else "gradient"
            name = "fill" if index == 0 else f"wait for {awaited}"
            yield TraceSlice("wait", name, free_s, start_s, {"until": str(action)})
        free_s = max(free_s, end_s)
    if timeline.makespan_s - free_s > 1e-9 * timeline.makespan_s:
        yield TraceSlice("wait", "drain", free_s, timeline.makespan_s)


def _transfers(timeline: Timeline, rank: int) -> Iterator[TraceSlice]:
    """Transfers of activations and of gradients to the rank, drawn while they are on their way.

    Slices of a thread must not overlap: a transfer that starts before the one in front of it has ended is drawn from
    that end, and its arguments hold its own seconds.
    """
    arrivals = zip(
        timeline.arrival_s[rank].tolist(), timeline.hop_s[rank].tolist(), timeline.schedule.ranks[rank], strict=True
    )
    last_s = {"activation": 0.0, "gradient": 0.0}
    for arrival_s, hop_s, action in sorted(arrivals):
        if hop_s > 0:
            what = "activation" if action.kind == "F" else "gradient"
            name, from_s = f"{what} {action.microbatch}", max(arrival_s - hop_s, last_s[what])
            yield TraceSlice(f"p2p {what}s", name, from_s, arrival_s, {"for": str(action), "seconds": hop_s})
            last_s[what] = arrival_s


COMPUTE = "compute"
TRACKS = (COMPUTE, "wait", "p2p activations", "p2p gradients")
"""The threads of every rank."""


def _insides(timeline: Timeline, rank: int, inner: Inner) -> Iterator[TraceSlice]:
    stages = timeline.schedule.num_model_stages
    for action, start_s, _ in spans(timeline, rank) if inner else ():
        for inside in inner.get((action.stage % stages, action.kind), ()):
            moved = inside._replace(start_s=start_s + inside.start_s, end_s=start_s + inside.end_s)
            if _time(moved.start_s) < _time(moved.end_s):
                yield moved


def _flows(timeline: Timeline, inner: Inner) -> Iterator[Event]:
    """Arrows from each pass to the one on another rank that consumes its result.

    A viewer binds an arrow's ends to the innermost slices around them, so that they lie where nothing is inside.
    """
    graph, timing, stages = timeline.graph, timeline.timing, timeline.schedule.num_model_stages
    for index in np.flatnonzero(graph.source > 0).tolist():
        ends = []
        for at, is_last in ((int(graph.source[index]) - 1, True), (index, False)):
            kind = KINDS[graph.kind[at]]
            inside = inner.get((int(graph.stage[at]) % stages, kind), ())
            start_s, end_s = float(timing.start_s[at]), float(timing.end_s[at])
            ends.append((int(graph.rank[at]), start_s, end_s, start_s + _quiet_s(inside, end_s - start_s, is_last)))
        (sender, *sent, leaves_s), (receiver, *received, arrives_s) = ends
        if sender == receiver or _time(sent[0]) == _time(sent[1]) or _time(received[0]) == _time(received[1]):
            continue
        flow = {"name": "activation" if graph.kind[index] == F else "gradient", "cat": "p2p", "id": index, "tid": 0}
        yield {"ph": "s", "pid": sender, "ts": _time(leaves_s), **flow}
        yield {"ph": "f", "bp": "e", "pid": receiver, "ts": _time(arrives_s), **flow}


def _quiet_s(inside: Sequence[TraceSlice], length_s: float, is_last: bool) -> float:
    """Seconds from the start of a pass to the middle of its last time, or first, with nothing inside."""
    edges = [0.0, *(edge for one in inside if one.thread == COMPUTE for edge in (one.start_s, one.end_s)), length_s]
    gaps = [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end - begin > 1 / 1e6]
    begin, end = (gaps or [(0.0, length_s)])[-1 if is_last else 0]
    return (begin + end) / 2


def _activations(timeline: Timeline, rank: int) -> TraceCounter:
    """Activations held, without those that go when others come."""
    unit = "activations" if timeline.saved_bytes is None else "bytes"
    times_s, held = timeline.activation_curves[rank]
    lasts = np.append(np.diff(times_s) > 0, True)
    return TraceCounter(rank, "activations held", times_s[lasts].tolist(), {unit: held[lasts].tolist()})


def _counts(counter: TraceCounter) -> Iterator[Event]:
    for time_s, *values in zip(counter.times_s, *counter.series.values(), strict=True):
        args = dict(zip(counter.series, values, strict=True))
        yield {"ph": "C", "pid": counter.rank, "name": counter.name, "ts": _time(time_s), "args": args}


GROUPS = {"tp": "tensor-parallel", "cp": "context-parallel", "ep": "expert-parallel"}
"""The threads of the exchanges inside passes."""
BESIDE = "data-parallel exchange"
"""The thread of what runs beside and behind the pipeline."""
SHOWN: dict[Together, str] = {
    "": "each by itself",
    "part": "those of a layer together",
    "pass": "those of a pass together",
}
"""How exchanges are shown, in the order in which it is tried."""
MAX_ACTIONS = 100_000
"""Actions of one step; a trace of so many has about 160 MB. 405B on 2,048 GPUs has 65,536."""
MAX_SLICES = 300_000
"""Exchanges of a step, each drawn twice; where there are more, those of a layer are one, and then those of a pass. So
many take 90 MB."""


def trace_text(plan: Plan, layout: PricedLayout) -> str:
    """`plan_trace` as the text of a file."""
    return json.dumps(plan_trace(plan, layout), separators=(",", ":"))


def plan_trace(plan: Plan, layout: PricedLayout) -> Fields:
    """The trace of one step of `layout`: one of the plan's, or such a one with fewer micro-batches."""
    priced = reprice(plan, layout)
    timeline = replay(priced.order, priced.durations)
    together, passes = _few_enough(priced)
    ranks = range(priced.order.pp)
    beside = [[TraceSlice(BESIDE, *span) for span in beside_pipeline(priced, timeline, rank)] for rank in ranks]
    return trace_events(
        timeline,
        beside=beside,
        rank_names=[f"stage {rank}" for rank in ranks],
        inner=_inner(priced, passes),
        counters=_counters(priced, timeline),
        about={
            "command": plan.command,
            "model": plan.model.name,
            "gpus": f"{plan.cluster.num_gpus:,} × {plan.cluster.hardware.name}",
            "trainer": layout.runtime_spec.name if layout.runtime_spec else plan.runtime,
            "layout": sizes(layout.parallelism),
            "schedule": layout.parallelism.schedule,
            "step_s": priced.step_s,
            "exchanges": SHOWN[together],
            "planner_version": plan.planner_version,
        },
    )


def _few_enough(priced: Candidate) -> tuple[Together, Passes]:
    """The exchanges of all passes, and what of them is shown as one."""
    times = Counter((action.stage, action.kind) for actions in priced.order.ranks for action in actions)
    stages = priced.order.num_model_stages
    for together in SHOWN:
        passes = exchanges_of_passes(priced, together)
        shown = sum(count * len(passes.get((stage % stages, kind), ())) for (stage, kind), count in times.items())
        if shown <= MAX_SLICES:
            break
    return together, passes


def _inner(priced: Candidate, passes: Passes) -> Inner:
    """Each exchange twice: on its group's thread with what hides of it, and inside the pass as far as it shows."""
    durations = priced.durations
    backward_s = [sum(both) for both in zip(durations.input_grad_s, durations.weight_grad_s, strict=True)]
    length_s = {"F": durations.forward_s, "I": durations.input_grad_s, "B": backward_s}
    inner = {}
    for (stage, kind), exchanges in passes.items():
        slices = []
        free_s = dict.fromkeys(GROUPS, 0.0)
        for one in exchanges:
            args = {"part": one.part, "exposed_s": round(one.exposed_s, 9), "hidden_s": round(one.hidden_s, 9)}
            shown_s = one.start_s, one.start_s + one.exposed_s
            slices.append(TraceSlice(COMPUTE, f"{GROUPS[one.group]}: {one.name}", *shown_s, {"part": one.part}))
            hidden_s = (0.0, one.hidden_s) if one.leads else (one.hidden_s, 0.0)
            # what hides beside another micro-batch is longer than there is room beside this one
            begin_s = max(free_s[one.group], shown_s[0] - hidden_s[0])
            end_s = max(begin_s, min(shown_s[1] + hidden_s[1], length_s[kind][stage]))
            free_s[one.group] = end_s
            slices.append(TraceSlice(GROUPS[one.group], one.name, begin_s, end_s, args))
        inner[stage, kind] = slices
    return inner


def _counters(priced: Candidate, timeline: Timeline) -> Iterator[TraceCounter]:
    """Memory of each rank: tensors, the reserve beside them, and the GPU's capacity."""
    capacity = priced.pricing.cluster.hardware.memory_bytes
    for curve in memory_curves(priced, timeline):
        times_s, allocated = curve.times_s.tolist(), curve.allocated_bytes.tolist()
        reserved = [curve.reserved_bytes] * len(times_s)
        yield TraceCounter(curve.rank, "memory", times_s, {"allocated bytes": allocated, "reserved bytes": reserved})
        yield TraceCounter(curve.rank, "memory capacity", [0.0, times_s[-1]], {"bytes": [capacity] * 2})


PROTOCOL = 4
"""The newest pickles that the viewer's own reader understands."""
BASE = 0x7F0000000000
"""The address of the only segment: any number that is no allocation's size."""
MICROSECONDS = 1e6


def snapshot(
    tensors: Sequence[MemoryTensor], events: Sequence[tuple[float, bool, int]], stage: int, model: str
) -> bytes:
    """The snapshot file of a stage; `events` are time in seconds, made or freed, and the tensor's place."""
    places, free, end = dict[int, int](), dict[int, list[int]](), BASE
    trace = []
    for time_s, is_made, number in events:
        size = tensors[number].bytes
        if not size:
            continue
        if is_made and free.get(size):
            places[number] = free[size].pop()
        elif is_made:
            places[number], end = end, end + size
        entry = {
            "addr": places[number], "size": size, "stream": 0, "time_us": round(time_s * MICROSECONDS),
            "frames": _frames(tensors[number], stage, model), "category": tensors[number].item,
        }  # fmt: skip
        if is_made:
            trace.append({"action": "alloc", **entry})
            continue
        free.setdefault(size, []).append(places.pop(number))
        trace += [{"action": action, **entry} for action in ("free_requested", "free_completed")]
    blocks = _blocks(tensors, places, end, stage, model)
    used = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    segment = {
        "device": 0, "address": BASE, "total_size": end - BASE, "allocated_size": used, "active_size": used,
        "requested_size": used, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": blocks,
    }  # fmt: skip
    # the viewer looks for a category of this name
    begin = {
        "action": "segment_alloc", "addr": BASE, "size": end - BASE, "stream": 0, "time_us": 0, "frames": [],
        "category": "unknown",
    }  # fmt: skip
    data = {"segments": [segment], "device_traces": [[begin, *trace]], "allocator_settings": {}}
    return pickle.dumps(data, protocol=PROTOCOL)


def _frames(tensor: MemoryTensor, stage: int, model: str) -> list[Fields]:
    """A made-up stack, innermost first: the tensor of a layer, the pass that makes it, the stage."""
    frames = [_frame(tensor.part or "stage", tensor.layer, f"{tensor.name}{tensor.sizes}")]
    if tensor.microbatch is not None:
        frames.append(_frame("micro-batch", tensor.microbatch, tensor.made_by.partition(" of ")[0]))
    return [*frames, _frame("stage", stage, f"{tensor.item} of {model}")]


def _frame(where: str, number: int | None, name: str) -> Fields:
    return {"filename": where, "line": number or 0, "name": name}


def _blocks(tensors: Sequence[MemoryTensor], places: dict[int, int], end: int, stage: int, model: str) -> list[Fields]:
    """All of the segment at the end of the step: what outlives it, and free blocks between."""
    held = {address: number for number, address in places.items()}
    borders = sorted({BASE, end, *held, *(address + tensors[number].bytes for address, number in held.items())})
    blocks = []
    for start, after in pairwise(borders):
        number = held.get(start)
        block = {"address": start, "size": after - start, "requested_size": after - start}
        if number is None:
            blocks.append({**block, "state": "inactive", "frames": []})
        else:
            frames = _frames(tensors[number], stage, model)
            blocks.append({**block, "state": "active_allocated", "frames": frames})
    return blocks
