"""Traces hold every action, wait and transfer, in microseconds, and their slices nest."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from planner.report.timeline.trace import TraceSlice, trace_events
from planner.schedule.orders import build_schedule
from planner.schedule.replay import Durations, replay


def events_of(name: str, pp: int, vpp: int, num_microbatches: int, **more: Any) -> list[dict[str, Any]]:
    ones = [1.0] * pp * vpp
    durations = Durations(ones, ones, ones, activation_bytes=[10.0] * pp * vpp, **more)
    trace = trace_events(replay(build_schedule(name, pp, vpp, num_microbatches), durations))
    json.dumps(trace, allow_nan=False)
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def test_actions_are_named_slices_of_their_rank() -> None:
    events = events_of("1f1b", 4, 1, 8)
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 3 and event["tid"] == 0]
    assert len(slices) == 16
    assert slices[1] == {
        "ph": "X",
        "pid": 3,
        "tid": 0,
        "name": "backward 0",
        "cat": "backward",
        "cname": "thread_state_runnable",
        "ts": 4e6,
        "dur": 2e6,
        "args": {"action": "3B0", "micro-batch": 0, "stage": 3, "chunk": 0},
    }
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2", "rank 3"}


def test_chunks_and_kinds_are_told_apart() -> None:
    names = {event["name"] for event in events_of("zb-v", 2, 2, 4) if event["ph"] == "X"}
    assert {"forward 0, chunk 0", "input gradient 0, chunk 1", "weight gradient 3, chunk 0", "fill", "drain"} <= names


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("p2p_s", [0.0, 0.25, 5.0])
def test_computation_and_waits_cover_the_step_and_no_thread_overlaps_itself(name: str, p2p_s: float) -> None:
    events = events_of(name, 4, 1, 8, p2p_s=p2p_s, blocking_p2p=p2p_s == 0.25)
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    end = max(end for spans in threads.values() for _, end in spans)
    for spans in threads.values():
        spans.sort()
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(spans))
    for rank in range(4):
        covered = sum(stop - start for thread in (0, 1) for start, stop in threads[rank, thread])
        assert covered == pytest.approx(end)


def test_transfers_are_drawn_on_the_receiver() -> None:
    events = events_of("1f1b", 2, 1, 2, p2p_s=0.25)
    arriving = [event for event in events if event["ph"] == "X" and event["pid"] == 1 and event["tid"] == 2]
    assert [(event["name"], event["ts"], event["dur"]) for event in arriving] == [
        ("activation 0", 1e6, 0.25e6),
        ("activation 1", 2e6, 0.25e6),
    ]
    assert not [event for event in events_of("1f1b", 2, 1, 2) if event["ph"] == "X" and event["tid"] in (2, 3)]


def test_memory_is_a_counter() -> None:
    events = events_of("1f1b", 4, 1, 8)
    held = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(held) == 40
    assert held[-1] == 0


def test_the_caller_adds_what_surrounds_the_pipeline() -> None:
    ones = [1.0, 1.0]
    timeline = replay(build_schedule("1f1b", 2, 1, 2), Durations(ones, ones, ones))
    extra = [TraceSlice(0, "data parallel", "reduce gradients", 9.0, 9.5)]
    events = trace_events(timeline, extra, rank_names=["stage 0", "stage 1"])["traceEvents"]
    (thread,) = {e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == "data parallel"}
    assert {"ph": "X", "pid": 0, "tid": thread, "name": "reduce gradients", "ts": 9e6, "dur": 0.5e6} in events
    assert events[0]["args"]["name"] == "stage 0"
