"""The options of a probe: the device, the size of the run, and the tolerance of the verdict."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.probe.repeats import STEADY_S
from planner.probe.run import Device
from planner.schedule.actions import Schedule

DEFAULT_TOLERANCE = 0.1
"""Fraction of a prediction by which a measurement may differ."""

FEWEST_STEPS = 3
BUDGET_S = 20.0


class ProbeOptions(NamedTuple):
    """Options of one probe."""

    device: Device = "cpu"
    stages: Literal["all"] | int | None = None
    """None runs all stages together. Else one device runs one stage at a time: all distinct stages, or the one
    named."""
    hidden_size: int = 64
    """Hidden size of the small model on the CPU."""
    num_processes: int = 8
    """The most processes to start on the CPU."""
    most_layers: int = 2
    """The most layers of a virtual stage on the CPU."""
    sleep: bool = False
    """On the CPU, sleep for the plan's seconds, scaled, instead of computing."""
    ranks_per_gpu: int = 1
    """Ranks that share a GPU: one GPU then proves the order and the bytes of a pipeline, and no seconds."""
    backend: Literal["nccl", "gloo"] | None = None
    """The library that connects the ranks of GPUs, nccl if none is named."""
    num_steps: int | None = None
    """Number of steps to measure. None measures a GPU for at least a second and until medians are sure, a CPU for
    FEWEST_STEPS."""
    budget_s: float = BUDGET_S
    """The most seconds that the measured steps of a GPU take, unless there are fewer than FEWEST_STEPS."""
    tolerance_fraction: float = DEFAULT_TOLERANCE
    timeout_s: float = 120.0
    """Seconds without progress after which a rank counts as hanging."""
    order: Schedule | None = None
    """An order to run instead of the plan's, such as one read from a CSV file."""

    @property
    def repeats(self) -> dict[str, float]:
        """The fields of a run on GPUs that say how long it repeats its steps."""
        if self.num_steps is not None or self.device == "cpu":
            return {"num_steps": self.num_steps or FEWEST_STEPS}
        return {"num_steps": FEWEST_STEPS, "steady_s": STEADY_S, "most_s": self.budget_s}
