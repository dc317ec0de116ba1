"""The memory and the host's time of a probe's ranks, as numbers of a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from planner.physics.memory import communicators
from planner.probe.result import ProbeResult, RankResult
from planner.profile.probed.doubt import NORMAL_80
from planner.profile.probed.plausible import opinion_of_context, opinion_of_fragmentation, opinion_of_host
from planner.shape import Shape
from planner.specs.hardware import HardwareSpec
from planner.specs.units import GIB
from planner.trainers.calibration import Quantity, Share

COUNTED = ("static memory", "peak allocated")
"""Bytes that the planner counts, and that a probe compares."""


class Reserved(NamedTuple):
    """Memory that no tensor holds, and the error of what tensors were predicted to hold."""

    context_gib: Quantity | None = None
    fragmentation_fraction: Share | None = None
    width: float | None = None


def reserved(result: ProbeResult, hardware: HardwareSpec, shape: Shape) -> Reserved:
    """Memory in use on the device outside the allocator's blocks, and the allocator's blocks beyond what was
    allocated."""
    memories = [rank.memory for rank in result.ranks if rank.memory is not None]
    if not memories:
        return Reserved()
    num_communicators = 0.0 if result.mode == "stages" else float(communicators(shape))
    communicator_bytes = num_communicators * hardware.reserved.communicator_bytes
    outside_bytes = median(memory.device_used_bytes - memory.peak_reserved_bytes for memory in memories)
    context_gib = (outside_bytes - communicator_bytes) / GIB
    fraction = median(memory.peak_reserved_bytes / memory.peak_allocated_bytes - 1 for memory in memories)
    source = f"{len(memories)} ranks"
    context = Quantity(value=max(0.0, context_gib), source=source, **opinion_of_context(context_gib))
    held = Share(value=min(1.0, max(0.0, fraction)), source=source, **opinion_of_fragmentation(fraction))
    return Reserved(context, held, _width(result) if context.is_applied and held.is_applied else None)


def _width(result: ProbeResult) -> float | None:
    """Half-width of a rank's memory by the errors of the bytes that were counted; None where the probe judged none."""
    errors = [
        math.log(compared.measured / compared.predicted)
        for compared in result.comparisons
        if compared.name in COUNTED and compared.agrees is not None and min(compared.measured, compared.predicted) > 0
    ]
    return NORMAL_80 * math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else None


def host(ranks: Sequence[RankResult]) -> Quantity:
    """The host's seconds per micro-batch: time between actions in which a rank neither computed nor waited."""
    seconds_by_rank = []
    for rank in ranks:
        gaps = [after.ready_s - before.end_s for before, after in zip(rank.actions, rank.actions[1:], strict=False)]
        forwards = sum("F" in timed.action for timed in rank.actions)
        seconds_by_rank.append(sum(max(0.0, gap) for gap in gaps) / max(1, forwards))
    seconds = median(seconds_by_rank)
    return Quantity(value=seconds, source=f"between the actions of {len(ranks)} ranks", **opinion_of_host(seconds))
