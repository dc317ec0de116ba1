"""Bytes that micro-batches in flight hold on each rank, counted along the order of its actions; times do not matter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.layout.seconds import STEADY_ROUNDS, is_long
from planner.schedule.actions import HELD_BY_PLACE, ActionList, Schedule
from planner.schedule.orders import SCHEDULES, build_schedule, placement
from planner.shape import FloatArray, Shape


def activation_peaks_bytes(order: Schedule, live_bytes: Sequence[float]) -> list[float]:
    """The most bytes that each rank holds in `order`; `live_bytes` has a micro-batch's bytes on each virtual stage."""
    live = np.asarray(live_bytes)
    return [float(np.cumsum(sign * live[stage]).max()) for stage, sign in _held_changes(order)]


@lru_cache(maxsize=64)
def _held_changes(order: Schedule) -> tuple[tuple[npt.NDArray[np.int32], FloatArray], ...]:
    """Virtual stage of each action, per rank, and +1 where an activation is kept or −1 where it is freed."""
    return tuple((actions.stage, HELD_BY_PLACE[actions.kind]) for actions in map(ActionList.of, order.ranks))


def peaks_of_schedule(shape: Shape, schedule: str, live_bytes: Sequence[float]) -> list[float]:
    """The most bytes that each rank holds in a named schedule.

    They are counted over so many micro-batches that the ranks hold all that they ever hold.
    """
    pp, vpp, wanted = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
    few, holds_all = STEADY_ROUNDS[0] * pp, SCHEDULES[schedule].holds_all
    if holds_all and is_long(shape):
        ranks = placement(schedule, pp, vpp)
        return [
            wanted * sum(live for live, at in zip(live_bytes, ranks, strict=True) if at == rank) for rank in range(pp)
        ]
    if is_long(shape):
        few += wanted % pp
    elif wanted % pp or holds_all:
        few = wanted
    return activation_peaks_bytes(build_schedule(schedule, pp, vpp, min(few, wanted)), live_bytes)
