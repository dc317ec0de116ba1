"""The result of a rehearsal: the bytes of a plan's stages as planned and as counted, read and written as JSON."""

from __future__ import annotations

from typing import Literal

from planner.probe.result import ComparedQuantity, PlanSlice
from planner.specs.base import Spec


class RehearsalResult(Spec):
    """Bytes that the probe's own stages allocate, beside the planner's price of eager torch."""

    schema_version: Literal[1] = 1
    architecture: str
    """The silicon whose kernels the rehearsal stands for."""
    torch_version: str
    inputs_sha256: str
    """Hash of the plan's inputs."""
    slice: PlanSlice
    tolerance_fraction: float
    comparisons: tuple[ComparedQuantity, ...]
    """Planned and counted; of stages those before a step and at its peak are judged, all else is shown."""

    @property
    def agrees(self) -> bool:
        """True if every judged quantity is within the tolerance."""
        return all(comparison.agrees is not False for comparison in self.comparisons)
