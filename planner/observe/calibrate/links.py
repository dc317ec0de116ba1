"""The shares of their data-sheet rates that links reached in the collectives of traces and logs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from planner.layout.placement import groups_of
from planner.observe.calibrate.observed_run import PricedRun
from planner.observe.observation import Link
from planner.observe.traces.collectives import bus_factor, collective_of
from planner.observe.traces.results import RankReport
from planner.physics.communication import Kind, Places, collective_s, members_by_tier
from planner.profile.probed.plausible import LEAST_LINK_SHARE, MOST_LINK_SHARE, opinion_of_link
from planner.specs.cluster import ClusterSpec
from planner.specs.units import MIB
from planner.trainers.calibration import Calibration, Share

KINDS: dict[str, Kind] = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
}  # fmt: skip
"""Collectives by their names in traces; what SendRecv kernels take holds waits, which nothing takes apart."""
LEAST_DECIDED = 0.5
"""Least change of a collective's seconds by a change of a link's rate, for them to tell that rate: else latency or
other links decide."""
STEP = 0.01


class Timed(NamedTuple):
    """One kind of exchange with its seconds, in a group whose places are known."""

    group: str
    kind: Kind
    num_bytes: float
    seconds: float
    at_least: bool
    """True where the seconds hold waits, so that the link is at least as fast."""
    size: int
    places: Places


def link_shares(run: PricedRun, ranks: Sequence[RankReport], links: Sequence[Link]) -> dict[str, Share]:
    """For each tier that decides how long a collective takes, the share of its rate that the largest one reached.

    Tiers are taken innermost first: outer ones are told with the inner ones' measured shares.
    """
    timed = [*_of_traces(run, ranks), *_of_logs(run, links)]
    shares: dict[str, Share] = {}
    for level, tier in enumerate(run.cluster.tiers):
        cluster = Calibration(source="", efficiency_fraction=shares).of_cluster(run.cluster)
        told = defaultdict(list)
        for exchange in timed:
            if _outermost(exchange, cluster) == level and (share := _share(exchange, level, cluster)) is not None:
                told[exchange.num_bytes, exchange.kind, exchange.group].append((exchange, share))
        if told:
            shares[tier.name] = _judged(max(told.items(), key=lambda item: item[0][0])[1], tier.efficiency_fraction)
    return shares


def _judged(pairs: list[tuple[Timed, float]], own: float) -> Share:
    """The share that the largest collective reached, as the median of its ranks."""
    exchange = pairs[0][0]
    share, values = median(value for _, value in pairs), [value for _, value in pairs]
    spread = (max(values) - min(values)) / 2 / share
    source = f"{exchange.kind.replace('_', '-')} of {exchange.num_bytes / MIB:.1f} MiB over {exchange.size} ranks"
    if exchange.at_least and share < own:
        reason = "its seconds hold waits for other ranks: traces of all of them would take these apart"
        return Share(value=min(1.0, share), source=source, verdict="refused", reason=reason)
    return Share(value=min(1.0, share), source=source, **opinion_of_link(share, own, spread))


def _of_traces(run: PricedRun, ranks: Sequence[RankReport]) -> Iterator[Timed]:
    places = {group: (size, where) for group, size, where in _groups(run)}
    for rank in ranks:
        for timed in rank.collectives:
            known = places.get(timed.group)
            if known is None or timed.collective not in KINDS or not timed.num_bytes or timed.group_size != known[0]:
                continue
            seconds = timed.median_s if timed.transfer_s is None else timed.transfer_s
            if seconds > 0:
                kind = KINDS[timed.collective]
                yield Timed(timed.group, kind, timed.num_bytes, seconds, timed.at_least, *known)


def _of_logs(run: PricedRun, links: Sequence[Link]) -> Iterator[Timed]:
    """Collectives that a log times; it does not say the group, which is known where there is only one.
    A message may be one rank's part of the bytes, so that they follow from the rate that the log prints."""
    groups = list(_groups(run))
    if len(groups) != 1:
        return
    group, size, places = groups[0]
    for link in links:
        name = collective_of(link.op)
        if name in KINDS and link.seconds > 0:
            num_bytes = link.bus_bytes_per_s * link.seconds / bus_factor(name, size)
            yield Timed(group, KINDS[name], num_bytes, link.seconds, True, size, places)


def _groups(run: PricedRun) -> Iterator[tuple[str, int, Places]]:
    """Name, ranks and places of the groups that run collectives."""
    for group, size, places in groups_of(run.candidate().shape):
        if size > 1 and group != "pp":
            yield group, size, places


def _outermost(exchange: Timed, cluster: ClusterSpec) -> int:
    return [int(count) for count in members_by_tier(exchange.size, exchange.places, cluster.tiers)].index(exchange.size)


def _share(exchange: Timed, level: int, cluster: ClusterSpec) -> float | None:
    """The share of a tier's rate with which a collective takes as long as it did, from half of LEAST_LINK_SHARE to
    twice MOST_LINK_SHARE; None where something else than the tier's rate decides."""
    low, high = math.log(LEAST_LINK_SHARE / 2), math.log(2 * MOST_LINK_SHARE)
    for _ in range(40):  # the seconds fall as the share grows
        middle = (low + high) / 2
        low, high = (middle, high) if _seconds(exchange, level, middle, cluster) > exchange.seconds else (low, middle)
    ends = (_seconds(exchange, level, middle + side, cluster) for side in (-STEP, STEP))
    slower_s, faster_s = ends
    return math.exp(middle) if math.log(slower_s / faster_s) / (2 * STEP) >= LEAST_DECIDED else None


def _seconds(exchange: Timed, level: int, log_share: float, cluster: ClusterSpec) -> float:
    """Seconds of a collective where a tier reaches exp(log_share) of its rate."""
    tiers = list(cluster.tiers)
    factor = math.exp(log_share) / tiers[level].efficiency_fraction
    tiers[level] = tiers[level].model_copy(update={"gb_per_s": tiers[level].gb_per_s * factor})
    hardware = cluster.hardware.model_copy(update={"tiers": tuple(tiers), "gpus_per_node": cluster.node_size})
    changed = ClusterSpec(hardware=hardware, num_gpus=cluster.num_gpus)
    return float(collective_s(exchange.kind, exchange.num_bytes, exchange.size, exchange.places, changed))
