"""Exchanges of gloo on a host, which name neither group nor peer: what threads and groups tell of them.

A group runs its collectives on threads of its own (two, by default), and threads are numbered in the order in which
groups were made, as `pg_config` lists them. Sends and receives run on the thread that asks for them; in a pipeline of
two stages it is known whom they go to. What does not fit these rules exactly is left without a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.observe.traces.groups import Group
from planner.observe.traces.trace import Call, Events

PREFIX, SEND, RECEIVE = "gloo:", "gloo:send", "gloo:recv"
_THREADS = 2
"""Threads of a group in torch's ProcessGroupGloo, unless its options say otherwise."""

Lanes = Sequence[tuple[int | str, int | str]]


def with_groups(
    events: Events, names: Sequence[str], lanes: Lanes, groups: Mapping[str, Group], rank: int | None
) -> tuple[Events, tuple[Call, ...]]:
    """The events of a host with a call for each of gloo's whose group is known, and those calls.

    `lanes` are (process, thread), `groups` in the order in which they were made.
    """
    mine = [group for group in groups.values() if rank in group.ranks and len(group.ranks) > 1]
    of_lane = _groups_of_lanes(events, names, lanes, [group for group in mine if group.label != "pp"])
    pair = _pair(mine)
    calls: dict[Call, int] = {}
    numbers = events.call.copy()
    for index in np.flatnonzero([names[name].startswith(PREFIX) for name in events.name.tolist()]).tolist():
        name, group, peers = names[events.name[index]], of_lane.get(int(events.lane[index])), None
        if name in (SEND, RECEIVE) and pair is not None and rank is not None:
            group, peer = pair, pair.ranks[1 - pair.ranks.index(rank)]
            peers = (rank, peer) if name == SEND else (peer, rank)
        elif name in (SEND, RECEIVE) or group is None:
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


def _pair(groups: Sequence[Group]) -> Group | None:
    """The group of two ranks between which transfers are: a pipeline of two stages, or the only two ranks."""
    likely = [group for group in groups if group.label == "pp"] or list(groups)
    return likely[0] if len({group.ranks for group in likely}) == 1 and len(likely[0].ranks) == 2 else None
