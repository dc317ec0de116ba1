"""A candidate is one layout with its prices; all layouts are judged as candidates.

The search makes candidates and keeps the fastest; a given layout and a saved plan become candidates too. Seconds and
memory of a layout, and the answer whether it fits, are properties of its candidate, each computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.layout.activations import activation_peaks_bytes, peaks_of_schedule
from planner.layout.outside_pipeline import OutsidePipeline, outside_pipeline
from planner.layout.seconds import Pipeline, durations_of, pipeline_s, run_pipeline
from planner.layout.split import Split, stage_costs
from planner.physics.cost import CostTable, PartCost
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import StageBytes, fixed_bytes, stage_memory
from planner.schedule.actions import Schedule
from planner.schedule.orders import SCHEDULES, build_schedule, placement
from planner.schedule.replay import Durations
from planner.shape import Shape

OUTSIDE_FIELDS = ("gradient_overlap_fraction", "parameter_overlap_fraction")
"""Fields of a runtime that no price of a stage depends on, only the seconds outside the pipeline."""


@dataclass(frozen=True)
class Candidate:
    """One layout: a shape with its prices, a split of the layers, and a schedule."""

    pricing: Pricing
    table: CostTable
    """Prices of the shape."""
    split: Split
    schedule: str
    made_order: Schedule | None = None
    """Action lists that replace those of the named schedule, where an order was made to measure."""
    rank_factors: tuple[float, ...] = ()
    """Factor on the seconds of each rank; empty where all ranks take as long as the table says."""

    @property
    def shape(self) -> Shape:
        """The parallel shape, whose sizes are numbers and not arrays."""
        return self.table.shape

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches in a step."""
        return int(self.shape.num_microbatches)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Rank of each virtual stage."""
        if self.made_order is not None:
            return tuple(self.made_order.stage_to_rank)
        return placement(self.schedule, int(self.shape.pp), int(self.shape.vpp))

    @property
    def order_name(self) -> str:
        """Name of the schedule that runs: that of the made order where there is one."""
        return self.made_order.name if self.made_order is not None else self.schedule

    @cached_property
    def order(self) -> Schedule:
        """Action lists of the whole step."""
        if self.made_order is not None:
            return self.made_order
        return build_schedule(self.schedule, int(self.shape.pp), int(self.shape.vpp), self.num_microbatches)

    @cached_property
    def costs(self) -> tuple[PartCost, ...]:
        """Cost of each virtual stage."""
        return tuple(stage_costs(self.table, self.pricing.model, self.split, self.placement, self.rank_factors))

    @cached_property
    def rank_costs(self) -> tuple[PartCost, ...]:
        """Cost of each rank: all of its chunks together."""
        return tuple(by_rank(self.costs, self.placement))

    @cached_property
    def durations(self) -> Durations:
        """Seconds of each virtual stage as the replay takes them."""
        return durations_of(self.pricing, self.table, self.costs, self.placement)

    @cached_property
    def outside(self) -> OutsidePipeline:
        """Seconds of a step outside the pipeline."""
        return outside_pipeline(self.pricing, self.table, self.rank_costs, self.order_name)

    @cached_property
    def step_s(self) -> float:
        """Seconds of one step: the pipeline's replay and what comes outside it."""
        if self.made_order is not None:
            return self.run().makespan_s + sum(self.outside)
        return self.pipeline_s + sum(self.outside)

    @cached_property
    def pipeline_s(self) -> float:
        """Seconds of the named schedule's pipeline."""
        if self._steps_overlap:
            return self.run().makespan_s
        return pipeline_s(self.shape, self.durations, self.schedule)

    def run(self, exact: bool = True, durations: Durations | None = None) -> Pipeline:
        """The replay of one step, with stages as long as planned or as `durations` says.

        Unless `exact`, only a few rounds are replayed, and all others take as long.
        """
        overlaps = self._steps_overlap
        is_new = exact or overlaps or self.made_order is not None or durations is not None
        known_s = None if is_new else self.pipeline_s
        durations = self.durations if durations is None else durations
        pipeline = run_pipeline(self.shape, durations, self.schedule, exact, self.made_order, known_s)
        return replace(pipeline, makespan_s=pipeline.makespan_s - pipeline.slant_s) if overlaps else pipeline

    @property
    def _steps_overlap(self) -> bool:
        """True where a step begins on the first rank while the last one ends the step before."""
        return self.pricing.runtime.validates_later and SCHEDULES[self.schedule].splits_backward

    def priced_as(self, pricing: Pricing) -> Candidate:
        """The same layout under another pricing, worked out once.

        Where no stage takes another time, its pipeline is not replayed.
        """
        for known in self._priced_as:
            if known.pricing == pricing:
                return known
        own, other = self.pricing.runtime, pricing.runtime
        kept = own.model_copy(update={name: getattr(other, name) for name in OUTSIDE_FIELDS})
        is_outside = other == kept and pricing == replace(self.pricing, runtime=other)
        table = self.table if is_outside else pricing.table(self.shape, self.split.priced_modes)
        again = replace(self, pricing=pricing, table=table)
        if self.made_order is None and again.durations == self.durations:
            vars(again)["pipeline_s"] = self.pipeline_s
        self._priced_as.append(again)
        return again

    @cached_property
    def _priced_as(self) -> list[Candidate]:
        """The results of `priced_as` so far."""
        return []

    @cached_property
    def activation_peaks_bytes(self) -> tuple[float, ...]:
        """The most bytes that micro-batches in flight hold on each rank, in the order of its actions."""
        held = self.durations.activation_bytes
        assert held is not None
        if self.made_order is not None:
            return tuple(activation_peaks_bytes(self.made_order, held))
        return tuple(peaks_of_schedule(self.shape, self.schedule, held))

    @cached_property
    def memory(self) -> tuple[StageBytes, ...]:
        """Peak memory of each rank, in bytes by item."""
        return tuple(
            stage_memory(self.pricing, self.table, cost, peak)
            for cost, peak in zip(self.rank_costs, self.activation_peaks_bytes, strict=True)
        )

    @cached_property
    def excess_bytes(self) -> tuple[float, ...]:
        """Bytes that each rank needs beyond its GPU's memory less headroom; negative where memory is left."""
        capacity = self.pricing.cluster.hardware.memory_bytes - self.pricing.headroom_bytes
        return tuple(stage.total_bytes - capacity for stage in self.memory)

    @property
    def fits(self) -> bool:
        """True where every rank's memory is enough."""
        return max(self.excess_bytes) <= 0

    @property
    def activation_room_bytes(self) -> list[float]:
        """Bytes that each rank has for activations beside all else at its peak."""
        fixed = float(self.table.usable_bytes - fixed_bytes(self.pricing, self.table))
        return [
            fixed - float(cost.static_bytes) - max(float(cost.transient_bytes), float(cost.logits_bytes))
            for cost in self.rank_costs
        ]

    def with_split(self, split: Split) -> Candidate:
        """A candidate of the same shape and schedule with another split."""
        return replace(self, split=split)


def by_rank(costs: Sequence[PartCost], placement: Sequence[int]) -> list[PartCost]:
    """Costs of all chunks of each rank together; `placement` has the rank of each virtual stage."""
    totals: dict[int, PartCost] = {}
    for cost, rank in zip(costs, placement, strict=True):
        totals[rank] = totals[rank] + cost if rank in totals else cost
    return [totals[rank] for rank in range(len(totals))]
