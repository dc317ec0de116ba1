"""The shares of their data-sheet rates that links reached in the exchanges of a probe."""

from __future__ import annotations

from statistics import median

from planner.physics.communication import Kind, joined_fraction, members_by_tier, waits_s
from planner.probe.result import ProbeResult, TimedExchange, stride_of
from planner.profile.probed.plausible import MOST_LINK_SHARE, opinion_of_link
from planner.specs.cluster import ClusterSpec
from planner.specs.units import GB, MIB
from planner.trainers.calibration import Share

MOST_LATENCY_FRACTION = 0.5
"""Largest share of an exchange's seconds that may be latency; else it says nothing about bandwidth."""


def link_shares(result: ProbeResult, cluster: ClusterSpec) -> dict[str, Share]:
    """For each tier that alone carried an exchange, the share of its rate that the largest such exchange reached."""
    run, shares_by_tier = result.run, dict[int, list[tuple[TimedExchange, float]]]()
    for exchange in (exchange for rank in result.ranks for exchange in rank.exchanges):
        stride = stride_of(exchange, run)
        level = None if stride is None else _tier_alone(exchange.size, stride, cluster)
        if level is None:
            continue
        share = _share(exchange, level, cluster)
        if share is not None:
            shares_by_tier.setdefault(level, []).append((exchange, share))
    return {cluster.tiers[level].name: _of_largest(pairs, level, cluster) for level, pairs in shares_by_tier.items()}


def _of_largest(pairs: list[tuple[TimedExchange, float]], level: int, cluster: ClusterSpec) -> Share:
    """The share that the largest exchange reached, as the median of its ranks."""
    largest = max(pairs, key=lambda pair: pair[0].num_bytes)[0]
    same = [pair for pair in pairs if (pair[0].name, pair[0].size) == (largest.name, largest.size)]
    share = median(share for _, share in same)
    spread = median(exchange.spread_fraction or 0.0 for exchange, _ in same)
    source = f"{largest.name} of {largest.num_bytes / MIB:.1f} MiB over {largest.size} ranks"
    if spread:
        source += f", its seconds known to {spread:.1%}"
    if 1 < share <= MOST_LINK_SHARE:
        source += f", {share:.1%} taken as all"
    opinion = opinion_of_link(share, cluster.tiers[level].efficiency_fraction, spread)
    return Share(value=min(1.0, share), source=source, **opinion)


def _tier_alone(size: int, stride: int, cluster: ClusterSpec) -> int | None:
    """The tier that joins all ranks of a group, if no lower tier joins any two of them."""
    members = [int(count) for count in members_by_tier(size, stride, cluster.tiers)]
    level = members.index(size)
    return level if size > 1 and (level == 0 or members[level - 1] == 1) else None


def _share(exchange: TimedExchange, level: int, cluster: ClusterSpec) -> float | None:
    """Share of the tier's rate that an exchange reached, without latency; None where most of its seconds are
    latency."""
    tier = cluster.tiers[level]
    kind: Kind = "all_reduce" if exchange.name.endswith("all-reduce") else "all_gather"
    latency_s = float(waits_s(kind, exchange.size, 1, exchange.size, tier, level == 0))
    if latency_s > MOST_LATENCY_FRACTION * exchange.seconds:
        return None
    moved = exchange.bus_gb_per_s * GB * exchange.seconds
    rate = tier.gb_per_s * GB / tier.oversubscription * float(joined_fraction(tier, exchange.size))
    return moved / (exchange.seconds - latency_s) / rate
