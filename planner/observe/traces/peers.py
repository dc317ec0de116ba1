"""Several ranks' traces beside each other: clocks, waits apart from transfers, and stragglers.

The n-th collective of a group is the same one on all of its ranks. A collective cannot move data before its last rank
has come: from the latest start to a rank's end is transfer, what comes before on that rank is wait. Clocks of hosts
differ by more than a collective takes, so they are aligned first, by the ends of shared collectives, which are close.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.observe.traces.breakdown import NS, Sorted
from planner.observe.traces.collectives import kind_of
from planner.observe.traces.groups import axis_of_description
from planner.observe.traces.results import RankReport, Straggler
from planner.observe.traces.trace import RankTrace

SLOW_RATIO = 1.05
"""A rank that computes this much longer than the median of its stage is a straggler: clocks differ by 1 to 2%."""
_ENDS_TOGETHER = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}

Key = tuple[object, ...]


@dataclass(slots=True)
class Peers:
    """Waits and transfers that traces tell of each other, by the rank's place in the list and the event's index."""

    transfer_ns: list[dict[int, int]]
    wait_ns: list[dict[int, int]]
    late_ns: list[int] = field(default_factory=list)
    """Waiting of all other ranks for this one."""
    clock_error_s: float | None = None
    num_matched: int = 0

    @classmethod
    def of(cls, ranks: Sequence[Sorted]) -> Peers:
        """Match the collectives of all ranks and cut each into wait and transfer."""
        peers = cls([{} for _ in ranks], [{} for _ in ranks], [0] * len(ranks))
        shared = [entries for entries in _matched(ranks) if len(entries) > 1]
        offsets, peers.clock_error_s = _clocks(ranks, shared)
        for entries in shared:
            peers._cut(ranks, entries, offsets)
        return peers

    def _cut(self, ranks: Sequence[Sorted], entries: list[tuple[int, int]], offsets: list[int]) -> None:
        starts = [int(ranks[rank].trace.gpu.start_ns[index]) + offsets[rank] for rank, index in entries]
        latest = max(starts)
        for (rank, index), start in zip(entries, starts, strict=True):
            gpu = ranks[rank].trace.gpu
            length = int(gpu.end_ns[index] - gpu.start_ns[index])
            wait = min(latest - start, length)
            self.wait_ns[rank][index], self.transfer_ns[rank][index] = wait, length - wait
            self.late_ns[entries[starts.index(latest)][0]] += wait
        self.num_matched += 1


def _matched(ranks: Sequence[Sorted]) -> Iterable[list[tuple[int, int]]]:
    """Lists of (rank's place, event's index) that are one exchange, of groups whose ranks did equally many."""
    found: dict[Key, list[list[tuple[int, int]]]] = defaultdict(list)
    for place, events in enumerate(ranks):
        mine: dict[Key, list[tuple[int, int]]] = defaultdict(list)
        for index in np.flatnonzero(events.group >= 0).tolist():
            key = _key(events, index)
            if key is not None:
                mine[key].append((place, index))
        for key, entries in mine.items():
            found[key].append(entries)
    for lists in found.values():
        if len({len(entries) for entries in lists}) == 1:
            yield from ([entries[number] for entries in lists] for number in range(len(lists[0])))


def _key(events: Sorted, index: int) -> Key | None:
    """The key that ranks share of one exchange; None where the trace does not say its ranks."""
    trace = events.trace
    if trace.gpu.call[index] < 0:
        return ("world", kind_of(trace.names[trace.gpu.name[index]])) if _all_in_one(trace) else None
    call = trace.calls[trace.gpu.call[index]]
    group = trace.groups.get(call.group)
    if group is None or len(group.ranks) < 2:
        return None
    kind = kind_of(call.collective)
    if call.peers is not None:
        return (group.ranks, group.description, "send_recv", call.peers)
    if kind == "send_recv" and len(group.ranks) > 2:
        return None  # whose peer is whose is not said
    return (group.ranks, group.description, kind, call.num_elements if kind != "send_recv" else 0)


def _all_in_one(trace: RankTrace) -> bool:
    """True if every group holds all ranks, so that a collective that names no group is of all of them."""
    size = trace.world_size or 0
    groups = [group.ranks for group in trace.groups.values() if group.size != 1]
    return size == 2 or (bool(groups) and all(ranks == tuple(range(size)) for ranks in groups))


def _clocks(ranks: Sequence[Sorted], shared: Sequence[list[tuple[int, int]]]) -> tuple[list[int], float | None]:
    """Nanoseconds to add to each rank's times so that shared collectives end together, and the median misfit.

    Clocks that are no further apart than ends scatter are taken as one: ranks of one host have one, and the scatter
    would be added to every wait.
    """
    offsets = [events.trace.origin_ns - ranks[0].trace.origin_ns for events in ranks]
    ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for entries in shared:
        first, first_index = entries[0]
        trace = ranks[first].trace
        if _kind(trace, first_index) not in _ENDS_TOGETHER:
            continue
        for place, index in entries[1:]:
            ends[first, place].append(int(trace.gpu.end_ns[first_index]) - int(ranks[place].trace.gpu.end_ns[index]))
    known: set[int] = set()
    errors: list[int] = []
    for root in range(len(ranks)):  # one of each part of the ranks that no collective joins to those before
        if root in known:
            continue
        known.add(root)
        for _ in ranks:  # every round reaches the ranks that share a group with those known
            _align(ends, offsets, known)
    for (a, b), apart in ends.items():
        errors += [abs(offsets[a] + difference - offsets[b]) for difference in apart]
    return offsets, float(np.median(errors)) * NS if errors else None


def _align(ends: Mapping[tuple[int, int], list[int]], offsets: list[int], known: set[int]) -> None:
    """Set the clocks of ranks that share collectives with those known, beyond the scatter of their ends."""
    for (a, b), apart in ends.items():
        middle = int(np.median(apart))
        if (a in known) != (b in known):
            other, clock = (b, offsets[a] + middle) if a in known else (a, offsets[b] - middle)
            scatter = float(np.median(np.abs(np.array(apart) - middle)))
            if abs(clock - offsets[other]) > scatter:
                offsets[other] = clock
            known |= {a, b}


def _kind(trace: RankTrace, index: int) -> str:
    call = int(trace.gpu.call[index])
    return kind_of(trace.calls[call].collective if call >= 0 else trace.names[trace.gpu.name[index]])


def stage_of(events: Sorted, grid: Mapping[str, int] | None = None) -> int | None:
    """The pipeline stage of a rank: its place in its pipeline group, or in `grid`; None where neither is known.

    A trace that describes its groups, and none of a pipeline, is of a job with one stage.
    """
    rank, trace = events.trace.rank, events.trace
    if rank is None:
        return None
    for group in trace.groups.values():
        if group.label == "pp" and rank in group.ranks:
            return group.ranks.index(rank)
    if grid:
        return rank // (grid.get("tp", 1) * grid.get("cp", 1) * grid.get("dp", 1)) % grid.get("pp", 1)
    described = any(axis_of_description(group.description) for group in trace.groups.values())
    return 0 if described or trace.world_size == 1 else None


def pipeline_of(events: Sorted) -> int | None:
    """The first rank of a rank's pipeline group; None where the trace lists none."""
    rank = events.trace.rank
    groups = (group for group in events.trace.groups.values() if group.label == "pp" and rank in group.ranks)
    return next((group.ranks[0] for group in groups), None)


def stragglers(reports: Sequence[RankReport], late_ns: Sequence[int]) -> tuple[Straggler, ...]:
    """Each rank beside the ranks of its own stage; ranks of different stages hold different layers."""
    if len(reports) < 2:
        return ()
    compute = [_steady_compute_s(report) for report in reports]
    told = []
    for report, seconds, late in zip(reports, compute, late_ns, strict=True):
        others = [
            s for other, s in zip(reports, compute, strict=True) if other.stage == report.stage and other is not report
        ]
        middle = float(np.median(others)) if others else 0.0
        judged = report.stage is not None and bool(others)
        ratio = seconds / middle if middle else 1.0
        if report.rank is not None:
            told.append(
                Straggler(
                    rank=report.rank, stage=report.stage, compute_ratio=ratio,
                    late_s=late * NS / max(len(report.steps), 1), slow=judged and ratio > SLOW_RATIO,
                )
            )  # fmt: skip
    return tuple(sorted(told, key=lambda row: (-row.compute_ratio, row.rank)))


def _steady_compute_s(report: RankReport) -> float:
    times = [step.compute_s for step in report.steps if not step.warm_up]
    return float(np.median(times)) if times else 0.0
