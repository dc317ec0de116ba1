"""The failures of a job, by what they take with them: nothing, a GPU, a node, or all nodes on a switch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from planner.months.facts import Fact, load_facts
from planner.months.losses import Losses
from planner.specs.cluster import ClusterSpec

Taken = Literal["nothing", "gpu", "node", "switch"]
DAYS_PER_YEAR = 365.25


@dataclass(frozen=True, slots=True)
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
    facts, rate, lost = load_facts(), losses.failures_per_day, losses.node_loss_fraction.value
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
    facts, node = load_facts(), cluster.node_size
    if cluster.is_rack:
        racks = math.ceil(num_gpus / cluster.nvlink_domain_size)
        return racks * round(facts.rack_switches.value), math.ceil(cluster.nvlink_domain_size / node)
    if num_gpus <= node:
        return 0, 1
    inner = [tier.num_gpus for tier in cluster.tiers[1:] if tier.num_gpus is not None]
    reach = min(round(facts.leaf_nodes.value), *(math.ceil(size / node) for size in inner), math.ceil(num_gpus / node))
    return math.ceil(num_gpus / facts.leaf_gpus.value), reach
