"""The figures that decide what a long run loses, each with an interval and its source (`data/facts.yaml`).

Failures by what they take with them, restarts, checkpoints, evaluation, and the step that months sustain.

The step that months of training sustain, beside the one that a benchmark would show, is

    sustained step = predicted step · factor

A benchmark is short, tuned and freshly started. Over months clocks fall with the temperature of the day, some node is
always slow, and data wait now and then. Failures, restarts, checkpoints and evaluation are no part of the factor: they
are goodput's. The factor is the median over published production runs of the measured step over the predicted one, so
that its interval holds the error of the prediction too.
"""

import math
from functools import cache
from typing import Any, Literal

import numpy as np

from planner.answer import SIGMAS_TO_END, PricedLayout, Sustained, half_width
from planner.record import record
from planner.shape import FloatArray
from planner.specs.base import NonNegativeFloat, Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.reading import shipped_table
from planner.specs.training import OperationsSpec
from planner.specs.units import GB


class Fact(Spec):
    """A figure with an interval that is meant to hold the truth in 80% of all cases."""

    value: NonNegativeFloat
    low: NonNegativeFloat
    high: NonNegativeFloat
    source: str

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm: that of the lognormal through both ends; 0 for what is known."""
        return half_width((self.low, self.high)) / SIGMAS_TO_END if self.low < self.high else 0.0

    def draws(self, normal: FloatArray) -> FloatArray:
        """Draws of the lognormal, from as many of a normal distribution."""
        drawn: FloatArray = self.value * np.exp(self.sigma * normal)
        return drawn

    def times(self, factor: float) -> "Fact":
        """The figure and its interval, multiplied."""
        return Fact(value=factor * self.value, low=factor * self.low, high=factor * self.high, source=self.source)


def stated(value: float) -> Fact:
    """A figure from the user, without an interval."""
    return Fact(value=value, low=value, high=value, source="given")


class Facts(Spec):
    """All figures of the file; the file says what each of them is."""

    sustained_factor: Fact
    """Seconds of a step over months, over those of a benchmark."""
    jitter_factor: Fact
    """Mean step over median step in runs without failures: the least that a sustained step is longer."""
    failures_per_1000_gpu_days: dict[str, Fact]
    """Unplanned interruptions, by generation of the GPU; `rack` where NVLink joins more than a node."""
    detection_s: Fact
    """Seconds until somebody, or something, notices that the job stands."""
    restart_s: Fact
    """Seconds for a new job of 1,024 GPUs to reach its first step, without reading the checkpoint."""
    standby_restart_s: Fact
    """The same where a spare node waits with the program started."""
    node_loss_fraction: Fact
    """Share of the interruptions after which a node has to be replaced."""
    gpu_fraction: Fact
    """Share of the lost nodes that are lost for a GPU, and not for anything else in them."""
    repair_s: Fact
    """Seconds until a lost node is back."""
    switch_failures_per_year: Fact
    """Failures of one switch in a year."""
    leaf_gpus: Fact
    """GPUs whose ports a leaf switch has."""
    leaf_nodes: Fact
    """Nodes that have a port on the same leaf switch, where each GPU of a node has a leaf of its own."""
    rack_switches: Fact
    """Switches that join the GPUs of a rack by NVLink."""
    storage_gb_per_s_per_gpu: Fact
    """Rate of a cluster's storage, over the number of its GPUs."""
    asynchronous_stall_s: Fact
    """Seconds that training stands still while a checkpoint is copied to host memory, to be written beside it."""
    evaluation_fraction: Fact
    """Share of the time that a run's own evaluations take."""


@cache
def load_facts() -> Facts:
    """The figures that come with the planner."""
    return Facts.model_validate(shipped_table("months/data/facts.yaml"))


SECONDS_PER_DAY = 86_400
_RESTART_GPUS, _RESTART_S_PER_DOUBLING, _RESTART_LEAST_S, _RESTART_MOST_S = 1024, 30.0, 120.0, 1200.0
_ENOUGH = 0.01
"""Probability that every spare node is in use, at which there are enough of them."""


@record(kw_only=True)
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
    facts = load_facts()
    given = operations
    rate = given.failures_per_1000_gpu_days
    storage = given.storage_gb_per_s
    # more ranks have more to tell each other
    grown_s = facts.restart_s.value + _RESTART_S_PER_DOUBLING * math.log2(num_gpus / _RESTART_GPUS)
    restart_s = min(max(grown_s, _RESTART_LEAST_S), _RESTART_MOST_S)
    return Losses(
        num_gpus=num_gpus,
        failures_per_1000_gpu_days=_failures(facts, cluster) if rate is None else stated(rate),
        detection_s=facts.detection_s,
        restart_s=facts.restart_s.times(restart_s / facts.restart_s.value),
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
    rates = facts.failures_per_1000_gpu_days
    silicon = cluster.hardware.architecture.lower()
    return rates["rack"] if cluster.is_rack else rates.get(silicon, rates["other"])


def all_in_repair(in_repair: Any, num_spare_nodes: int) -> Any:
    """Probability that no spare node is free: a Poisson number of nodes, `in_repair` on average, reaches their number.

    Failures are independent of each other, so that the number of nodes in repair has this distribution however long
    each repair takes (Palm). `in_repair` is a number, or an array.
    """
    term = np.exp(-in_repair)
    fewer = 0.0
    for count in range(num_spare_nodes):
        fewer = fewer + term
        term = term * in_repair / (count + 1)
    return np.maximum(0.0, 1.0 - fewer)


Taken = Literal["nothing", "gpu", "node", "switch"]
DAYS_PER_YEAR = 365.25


@record
class FailureKind:
    """One kind of failure."""

    taken: Taken
    per_day: Fact
    num_nodes: int
    """Nodes that the job loses: a GPU takes its node along."""
    source: str


def failure_kinds(losses: Losses, cluster: ClusterSpec) -> tuple[FailureKind, ...]:
    """The kinds of failures of a job, whose rates add up to that of all.

    Switches: leaf switches of the network, one for every 32 GPUs, each with a port of 32 nodes; in a rack that NVLink
    joins, the rack's own switches. A tier that joins fewer nodes than that is the switch's reach. Their failures are
    taken out of those that cost no node.
    """
    facts = load_facts()
    rate = losses.failures_per_day
    lost = losses.node_loss_fraction.value
    num_switches, num_nodes = _switches(cluster, losses.num_gpus)
    switch = facts.switch_failures_per_year.times(num_switches / DAYS_PER_YEAR)
    rest = max(rate.value * (1 - lost) - switch.value, 0.0)
    gpu = facts.gpu_fraction
    causes = losses.failures_per_1000_gpu_days.source
    return (
        FailureKind("nothing", rate.times(rest / rate.value if rate.value else 0.0), 0, causes),
        FailureKind("gpu", rate.times(lost * gpu.value), 1, gpu.source),
        FailureKind("node", rate.times(lost * (1 - gpu.value)), 1, gpu.source),
        FailureKind("switch", switch, num_nodes, switch.source),
    )


def _switches(cluster: ClusterSpec, num_gpus: int) -> tuple[int, int]:
    """Switches that the job's nodes hang on, and nodes that one of them takes along."""
    facts = load_facts()
    node = cluster.node_size
    if cluster.is_rack:
        racks = math.ceil(num_gpus / cluster.nvlink_domain_size)
        return racks * round(facts.rack_switches.value), math.ceil(cluster.nvlink_domain_size / node)
    if num_gpus <= node:
        return 0, 1
    inner = [tier.num_gpus for tier in cluster.tiers[1:] if tier.num_gpus is not None]
    reach = min(round(facts.leaf_nodes.value), *(math.ceil(size / node) for size in inner), math.ceil(num_gpus / node))
    return math.ceil(num_gpus / facts.leaf_gpus.value), reach


WIDEST_OF_RUNS = 0.16
"""Half-width of the widest benchmark interval among the runs that the factor was read from, but for GPUs that are known
from a data sheet only (DeepSeek-V3's); errors as large are in the factor's interval."""


def with_sustained(layout: PricedLayout, straggler_fraction: float = 0.0) -> PricedLayout:
    """The layout with its sustained step.

    Where the benchmark is less sure than those of the runs that the factor was read from, the excess is added to the
    factor's interval, as variances, at each end. A slow rank that the step already waits for is part of the factor,
    and is taken out of it, down to the jitter that clean runs show.
    """
    facts = load_facts()
    step = layout.step
    factor = max(facts.sustained_factor.value / (1 + straggler_fraction), facts.jitter_factor.value)
    step_s = factor * step.step_s
    benchmark_s = step.step_s_interval or (step.step_s, step.step_s)
    known = half_width((facts.sustained_factor.low, facts.sustained_factor.high))
    low, high = (
        math.hypot(known, math.sqrt(max(0.0, math.log(end_s / step.step_s) ** 2 - WIDEST_OF_RUNS**2)))
        for end_s in benchmark_s
    )
    found = Sustained(
        step_s=step_s,
        step_s_interval=(step_s * math.exp(-low), step_s * math.exp(high)),
        source=f"{factor:.3g} × the benchmark: {facts.sustained_factor.source}",
    )
    return layout.model_copy(update={"sustained": found})
