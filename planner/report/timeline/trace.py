"""A timeline as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per pipeline rank, with a thread each for computation, waiting, transfers and whatever the caller adds (such
as data-parallel exchanges), and a counter of activations held. Times in the file are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from planner.schedule.actions import Action
from planner.schedule.timeline import Timeline

COMPUTE, WAIT, ACTIVATIONS, GRADIENTS = "compute", "wait", "p2p activations", "p2p gradients"
_THREADS = (COMPUTE, WAIT, ACTIVATIONS, GRADIENTS)
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_COLOURS = {"F": "thread_state_running", "B": "thread_state_runnable", "I": "thread_state_runnable", "W": "yellow"}
_MICROSECONDS = 1e6

Event = dict[str, Any]


class TraceSlice(NamedTuple):
    """Something beside the pipeline to be shown, such as the gradient reduction behind the last backward."""

    rank: int
    thread: str
    name: str
    start_s: float
    end_s: float


def trace_events(
    timeline: Timeline,
    extra: Iterable[TraceSlice] = (),
    rank_names: Sequence[str] = (),
    counts_bytes: bool = True,
) -> dict[str, Any]:
    """The trace as a JSON object.

    `rank_names` replaces "rank 0" and so on; without counts_bytes the counter is of activations, not of bytes.
    """
    pp = timeline.schedule.pp
    slices = list(extra)
    threads = [*_THREADS, *dict.fromkeys(slice.thread for slice in slices if slice.thread not in _THREADS)]
    events: list[Event] = []
    for rank in range(pp):
        name = rank_names[rank] if rank_names else f"rank {rank}"
        events += _headings(rank, name, threads)
        events += _computation(timeline, rank)
        events += _waits(timeline, rank)
        events += _transfers(timeline, rank)
        events += _memory(timeline, rank, "bytes" if counts_bytes else "activations")
    for extra_slice in slices:
        thread = threads.index(extra_slice.thread)
        events.append(_slice(extra_slice.rank, thread, extra_slice.name, extra_slice.start_s, extra_slice.end_s))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _headings(rank: int, name: str, threads: Sequence[str]) -> Iterator[Event]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for thread, thread_name in enumerate(threads):
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": thread_name}}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slice(rank: int, thread: int, name: str, start_s: float, end_s: float, **more: Any) -> Event:
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "ts": float(start_s) * _MICROSECONDS,
        "dur": float(end_s - start_s) * _MICROSECONDS,
        **more,
    }


def _computation(timeline: Timeline, rank: int) -> Iterator[Event]:
    spans = zip(timeline.schedule.ranks[rank], timeline.start_s[rank], timeline.end_s[rank], strict=True)
    for action, start_s, end_s in spans:
        yield _slice(
            rank,
            _THREADS.index(COMPUTE),
            f"{_NAMES[action.kind]} {action.microbatch}{_chunk(timeline, action)}",
            start_s,
            end_s,
            cat=_NAMES[action.kind],
            cname=_COLOURS[action.kind],
            args=_arguments(timeline, action),
        )


def _chunk(timeline: Timeline, action: Action) -> str:
    schedule = timeline.schedule
    return f", chunk {action.stage // schedule.pp}" if len(schedule.stage_to_rank) > schedule.pp else ""


def _arguments(timeline: Timeline, action: Action) -> dict[str, Any]:
    schedule = timeline.schedule
    direction, stage = divmod(action.stage, schedule.num_model_stages)
    chunk = stage // schedule.pp
    arguments = {"action": str(action), "micro-batch": action.microbatch, "stage": stage, "chunk": chunk}
    return arguments if schedule.num_directions == 1 else arguments | {"direction": direction}


def _waits(timeline: Timeline, rank: int) -> Iterator[Event]:
    """Gaps between computations, named by what ends them."""
    free_s = 0.0
    spans = zip(timeline.schedule.ranks[rank], timeline.start_s[rank], timeline.end_s[rank], strict=True)
    for index, (action, start_s, end_s) in enumerate(spans):
        if start_s - free_s > 1e-9 * timeline.makespan_s:
            awaited = "activation" if action.kind == "F" else "transfer" if action.kind == "W" else "gradient"
            name = "fill" if index == 0 else f"wait for {awaited}"
            yield _slice(rank, _THREADS.index(WAIT), name, free_s, start_s, args={"until": str(action)})
        free_s = max(free_s, float(end_s))
    if timeline.makespan_s - free_s > 1e-9 * timeline.makespan_s:
        yield _slice(rank, _THREADS.index(WAIT), "drain", free_s, timeline.makespan_s)


def _transfers(timeline: Timeline, rank: int) -> Iterator[Event]:
    """Transfers to the rank, drawn while they are on their way.

    Slices of a thread must not overlap: a transfer that starts before the one in front of it has ended is drawn from
    that end, and its arguments hold its own seconds.
    """
    spans = zip(timeline.schedule.ranks[rank], timeline.arrival_s[rank], timeline.hop_s[rank], strict=True)
    last_s = {ACTIVATIONS: 0.0, GRADIENTS: 0.0}
    for arrival_s, hop_s, action in sorted((arrival, hop, action) for action, arrival, hop in spans if hop > 0):
        thread = ACTIVATIONS if action.kind == "F" else GRADIENTS
        name = f"{'activation' if action.kind == 'F' else 'gradient'} {action.microbatch}"
        start_s = max(arrival_s - hop_s, last_s[thread])
        arguments = {"for": str(action), "seconds": float(hop_s)}
        yield _slice(rank, _THREADS.index(thread), name, start_s, arrival_s, args=arguments)
        last_s[thread] = arrival_s


def _memory(timeline: Timeline, rank: int, unit: str) -> Iterator[Event]:
    times_s, held_bytes = timeline.activation_times_s[rank], timeline.activation_held_bytes[rank]
    for index, (time_s, value) in enumerate(zip(times_s.tolist(), held_bytes.tolist(), strict=True)):
        if index + 1 == len(times_s) or times_s[index + 1] > time_s:
            yield {
                "ph": "C",
                "pid": rank,
                "name": "activations held",
                "ts": time_s * _MICROSECONDS,
                "args": {unit: value},
            }
