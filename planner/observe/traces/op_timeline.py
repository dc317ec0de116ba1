"""Operator timelines of many workers in one file, as the columns that torch's traces become.

MegaScale and tools like it write them in the shape of a Chrome trace: an event per forward, backward and exchange with
its step, a process per data-parallel rank, threads named `PP rank 1, TP rank 0, compute`. Steps may be a sample of a
run; the time between two of them is none of either.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from planner.observe.traces.groups import Group
from planner.observe.traces.json_events import EventScanner
from planner.observe.traces.source import Progress, Source
from planner.observe.traces.trace import NO_EVENTS, Call, Columns, Names, RankTrace

COMPUTING = ("forward-compute", "backward-compute", "backward-wgrad-compute", "optimizer")
FORWARDS, BACKWARDS = ("forward-send", "forward-recv"), ("backward-send", "backward-recv")
EXCHANGES = {
    "params-all-gather": ("all_gather", "dp"),
    "grads-reduce-scatter": ("reduce_scatter", "dp"),
    "separate-grads-all-reduce": ("all_reduce", "dp"),
    "embedding-grads-all-reduce": ("all_reduce", "embedding"),
    "layernorm-grads-all-reduce": ("all_reduce", "model"),
    "optimizer-clip-main-grad": ("all_reduce", "world"),
}
"""(collective, axis of its group) of the operators that exchange something outside of passes."""
_DESCRIPTIONS = {
    "pp": "pipeline", "dp": "data_parallel", "embedding": "embedding_group", "model": "model_parallel",
    "world": "default_pg",
}  # fmt: skip
_THREAD = re.compile(r"PP rank (\d{1,6}), TP rank (\d{1,6})\b")
_LATEST_US = 2.2e15
MOST_LANES = 10**6

Lane = tuple[int, int]
"""(process, thread)."""
Worker = tuple[int, int, int]
"""(data-parallel rank, pipeline stage, tensor-parallel rank)."""


def read_op_timeline(path: str | Path, progress: Progress | None = None) -> tuple[RankTrace, ...]:
    """The trace of each worker in one file. Raises SpecError for whatever is none."""
    names, lanes, workers = Names(), defaultdict[Lane, Columns](Columns), dict[Lane, Worker]()
    with Source(path, progress) as source:
        scanner = EventScanner(source)
        for event in scanner.events():
            lane = event.get("pid"), event.get("tid")
            if not (isinstance(lane[0], int) and isinstance(lane[1], int)):
                continue
            if event.get("ph") == "M":
                _name(event, (lane[0], lane[1]), workers)
            elif event.get("ph") == "X" and len(lanes) < MOST_LANES:
                _take(scanner, event, names, lanes[lane[0], lane[1]])
    seen = {worker for known, worker in workers.items() if known in lanes}
    of_worker = defaultdict[Worker, list[Lane]](list)
    for known, worker in sorted(workers.items()):
        if worker in seen:
            of_worker[worker].append(known)
    if not of_worker:
        raise source.broken("no thread is named `PP rank …, TP rank …`", "name a timeline that says its workers")
    return _Workers(source.where, names, lanes, of_worker).traces()


def _name(event: dict[str, Any], lane: Lane, workers: dict[Lane, Worker]) -> None:
    arguments = event.get("args")
    text = arguments.get("name") if isinstance(arguments, dict) and event.get("name") == "thread_name" else None
    match = _THREAD.search(text) if isinstance(text, str) else None
    if match is not None and len(workers) < MOST_LANES:
        workers[lane] = (lane[0], int(match[1]), int(match[2]))


def _take(scanner: EventScanner, event: dict[str, Any], names: Names, columns: Columns) -> None:
    """Keep an operator that is known, with its step in the place of its link."""
    name, arguments = event.get("name"), event.get("args")
    if not isinstance(name, str) or name not in _KNOWN:
        return
    step = arguments.get("step") if isinstance(arguments, dict) else None
    start, length = event.get("ts"), event.get("dur")
    if not isinstance(step, int) or not 0 <= step < 2**31:
        raise scanner.broken("an operator without the number of its step")
    for value in (start, length):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < _LATEST_US:
            raise scanner.broken("ts or dur is no number of microseconds")
    assert isinstance(start, (int, float))
    assert isinstance(length, (int, float))
    if length > 0:
        columns.add(round(start * 1e3), round((start + length) * 1e3), 0, names(name), step)


_KNOWN = frozenset((*COMPUTING, *FORWARDS, *BACKWARDS, *EXCHANGES))


class _Workers:
    """The workers of a file, numbered as their threads are, and the groups that they are in."""

    def __init__(
        self, where: str, names: Names, lanes: dict[Lane, Columns], of_worker: dict[Worker, list[Lane]]
    ) -> None:
        self.where, self.names, self.lanes, self.of_worker = where, names, lanes, of_worker
        self.rank = _numbered(of_worker)
        self.num_stages = 1 + max(stage for _, stage, _ in of_worker)
        self.members = defaultdict[tuple[object, ...], list[int]](list)
        for worker in sorted(of_worker):
            for axis in _DESCRIPTIONS:
                self.members[self._key(worker, axis)].append(self.rank[worker])
        bounds = defaultdict[int, list[int]](list)
        for columns in lanes.values():
            for step, start, end in zip(columns.link, columns.start_ns, columns.end_ns, strict=True):
                known = bounds[step]
                known[:] = [min(known[0], start), max(known[1], end)] if known else [start, end]
        self.steps = sorted(bounds.items())

    def traces(self) -> tuple[RankTrace, ...]:
        """One trace a worker, by rank."""
        return tuple(self._trace(worker) for worker in sorted(self.of_worker, key=lambda worker: self.rank[worker]))

    def _trace(self, worker: Worker) -> RankTrace:
        groups = {
            axis: Group(axis, text, tuple(self.members[self._key(worker, axis)]))
            for axis, text in _DESCRIPTIONS.items()
        }
        calls: dict[Call, int] = {}
        gpu, marks, computed = Columns(), Columns(), []
        for lane in self.of_worker[worker]:
            columns = self.lanes[lane]
            for start, end, name in zip(columns.start_ns, columns.end_ns, columns.name, strict=True):
                call = self._call(worker, self.names.texts[name])
                if call is None:
                    computed.append((start, end, name))
                else:
                    gpu.add(start, end, 0, name, -1, calls.setdefault(call, len(calls)))
        free = -(2**62)
        for start, end, name in sorted(computed):  # clocks of events overlap by microseconds, computing does not
            if end > free:
                gpu.add(max(start, free), end, 0, name)
                marks.add(max(start, free), end, 0, name)
                free = end
        for step, (start, end) in self.steps:
            marks.add(start, end, 0, self.names(f"step {step}"))
        events = gpu.events()[0]
        return RankTrace(
            where=self.where, rank=self.rank[worker], world_size=None, device="GPU", origin_ns=0,
            names=tuple(self.names.texts), groups=groups,
            calls=tuple(calls), gpu=events, copies=np.zeros(len(events), bool), launches=NO_EVENTS,
            operators=NO_EVENTS, marks=marks.events()[0], on_host=True, is_timeline=True,
        )  # fmt: skip

    def _call(self, worker: Worker, name: str) -> Call | None:
        """The exchange that an operator is; None for one that computes."""
        if name in EXCHANGES:
            collective, axis = EXCHANGES[name]
            return Call(collective, axis, 0, name)
        if name in COMPUTING:
            return None
        data, stage, tensor = worker
        ahead = 1 if name in ("forward-send", "backward-recv") else -1
        ends = worker, (data, (stage + ahead) % self.num_stages, tensor)
        mine, other = (self.rank.get(end, -1) for end in ends)
        return Call("send_recv", "pp", 0, "", (mine, other) if name.endswith("send") else (other, mine))

    def _key(self, worker: Worker, axis: str) -> tuple[object, ...]:
        """The workers of one group have one key."""
        data, stage, tensor = worker
        ends = stage in (0, self.num_stages - 1)
        return {
            "pp": (axis, data, tensor),
            "dp": (axis, stage, tensor),
            "embedding": (axis, data, tensor, True if ends else stage),
            "model": (axis, data, stage),
            "world": (axis,),
        }[axis]


def _numbered(of_worker: dict[Worker, list[Lane]]) -> dict[Worker, int]:
    """The rank of each worker: its threads' numbers over how many each has, or else its place."""
    most = max(len(lanes) for lanes in of_worker.values())
    ranks = {worker: {thread // most for _, thread in lanes} for worker, lanes in of_worker.items()}
    if all(len(own) == 1 for own in ranks.values()) and len(set.union(*ranks.values())) == len(ranks):
        return {worker: min(own) for worker, own in ranks.items()}
    return {worker: place for place, worker in enumerate(sorted(of_worker, key=lambda one: (one[1], one[0], one[2])))}
