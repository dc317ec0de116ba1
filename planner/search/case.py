"""A case: all inputs of one search, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from planner.layout.evaluate import pricing_of
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import PINS, SearchLimits, TrainingSpec
from planner.trainers.spec import RuntimeSpec


@dataclass(frozen=True, slots=True)
class Case:
    """The arguments of `plan`."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    runtime: RuntimeSpec
    limits: SearchLimits

    @property
    def pins(self) -> dict[str, tuple[Any, ...]]:
        """The axes that are not free, with the values they may take."""
        chosen = ((axis, getattr(self.limits, axis)) for axis in PINS)
        return {axis: values for axis, values in chosen if values is not None}

    def limited(self, **limits: Any) -> Case:
        """The same case with other limits."""
        return replace(self, limits=self.limits.model_copy(update=limits))

    @property
    def headroom_bytes(self) -> float:
        """Bytes that layouts leave free on every GPU, asked for or so that few run out of memory."""
        return pricing_of(self.model, self.cluster, self.training, self.runtime, self.limits).headroom_bytes

    @property
    def filling(self) -> Case:
        """The case whose layouts may fill the GPU, at any risk; one that asks for a headroom stays as it is."""
        return self if self.limits.memory_headroom_gib is not None else self.limited(memory_headroom_gib=0.0)

    def free(self) -> Case:
        """The same case without any pin."""
        return self.limited(**dict.fromkeys(self.pins))

    def with_batch(self, global_batch_size: int) -> Case:
        """The same case with another batch, in sequences."""
        return replace(self, training=self.training.model_copy(update={"global_batch_size": global_batch_size}))

    def on_gpus(self, num_gpus: int) -> Case:
        """The same case on another number of the same GPUs."""
        return replace(self, cluster=self.cluster.model_copy(update={"num_gpus": num_gpus}))
