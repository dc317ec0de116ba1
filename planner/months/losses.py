"""The figures that decide what a long run loses: failures, restarts, checkpoints, evaluation, each with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.months.facts import Fact, Facts, load_facts, stated
from planner.specs.cluster import ClusterSpec
from planner.specs.operations import OperationsSpec
from planner.specs.units import GB

SECONDS_PER_DAY = 86_400
_RESTART_GPUS, _RESTART_S_PER_DOUBLING, _RESTART_LEAST_S, _RESTART_MOST_S = 1024, 30.0, 120.0, 1200.0
_ENOUGH = 0.01
"""Probability that every spare node is in use, at which there are enough of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The figures that decide how much of its time a job trains."""

    num_gpus: int
    failures_per_1000_gpu_days: Fact
    detection_s: Fact
    restart_s: Fact
    """Seconds for a new job to reach its first step, without reading the checkpoint."""
    standby_restart_s: Fact
    node_loss_fraction: Fact
    repair_s: Fact
    num_spare_nodes: int | None
    """Nodes kept for this job; None: its cluster's pool always has one, for a new job."""
    checkpoint_bytes: float
    storage_gb_per_s: Fact
    asynchronous_stall_s: Fact | None
    """Seconds that training waits for a save; None where it waits until the checkpoint is written."""
    evaluation_fraction: Fact
    rate_without_node_fraction: float = 0.0
    """Share of its tokens a second that the job still trains where it goes on without a node that it lost; 0: the job
    waits."""

    def transfer_s(self, storage_gb_per_s: Any) -> Any:
        """Seconds in which all ranks together read or write a checkpoint: bytes / rate."""
        return self.checkpoint_bytes / (storage_gb_per_s * GB)

    @property
    def failures_per_day(self) -> Fact:
        return self.failures_per_1000_gpu_days.times(self.num_gpus / 1000)

    @property
    def num_spare_nodes_advised(self) -> int:
        """The fewest spare nodes of which one is free in 99% of the failures that take a node."""
        lost = self.node_loss_fraction.value * self.failures_per_day.value
        in_repair = lost * self.repair_s.value / SECONDS_PER_DAY
        count = 0
        while all_in_repair(in_repair, count) > _ENOUGH:
            count += 1
        return count

    @property
    def sources(self) -> dict[str, str]:
        """The origin of each figure, by the field of the answer that it decides."""
        figures = {
            "failures_per_day": self.failures_per_1000_gpu_days,
            "detection_s": self.detection_s,
            "restart_s": self.restart_s,
            "checkpoint_s": self.asynchronous_stall_s or self.storage_gb_per_s,
            "storage_gb_per_s": self.storage_gb_per_s,
            "evaluation_fraction": self.evaluation_fraction,
        }
        if self.num_spare_nodes is not None:
            figures |= {"node_loss_fraction": self.node_loss_fraction, "repair_s": self.repair_s}
            figures["standby_restart_s"] = self.standby_restart_s
        return {name: figure.source for name, figure in figures.items()} | {
            "checkpoint_interval_s": "Young and Daly; an hour at most",
        }


def losses_of(cluster: ClusterSpec, operations: OperationsSpec, num_gpus: int, checkpoint_bytes: float,
              asynchronous: bool) -> Losses:  # fmt: skip
    """The figures for a job of `num_gpus`: those given, else the defaults for its GPUs."""
    facts, given = load_facts(), operations
    rate, storage = given.failures_per_1000_gpu_days, given.storage_gb_per_s
    return Losses(
        num_gpus=num_gpus,
        failures_per_1000_gpu_days=_failures(facts, cluster) if rate is None else stated(rate),
        detection_s=facts.detection_s,
        restart_s=facts.restart_s.times(_restart_s(num_gpus, facts.restart_s.value) / facts.restart_s.value),
        standby_restart_s=facts.standby_restart_s,
        node_loss_fraction=facts.node_loss_fraction,
        repair_s=facts.repair_s,
        num_spare_nodes=given.num_spare_nodes,
        checkpoint_bytes=checkpoint_bytes,
        storage_gb_per_s=facts.storage_gb_per_s_per_gpu.times(num_gpus) if storage is None else stated(storage),
        asynchronous_stall_s=facts.asynchronous_stall_s if asynchronous else None,
        evaluation_fraction=facts.evaluation_fraction,
    )


def _failures(facts: Facts, cluster: ClusterSpec) -> Fact:
    rates, silicon = facts.failures_per_1000_gpu_days, cluster.hardware.architecture.lower()
    return rates["rack"] if cluster.is_rack else rates.get(silicon, rates["other"])


def _restart_s(num_gpus: int, base_s: float) -> float:
    """Seconds of a restart: more ranks have more to tell each other."""
    grown_s = base_s + _RESTART_S_PER_DOUBLING * math.log2(num_gpus / _RESTART_GPUS)
    return min(max(grown_s, _RESTART_LEAST_S), _RESTART_MOST_S)


def all_in_repair(in_repair: Any, num_spare_nodes: int) -> Any:
    """Probability that no spare node is free: a Poisson number of nodes, `in_repair` on average, reaches their number.

    Failures are independent of each other, so that the number of nodes in repair has this distribution however long
    each repair takes (Palm). `in_repair` is a number, or an array.
    """
    term, fewer = np.exp(-in_repair), 0.0
    for count in range(num_spare_nodes):
        fewer = fewer + term
        term = term * in_repair / (count + 1)
    return np.maximum(0.0, 1.0 - fewer)
