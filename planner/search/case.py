"""A case: all inputs of one search, as one value; and the time that the search has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planner.errors import SolverError
from planner.layout.evaluate import pricing_of
from planner.layout.variation import Variation
from planner.record import record
from planner.specs.base import filled
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import PINS, SearchLimits, TrainingSpec
from planner.trainers.spec import RuntimeSpec


@record
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
        return filled(chosen)

    def limited(self, **limits: Any) -> Case:
        """The same case with other limits."""
        return replace(self, limits=self.limits.model_copy(update=limits))

    def under(self, change: Variation) -> Case:
        """The case under a change."""
        return replace(
            self,
            training=self.training.model_copy(update=dict(change.training)),
            cluster=change.cluster or self.cluster,
            runtime=change.runtime or self.runtime,
            limits=self.limits.model_copy(update=dict(change.limits)),
        )

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

    def trained(self, **changes: Any) -> Case:
        """The same case with other fields of its training."""
        return replace(self, training=self.training.model_copy(update=changes))

    def with_batch(self, global_batch_size: int) -> Case:
        """The same case with another batch, in sequences."""
        return self.trained(global_batch_size=global_batch_size)

    def on_gpus(self, num_gpus: int) -> Case:
        """The same case on another number of the same GPUs."""
        return replace(self, cluster=self.cluster.model_copy(update={"num_gpus": num_gpus}))


PATIENCE_S = 300.0
"""Seconds that a search may take, whatever its limit, until it has a layout."""


class Deadline:
    """A moment by which a search ends, counted from when this object is made.

    A search that is `patient` goes on beyond it until it has a layout, for `PATIENCE_S` at most. `clock` returns
    seconds; tests pass one that counts how often it is called.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] | None = None, patient: bool = True) -> None:
        self.limit_s = limit_s
        self.patient = patient
        self._clock = clock or time.monotonic
        self._end_s = self._clock() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds left; negative when time is up."""
        return self._end_s - self._clock()

    @property
    def passed(self) -> bool:
        """True if time is up."""
        return self.left_s <= 0

    def left_for(self, has_layout: bool) -> float:
        """Seconds left for a search that has a layout or not."""
        more_s = PATIENCE_S - self.limit_s if self.patient and not has_layout else 0.0
        return self.left_s + max(more_s, 0.0)

    def gives_up(self, has_layout: bool) -> bool:
        """True if time is up for a search that has a layout or not.

        Raises SolverError if it has none.
        """
        if self.left_for(has_layout) > 0:
            return False
        if not has_layout:
            raise SolverError(
                f"time is up after {self.limit_s:g} s: no layout was found yet",
                "raise --time-limit, or pin axes to shrink the search",
            )
        return True
