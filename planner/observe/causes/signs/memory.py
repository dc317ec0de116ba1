"""Signs in memory: growth with the steps, more reserved than allocated, an allocation that fragments refused."""

from __future__ import annotations

import numpy as np

from planner.observe.causes.signs.seen import Seen
from planner.observe.causes.signs.sign import LEAST, MOST, Sign, large, sure
from planner.observe.measured import MemorySeries
from planner.observe.steady import slope_of
from planner.specs.units import GIB, MIB

_LEAST_ROWS = 6
_LEAST_RESERVED_BYTES = 2 * GIB
_FULL_FRACTION = 0.85
"""Share of a GPU's memory from which what the allocator keeps is missing elsewhere."""
_RESERVED_FRACTION = 0.2
"""Torch keeps what it frees: an eighth more than allocated is usual, and a fifth is worth a word."""


def grows(seen: Seen) -> Sign | None:
    """Memory that grows from step to step, in the second half of the run as in the first."""
    rows = [row for row in seen.case.observation.memory_series if len(row.num_bytes) >= _LEAST_ROWS]
    found = [_growth(row) for row in rows]
    return max(found, key=lambda sign: sign.strength, default=None)


def _growth(row: MemorySeries) -> Sign:
    """The median slope of all pairs (Theil and Sen) over both halves, against the noise around it."""
    steps, sizes = np.asarray(row.steps, float), np.asarray(row.num_bytes, float)
    half = len(steps) // 2
    slopes = [slope_of(steps[part], sizes[part]) for part in (slice(0, half + 1), slice(half, None))]
    slope = slope_of(steps, sizes)
    straight = sizes - slope * (steps - steps[0])
    noise = 1.4826 * float(np.median(np.abs(straight - np.median(straight))))
    growth = slope * float(steps[-1] - steps[0])
    # what warms up grows in the first half alone
    steady = min(growth, 2 * min(slopes) * float(steps[-1] - steps[0]))
    least = max(0.03 * float(np.median(sizes)), 3 * noise, MIB)
    rank = "" if row.rank is None else f" of rank {row.rank}"
    size = f"{growth / GIB:.2f} GiB" if growth > 0.1 * GIB else f"{growth / MIB:.1f} MiB"
    says = f"{row.kind} memory{rank} grows by {size} over {int(steps[-1] - steps[0]):,} steps, in both halves"
    return large(steady, least, least / 4, says, None, "" if row.rank is None else f"rank {row.rank}")


def reserved(seen: Seen) -> Sign | None:
    """Far more reserved by the allocator than allocated at the peak; the more so where it fills the GPU."""
    pairs = [
        (row.max_allocated_bytes, row.max_reserved_bytes)
        for row in seen.case.observation.memory
        if row.max_allocated_bytes and row.max_reserved_bytes
    ]
    if not pairs:
        return None
    allocated, kept = max(pairs, key=lambda pair: pair[1])
    share = (kept - allocated) / kept
    says = f"{kept / GIB:.1f} GiB reserved, {allocated / GIB:.1f} GiB allocated at the peak"
    if kept - allocated < _LEAST_RESERVED_BYTES:
        return Sign(LEAST, says)
    if seen.case.plan is None or kept < _FULL_FRACTION * seen.case.plan.cluster.hardware.memory_bytes:
        return Sign(sure(share, _RESERVED_FRACTION, 0.03), says)
    return large(share, _RESERVED_FRACTION, 0.03, says)


def retried(seen: Seen) -> Sign | None:
    """Allocations that found no block until the cache was freed."""
    count, observation = seen.case.observation.num_alloc_retries, seen.case.observation
    if count is None:
        return None
    says = f"the allocator freed its cache and tried again {count:,} times in {observation.num_steps:,} steps"
    return Sign(sure(count, 1.5, 1.0), says)


def refused(seen: Seen) -> Sign | None:
    """An allocation that failed although enough bytes lay free, in no one block."""
    snapshots = seen.case.recorded.snapshots if seen.case.recorded else ()
    broken = [s.out_of_memory for s in snapshots if s.out_of_memory is not None]
    if not broken:
        return None
    worst = max(broken, key=lambda oom: (oom.fragmented, oom.inactive_bytes))
    says = (
        f"{worst.requested_bytes / GIB:.1f} GiB were refused while {worst.inactive_bytes / GIB:.1f} GiB lay reserved "
        f"and free, {worst.largest_free_block_bytes / GIB:.1f} GiB in one block"
    )
    return Sign(MOST if worst.fragmented else 1 - MOST, says)


def above_plan(seen: Seen) -> Sign | None:
    """More memory than the tensors of the plan explain, with the room that its interval has."""
    observation, prediction = seen.case.observation, seen.case.prediction
    peak = observation.peak_memory_bytes
    if peak is None or prediction is None or not prediction.peak_memory_bytes:
        return None
    interval, planned = prediction.total_memory_interval, prediction.peak_memory_bytes
    room = (interval[1] - interval[0]) / 2 if interval else 0.05 * planned
    if observation.peak_memory_kind != "allocated":
        planned, room = (round(interval[1]), room / 4) if interval else (round(planned * 1.1), room)
    says = f"{(peak - planned) / GIB:.1f} GiB more {observation.peak_memory_kind} than predicted"
    return Sign(sure(peak - planned, room, max(room / 4, 1.0)), says)
