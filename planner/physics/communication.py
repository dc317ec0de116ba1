"""Seconds of a collective: which links a group's ranks are joined by, and how long the bytes take over them.

Ranks are numbered with tp innermost, then cp, dp, pp (experts: etp, ep, expert-dp, pp), as Megatron and torchtitan do.
A group of n ranks a `stride` apart has min(n, D / stride) members under a tier of D GPUs; what they exchange among
themselves goes over that tier, and the rest over the next.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from planner.physics.operators import BF16, NARROW_BYTES, Collective, Group
from planner.shape import Number, Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import LinkTier

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring"]


def members_by_tier(size: Number, stride: Number, tiers: tuple[LinkTier, ...]) -> list[Number]:
    """How many of a group's ranks share one unit of each tier, innermost first; the last is the whole group."""
    counts: list[Number] = []
    for tier in tiers[:-1]:
        assert tier.num_gpus is not None
        counts.append(np.clip(np.floor(tier.num_gpus / stride), 1, size))
    return [*counts, size]


def collective_s(
    kind: Kind,
    num_bytes: Number,
    size: Number,
    stride: Number,
    cluster: ClusterSpec,
    inner_factor: float = 1.0,
    exchanges: Number = 1.0,
) -> Number:
    """Seconds of `exchanges` that move `num_bytes` in all over `size` ranks a `stride` apart; 0 for one rank, or none.

    all_gather, reduce_scatter and ring: at each tier the (g−1)/g of the tensor that a unit lacks arrives through the
    `inner` members already gathered below: (g−1)/g · S / inner / bandwidth, g = members / inner. all_reduce is twice
    that; all_to_all sends each tier its peers' share of S. Beside, each exchange takes hops · latency (`num_hops`).
    """
    passes = 2 if kind == "all_reduce" else 1
    seconds: Number = 0.0
    inner: Number = 1.0
    for level, (tier, members) in enumerate(
        zip(cluster.tiers, members_by_tier(size, stride, cluster.tiers), strict=True)
    ):
        if kind == "all_to_all":
            moved = num_bytes * (members - inner) / size
        else:
            moved = passes * num_bytes * (1 - inner / members) / inner
        slow = inner_factor if level == 0 else 1.0
        waited_s = exchanges * num_hops(kind, size, inner, members, level == 0) * tier.latency_s
        seconds = seconds + slow * moved / bytes_per_s_among(tier, members) + waited_s
        inner = members
    return seconds * (num_bytes > 0) * (size > 1)


def joined_fraction(tier: LinkTier, members: Number) -> Number:
    """Of the tier's rate, what `members` GPUs under it have: all of it through a switch, else n − 1 links at most."""
    if tier.link_gb_per_s is None:
        return 1.0
    return np.minimum((np.maximum(members, 2) - 1) * tier.link_gb_per_s / tier.gb_per_s, 1.0)


def bytes_per_s_among(tier: LinkTier, members: Number) -> Number:
    """What each of `members` GPUs under one tier sends to the others in a second."""
    return tier.bytes_per_s * joined_fraction(tier, members)


def num_hops(kind: Kind, size: Number, inner: Number, members: Number, innermost: bool) -> Number:
    """Hops of one exchange over `size` ranks on a tier that joins units of `inner` ranks to units of `members`.

    One in an all_to_all. An all_reduce goes up and down a chain of members / inner on the innermost tier, a tree of
    them on others. The rest pass all ranks in one ring, of which this tier has so many links: NCCL has no trees for
    them.
    """
    if kind == "all_to_all":
        return 1.0 * (members > inner)
    if kind == "all_reduce":
        units = members / inner
        return 2 * (units - 1 if innermost else np.ceil(np.log2(units)))
    return size / inner - size / members


def dispatch_s(
    num_bytes: Number, choices: int, size: Number, stride: Number, cluster: ClusterSpec, inner_factor: float = 1.0
) -> Number:
    """Seconds of handing tokens to the experts they visit, `num_bytes` for all visits, once per unit that they visit.

    A unit of u ranks out of n is visited with p(u) = 1 − (1 − u/n)^choices. Over each outer tier a token goes once to
    each unit below it that it visits, (members / inner − 1) · p(inner) copies; over the innermost it is handed on to
    its ranks, n · p(1) copies but for the one in place (DeepEP, HybridEP).
    """
    token_bytes = num_bytes / choices
    seconds: Number = 0.0
    inner: Number = 1.0
    for level, (tier, members) in enumerate(
        zip(cluster.tiers, members_by_tier(size, stride, cluster.tiers), strict=True)
    ):
        visited = 1 - (1 - inner / size) ** choices
        copies = size * visited * (1 - 1 / members) if level == 0 else (members / inner - 1) * visited
        slow = inner_factor if level == 0 else 1.0
        handed_s = slow * token_bytes * copies / bytes_per_s_among(tier, members)
        seconds = seconds + handed_s + (members > inner) * tier.latency_s
        inner = members
    return seconds * (token_bytes > 0) * (size > 1)


def p2p_s(num_bytes: Number, distance: Number, cluster: ClusterSpec) -> Number:
    """Seconds to hand `num_bytes` to the rank `distance` away: the innermost tier wider than that, plus its latency."""
    outermost = cluster.tiers[-1]
    seconds: Number = num_bytes / bytes_per_s_among(outermost, 2) + outermost.latency_s
    for tier in reversed(cluster.tiers[:-1]):
        assert tier.num_gpus is not None
        within = distance < tier.num_gpus
        seconds = np.where(within, num_bytes / bytes_per_s_among(tier, 2) + tier.latency_s, seconds)
    return seconds


def group_of(group: Group, shape: Shape) -> tuple[Number, Number]:
    """Size and stride of a group."""
    if group == "tp":
        return shape.tp, 1
    if group == "cp":
        return shape.cp, shape.tp
    if group == "etp":
        return shape.etp, 1
    return shape.ep, shape.etp


def exchange_s(collective: Collective, shape: Shape, cluster: ClusterSpec, dtype: str = "bf16") -> Number:
    """Seconds of a layer's collective where products are computed in `dtype`, overlap aside."""
    size, stride = group_of(collective.group, shape)
    narrow = NARROW_BYTES[dtype] / BF16 if collective.cast and dtype in NARROW_BYTES else 1.0
    if collective.choices:
        return dispatch_s(collective.num_bytes, collective.choices, size, stride, cluster, collective.inner_factor)
    num_bytes = narrow * collective.num_bytes
    return collective_s(collective.kind, num_bytes, size, stride, cluster, collective.inner_factor)
