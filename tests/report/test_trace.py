"""Traces hold every action, wait and transfer, in microseconds, and their slices nest."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from trace_judge import judge, named

from planner.report.trace import COMPUTE, InnerSlice, TraceCounter, TraceSlice, trace_events
from planner.schedule.orders import build_schedule
from planner.schedule.replay import Durations, replay


def events_of(name: str, pp: int, vpp: int, num_microbatches: int, **more: Any) -> list[dict[str, Any]]:
    ones = [1.0] * pp * vpp
    durations = Durations(ones, ones, ones, activation_bytes=[10.0] * pp * vpp, **more)
    trace = trace_events(replay(build_schedule(name, pp, vpp, num_microbatches), durations))
    judge(trace)
    return trace["traceEvents"]


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


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_arrows_lead_from_each_result_to_what_consumes_it(name: str) -> None:
    vpp = 2 if name == "zb-v" else 1
    events = events_of(name, 4, vpp, 8, p2p_s=0.25)
    slices = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    starts, ends = ({event["id"]: event for event in events if event["ph"] == phase} for phase in "sf")
    assert len(starts) == 2 * 3 * vpp * 8  # three boundaries that cross ranks, there and back, for each round
    for flow, start in starts.items():
        sent, received = (
            next(one for one in slices if one["pid"] == end["pid"] and one["ts"] <= end["ts"] < one["ts"] + one["dur"])
            for end in (start, ends[flow])
        )
        assert sent["args"]["micro-batch"] == received["args"]["micro-batch"]
        step = 1 if start["name"] == "activation" else -1
        assert received["args"]["stage"] == sent["args"]["stage"] + step
        assert sent["ts"] + sent["dur"] + 0.25e6 <= received["ts"]


def test_what_is_inside_a_pass_lies_in_every_such_pass_and_arrows_keep_clear_of_it() -> None:
    ones = [1.0, 1.0]
    timeline = replay(build_schedule("1f1b", 2, 1, 2), Durations(ones, ones, ones))
    inner = {
        (0, "F"): [
            InnerSlice(COMPUTE, "tp: gather", 0.0, 0.25),
            InnerSlice("tensor-parallel", "gather", 0.0, 0.5, {"hidden_s": 0.25}),
            InnerSlice(COMPUTE, "tp: scatter", 0.75, 1.0),
        ]
    }
    trace = trace_events(timeline, inner=inner)
    slices = named(trace, judge(trace))
    assert [(one.start_ns, one.depth) for one in slices[0, "compute"] if one.event["name"] == "tp: gather"] == [
        (0, 1),
        (1_000_000_000, 1),
    ]
    assert [one.seconds for one in slices[0, "tensor-parallel"]] == [0.5, 0.5]
    starts = [event["ts"] for event in trace["traceEvents"] if event["ph"] == "s" and event["pid"] == 0]
    assert starts == [0.5e6, 1.5e6]


def test_counters_are_what_the_caller_gives() -> None:
    timeline = replay(build_schedule("gpipe", 1, 1, 1), Durations([1.0], [1.0], [1.0]))
    counter = TraceCounter(0, "memory", [0.0, 1.0], {"allocated": [1.0, 2.0], "reserved": [3.0, 3.0]})
    trace = trace_events(timeline, counters=[counter], about={"model": "toy"})
    judge(trace)
    counted = [event for event in trace["traceEvents"] if event["name"] == "memory"]
    assert [(event["ts"], event["args"]) for event in counted] == [
        (0, {"allocated": 1.0, "reserved": 3.0}),
        (1e6, {"allocated": 2.0, "reserved": 3.0}),
    ]
    assert trace["otherData"] == {"model": "toy"}
