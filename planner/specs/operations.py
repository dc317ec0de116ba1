"""How a long run is operated: storage, failures, spare nodes, price. What is not given has a default with a source."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from planner.specs.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, Spec

Rate = Annotated[PositiveFloat, Field(le=1e9)]


class OperationsSpec(Spec):
    """The place where a run takes months; null where `planner/months/data/facts.yaml` has the default."""

    storage_gb_per_s: Rate | None = None
    """Rate at which all ranks together write a checkpoint, or read it, 10^9 bytes a second."""
    failures_per_1000_gpu_days: Annotated[NonNegativeFloat, Field(le=1e6)] | None = None
    """Unplanned interruptions of the job, per 1,000 days of one GPU."""
    num_spare_nodes: NonNegativeInt | None = None
    """Nodes that wait beside the job's own to replace those that fail; null: a pool that others share has one."""
    usd_per_gpu_hour: Annotated[NonNegativeFloat, Field(le=1e6)] | None = None
    """Price of one GPU for an hour; null: that of the hardware profile."""
