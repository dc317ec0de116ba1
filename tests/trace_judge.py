"""A judge of Chrome trace events, as strict as Perfetto, which drops slices that overlap and arrows that bind to none.

Perfetto's own reader is a binary from the network. The rules are those of the Trace Event Format (Google, 2016) and of
Perfetto's documentation of what it reads of it.
"""

import json
from collections import defaultdict
from typing import Any, NamedTuple

Event = dict[str, Any]


class Slice(NamedTuple):
    """A slice, and those around it."""

    event: Event
    start_ns: int
    end_ns: int
    depth: int

    @property
    def seconds(self) -> float:
        """Seconds that it takes."""
        return (self.end_ns - self.start_ns) / 1e9


def named(trace: dict[str, Any], slices: dict[tuple[int, int], list[Slice]]) -> dict[tuple[int, str], list[Slice]]:
    """The slices by process and name of the thread."""
    names = _threads(trace["traceEvents"])
    return {(thread[0], names[thread]): own for thread, own in slices.items()}


def judge(trace: dict[str, Any]) -> dict[tuple[int, int], list[Slice]]:
    """The slices of every thread, by process and thread; fails where a viewer would show another trace."""
    json.dumps(trace, allow_nan=False)
    events: list[Event] = trace["traceEvents"]
    assert {event["ph"] for event in events} <= set("XMCsf")
    threads = _threads(events)
    slices = {thread: _nested(own) for thread, own in _by_thread(events).items()}
    assert set(slices) <= set(threads), "every thread has a name"
    _check_flows(events, slices)
    _check_counters(events)
    return slices


def _ns(event: Event, name: str) -> int:
    """Whole nanoseconds, which the file's microseconds must be."""
    value = event[name] * 1000
    assert value == int(value) >= 0, event
    return int(value)


def _threads(events: list[Event]) -> dict[tuple[int, int], str]:
    """Names of threads; those of a process differ, and have the order of their numbers."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert order == {thread: thread[1] for thread in names}
    for process in {process for process, _ in names}:
        own = [name for thread, name in names.items() if thread[0] == process]
        assert len(own) == len(set(own))
    processes = [e["pid"] for e in events if e["name"] == "process_name"]
    assert len(processes) == len(set(processes))
    return names


def _by_thread(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    return threads


def _nested(events: list[Event]) -> list[Slice]:
    """The slices of a thread in time; each lies inside the one that is open, or begins when it has ended."""
    open_until: list[int] = []
    slices = []
    for event in sorted(events, key=lambda one: float(one["ts"])):  # what begins together stays in the file's order
        start, end = _ns(event, "ts"), _ns(event, "ts") + _ns(event, "dur")
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], event
        slices.append(Slice(event, start, end, len(open_until)))
        open_until.append(end)
    return slices


def _check_flows(events: list[Event], slices: dict[tuple[int, int], list[Slice]]) -> None:
    """Each arrow has one start and a later end, which lie inside slices that are no part of another."""
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(event["ph"] == "s" for event in events)
    bound: dict[tuple[int, int], list[tuple[int, Event]]] = defaultdict(list)
    for flow, start in starts.items():
        end = ends[flow]
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        for event in (start, end):
            bound[event["pid"], event["tid"]].append((_ns(event, "ts"), event))
    for thread, flows in bound.items():
        tops = iter(one for one in slices[thread] if one.depth == 0)
        inner = [one for one in slices[thread] if one.depth]
        around, inside = next(tops), 0
        for at, event in sorted(flows, key=lambda flow: flow[0]):
            while around.end_ns <= at:
                around = next(tops)
            assert around.start_ns <= at, event
            while inside < len(inner) and inner[inside].end_ns <= at:
                inside += 1
            assert inside == len(inner) or at < inner[inside].start_ns, event


def _check_counters(events: list[Event]) -> None:
    """Numbers of a counter come in time, with the same names in each."""
    last: dict[tuple[int, str], Event] = {}
    for event in events:
        if event["ph"] == "C":
            before = last.get((event["pid"], event["name"]), event)
            assert before["ts"] <= event["ts"]
            assert before["args"].keys() == event["args"].keys()
            last[event["pid"], event["name"]] = event
