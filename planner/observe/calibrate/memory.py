"""The memory that a run's ranks held beside their tensors, as numbers of a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from planner.layout.risk import MEMORY_WIDTH
from planner.observe.calibrate.priced import PricedRun
from planner.observe.measured import RankMemory
from planner.observe.observation import Observation
from planner.physics.memory import communicators
from planner.profile.probed.plausible import opinion_of_context, opinion_of_fragmentation
from planner.specs.hardware import HardwareSpec
from planner.specs.units import GIB
from planner.trainers.calibration import Quantity, Share


def reserved(run: PricedRun, observation: Observation) -> dict[str, Any]:
    """The fields of a calibration for memory outside the allocator, and for what it holds beyond what is allocated."""
    fields = {"context_gib": _context(run, observation.memory), "fragmentation_fraction": _held(observation.memory)}
    return {name: number for name, number in fields.items() if number is not None}


def _held(memory: Sequence[RankMemory]) -> Share | None:
    ratios = [
        rank.max_reserved_bytes / rank.max_allocated_bytes - 1
        for rank in memory
        if rank.max_reserved_bytes and rank.max_allocated_bytes
    ]
    if not ratios:
        return None
    fraction = median(ratios)
    opinion = opinion_of_fragmentation(fraction)
    return Share(value=min(1.0, max(0.0, fraction)), source=_ranks(len(ratios)), **opinion)


def _context(run: PricedRun, memory: Sequence[RankMemory]) -> Quantity | None:
    """Memory in use on the device beyond the allocator's, less what communicators take."""
    outside = [
        rank.device_bytes - rank.max_reserved_bytes for rank in memory if rank.device_bytes and rank.max_reserved_bytes
    ]
    if not outside:
        return None
    hardware = run.cluster.hardware
    exchanged = float(communicators(run.candidate().shape)) * hardware.reserved.communicator_bytes
    context_gib = (median(outside) - exchanged) / GIB
    opinion = opinion_of_context(context_gib)
    return Quantity(value=max(0.0, context_gib), source=_ranks(len(outside)), **opinion)


def _ranks(count: int) -> str:
    return f"{count} {'rank' if count == 1 else 'ranks'} of the run"


def width(run: PricedRun, observation: Observation | None) -> float:
    """The width of reserved memory after a run: as before, but no surer than the run's own peak was predicted."""
    error = 0.0
    if observation is not None and observation.peak_memory_kind == "allocated" and observation.peak_memory_bytes:
        planned = max(stage.peak_allocated_bytes for stage in run.candidate().memory)
        error = abs(math.log(observation.peak_memory_bytes / planned))
    return kept_width(run.cluster.hardware, error)


def kept_width(hardware: HardwareSpec, error: float = 0.0) -> float:
    """The width that reserved memory needs for a rank's memory to be as sure as before, now that kernels are `probed`,
    or `error` where that is wider: whole steps correct seconds, and one peak says little of another layout's."""
    before = math.hypot(MEMORY_WIDTH[hardware.efficiency.evidence], hardware.reserved.width)
    return math.sqrt(max(0.0, max(before, error) ** 2 - MEMORY_WIDTH["probed"] ** 2))
