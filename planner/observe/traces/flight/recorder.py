"""Flight-recorder dumps: which collective each group stands at, who is missing, what differs, and what was slow.

torch writes one dump a rank, as a pickle or as JSON. The n-th collective of a group is the same one on all of its
ranks, by `collective_seq_id`; transfers between two ranks have numbers of their own and are told, not matched.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from planner.errors import SpecError
from planner.observe.traces.flight.dump import Dump, Entry, read_dump
from planner.specs.base import Spec

NUM_SLOWEST = 5
_OWN_SIZES = re.compile(r"_?(broadcast|scatter|gather|reduce)|_?all_?to_?all.*")
"""Collectives whose ranks may give sizes of their own."""


class Outstanding(Spec):
    """A collective that at least one rank began and has not ended."""

    sequence: int
    collective: str
    waiting: tuple[int, ...]
    """Ranks that called it."""
    missing: tuple[int, ...]
    """Ranks of the group, with a dump, that did not: the likely culprits."""
    age_s: float | None
    """From the first rank's call to the newest time in any dump."""
    where: str
    """File, line and function of the first waiting rank's call."""


class Mismatch(Spec):
    """One collective that ranks called in different ways."""

    sequence: int
    field: str
    """`collective`, `dtype` or `sizes`."""
    values: dict[int, str]
    """The value of each rank."""


class Slow(Spec):
    """A collective that took long."""

    rank: int
    sequence: int
    collective: str
    seconds: float


class FlightGroup(Spec):
    """One process group in all dumps."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """Its members as its dumps say them, else the ranks whose dumps have entries of it."""
    num_collectives: int
    last_enqueued: dict[int, int]
    last_completed: dict[int, int]
    outstanding: tuple[Outstanding, ...]
    mismatches: tuple[Mismatch, ...]
    slowest: tuple[Slow, ...]
    """By durations that the dumps measure; empty without them."""


class FlightReport(Spec):
    """Groups in the dumps of some ranks, and the likely cause of a hang."""

    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    """Members of groups without a dump: they may have died, or were not given."""
    groups: tuple[FlightGroup, ...]
    verdict: str
    warnings: tuple[str, ...] = ()


def read_flight_recorder(paths: Sequence[str | Path]) -> FlightReport:
    """Hold the dumps of a job's ranks beside each other. Raises SpecError for other files, and for two of one rank."""
    dumps = [read_dump(path, number, len(paths)) for number, path in enumerate(paths)]
    ranks = tuple(sorted(dump.rank for dump in dumps))
    twice = next((a for a, b in pairwise(ranks) if a == b), None)
    if twice is not None:
        raise SpecError(f"flight recorder: two dumps are of rank {twice}", "keep one of them")
    keys = sorted({key for dump in dumps for key in dump.entries})
    newest = max((dump.newest_ns for dump in dumps), default=0)
    groups = tuple(_group(key, dumps, newest) for key in keys)
    members = {rank for group in groups for rank in group.ranks}
    return FlightReport(
        ranks=ranks, missing_ranks=tuple(sorted(members - set(ranks))), groups=groups, verdict=_verdict(groups),
        warnings=() if any(g.slowest for g in groups) else ("no durations: set TORCH_NCCL_ENABLE_TIMING=1",),
    )  # fmt: skip


def _group(key: tuple[str, str], dumps: Sequence[Dump], newest_ns: int) -> FlightGroup:
    entries = [entry for dump in dumps for entry in dump.entries.get(key, ())]
    present = tuple(sorted({entry.rank for entry in entries}))
    said = next((dump.members[key[0]] for dump in dumps if dump.members.get(key[0])), ())
    by_sequence: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        if not entry.point_to_point:
            by_sequence[entry.sequence].append(entry)
    given = {dump.rank for dump in dumps}
    expected = set(said or present) & given
    first_kept = {rank: min(e.sequence for e in entries if e.rank == rank) for rank in present}
    enqueued = {rank: max((e.sequence for e in entries if e.rank == rank), default=0) for rank in present}
    completed = {rank: max((e.sequence for e in entries if e.rank == rank and e.done), default=0) for rank in present}
    for dump in dumps:
        status = next((s for pg, s in dump.status.items() if dump.names.get(pg) == key), {})
        if "last_enqueued_collective" in status:
            enqueued[dump.rank] = max(status["last_enqueued_collective"], enqueued.get(dump.rank, 0))
        if "last_completed_collective" in status:
            completed[dump.rank] = max(status["last_completed_collective"], completed.get(dump.rank, 0))
    timed = sorted((e for e in entries if e.duration_s is not None), key=lambda e: -(e.duration_s or 0.0))
    return FlightGroup(
        name=key[0], description=key[1], ranks=tuple(sorted(said or present)), num_collectives=len(by_sequence),
        last_enqueued=enqueued, last_completed=completed,
        outstanding=tuple(_outstanding(by_sequence, expected, first_kept, completed, newest_ns)),
        mismatches=tuple(m for number in sorted(by_sequence) for m in _mismatches(number, by_sequence[number])),
        slowest=tuple(
            Slow(rank=e.rank, sequence=e.sequence, collective=e.collective, seconds=e.duration_s or 0.0)
            for e in timed[:NUM_SLOWEST]
        ),
    )  # fmt: skip


def _outstanding(
    by_sequence: dict[int, list[Entry]], expected: set[int], first_kept: dict[int, int], completed: dict[int, int],
    newest_ns: int,
) -> Iterator[Outstanding]:  # fmt: skip
    """Collectives that a rank waits in: called, neither completed nor retired there."""
    for number in sorted(by_sequence):
        called = by_sequence[number]
        waiting = [e for e in called if not e.done and completed.get(e.rank, 0) < number]
        # a rank whose ring begins later has called it and forgotten it
        absent = {r for r in expected - {e.rank for e in called} if first_kept.get(r, 0) <= number}
        if waiting:
            first = min(waiting, key=lambda e: e.created_ns)
            age = (newest_ns - first.created_ns) * 1e-9 if first.created_ns else None
            yield Outstanding(
                sequence=number, collective=first.collective, waiting=tuple(sorted(e.rank for e in waiting)),
                missing=tuple(sorted(absent)), age_s=age, where=first.where,
            )  # fmt: skip


def _mismatches(number: int, called: list[Entry]) -> Iterator[Mismatch]:
    """The field in which ranks differ; sizes may differ where a root gives or takes them."""
    values = {"collective": {e.rank: e.collective for e in called}, "dtype": {e.rank: e.dtype for e in called}}
    if not any(_OWN_SIZES.fullmatch(e.collective) for e in called):
        values["sizes"] = {e.rank: e.sizes for e in called}
    for field, of_rank in values.items():
        if len(set(of_rank.values())) > 1:
            yield Mismatch(sequence=number, field=field, values=of_rank)
            return  # other fields differ for that reason


def _verdict(groups: Sequence[FlightGroup]) -> str:
    """One sentence: a mismatch explains a hang, then a rank that never came, then what merely waits."""
    for group in groups:
        for mismatch in group.mismatches:
            told = "; ".join(f"rank {rank}: {value}" for rank, value in list(mismatch.values.items())[:4])
            return f"{_name(group)}: ranks differ in the {mismatch.field} of collective {mismatch.sequence}: {told}"
    for group in groups:
        for waits in group.outstanding:
            if waits.missing:
                missing = ", ".join(map(str, waits.missing[:8]))
                what = f"{waits.collective} number {waits.sequence}"
                called = ", ".join(map(str, waits.waiting[:8]))
                return f"{_name(group)}: rank {missing} never called {what}, in which rank {called} waits"
    waiting = [group for group in groups if group.outstanding]
    if waiting:
        waits = waiting[0].outstanding[0]
        return (
            f"{_name(waiting[0])}: all ranks given called {waits.collective} number {waits.sequence}; it has not ended"
        )
    return "no collective is outstanding, and all ranks called the same ones"


def _name(group: FlightGroup) -> str:
    return f"group {group.name}" + (f" ({group.description})" if group.description else "")
