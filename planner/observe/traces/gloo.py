"""Exchanges of gloo on a host, which name neither group nor peer: what threads and groups tell of them.

A group runs its collectives on threads of its own (two, by default), and threads are numbered in the order in which
groups were made, as `pg_config` lists them. Sends and receives run on the thread that asks for them. Between two ranks
it is known whom they go to; in a longer pipeline what a stage has just computed goes out and what it computes next
comes in, activations from the stage before and gradients from the one behind. What does not fit has no group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.observe.traces.groups import Group
from planner.observe.traces.intervals import Times
from planner.observe.traces.trace import Call, Events

PREFIX, SEND, RECEIVE = "gloo:", "gloo:send", "gloo:recv"
_THREADS = 2
"""Threads of a group in torch's ProcessGroupGloo, unless its options say otherwise."""

_FORWARD = re.compile(r"^(forward(_step|-compute)?|Forward \d+)$")
_BACKWARD = re.compile(r"^(backward(_step|-compute)?|Backward \d+)$")

Lanes = Sequence[tuple[int | str, int | str]]


def with_groups(
    events: Events, names: Sequence[str], lanes: Lanes, groups: Mapping[str, Group], rank: int | None, marks: Events
) -> tuple[Events, tuple[Call, ...]]:
    """The events of a host with a call for each of gloo's whose group is known, and those calls.

    `lanes` are (process, thread), `groups` in the order in which they were made, `marks` the annotations of passes.
    """
    mine = [group for group in groups.values() if rank in group.ranks and len(group.ranks) > 1]
    of_lane = _groups_of_lanes(events, names, lanes, [group for group in mine if group.label != "pp"])
    transfers = _Transfers.of(mine, names, marks)
    calls: dict[Call, int] = {}
    numbers = events.call.copy()
    for index in np.flatnonzero([names[name].startswith(PREFIX) for name in events.name.tolist()]).tolist():
        name, group, peers = names[events.name[index]], of_lane.get(int(events.lane[index])), None
        if name in (SEND, RECEIVE):
            peer = transfers.peer(rank, name, int(events.start_ns[index]), int(events.end_ns[index]))
            if peer is None or rank is None:
                continue
            group, peers = transfers.group, (rank, peer) if name == SEND else (peer, rank)
        if group is None:
            continue
        call = Call(name.removeprefix(PREFIX), group.name, 0, "", peers)
        numbers[index] = calls.setdefault(call, len(calls))
    return replace(events, call=numbers), tuple(calls)


def _groups_of_lanes(events: Events, names: Sequence[str], lanes: Lanes, groups: Sequence[Group]) -> dict[int, Group]:
    """The group of each thread that runs collectives; nothing where threads and groups do not pair off."""
    collective = [name.startswith(PREFIX) and name not in (SEND, RECEIVE) for name in names]
    used = np.unique(events.lane[np.array(collective, bool)[events.name]]).tolist() if len(events) else []
    threads = [lanes[lane] for lane in used]
    known = all(isinstance(thread, int) for _, thread in threads) and len({process for process, _ in threads}) == 1
    if not known or len(used) != _THREADS * len(groups):
        return {}
    ordered = sorted(used, key=lambda lane: int(lanes[lane][1]))
    return {lane: groups[place // _THREADS] for place, lane in enumerate(ordered)}


@dataclass(frozen=True)
class _Transfers:
    """The group in which a rank sends and receives, and its passes: starts, ends and whether each is a forward."""

    group: Group | None
    starts_ns: Times
    ends_ns: Times
    forward: NDArray[np.bool_]

    @classmethod
    def of(cls, groups: Sequence[Group], names: Sequence[str], marks: Events) -> _Transfers:
        """A pipeline, or the only ranks that there are where they are two."""
        likely = [group for group in groups if group.label == "pp"] or [g for g in groups if len(g.ranks) == 2]
        one = likely[0] if len({group.ranks for group in likely}) == 1 else None
        forward, backward = (np.array([bool(p.match(name)) for name in names], bool) for p in (_FORWARD, _BACKWARD))
        passes = marks.where((forward | backward)[marks.name]) if len(marks) else marks
        return cls(one, passes.start_ns, passes.end_ns, forward[passes.name] if len(passes) else np.zeros(0, bool))

    def peer(self, rank: int | None, name: str, start_ns: int, end_ns: int) -> int | None:
        """The rank at the other end of a transfer; None where it is not known."""
        if self.group is None or rank is None:
            return None
        ranks = self.group.ranks
        place = ranks.index(rank)
        if len(ranks) == 2:
            return ranks[1 - place]
        if name == SEND:
            at = int(np.searchsorted(self.ends_ns, start_ns, side="right")) - 1
        else:
            at = int(np.searchsorted(self.starts_ns, end_ns, side="left"))
        if not 0 <= at < len(self.forward):
            return None
        place += 1 if bool(self.forward[at]) == (name == SEND) else -1
        return ranks[place] if 0 <= place < len(ranks) else None
