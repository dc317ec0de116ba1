"""The tier that each group of ranks spans, as the answer shows it."""

from __future__ import annotations

from collections.abc import Iterator

from planner.answer import Placement
from planner.physics.communication import Places, data_parallel_places, members_by_tier
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec


def placements(shape: Shape, cluster: ClusterSpec) -> tuple[Placement, ...]:
    """The groups of more than one rank, the innermost first, each with the outermost tier that its exchanges cross."""
    return tuple(
        _placed(group, int(size), span, level, cluster) for group, size, span, level in _groups(shape, cluster)
    )


def groups_of(shape: Shape) -> list[tuple[str, int, Places]]:
    """Name, ranks and places of each group; that of data parallelism has the ranks of context parallelism too."""
    data_parallel, _ = data_parallel_places(shape)
    return [
        ("tp", int(shape.tp), 1),
        ("cp", int(shape.cp), shape.tp),
        ("ep", int(shape.ep), shape.etp),
        ("dp", int(shape.dp * shape.cp), data_parallel),
        ("pp", int(shape.pp), int(shape.stage_stride)),
    ]


def _groups(shape: Shape, cluster: ClusterSpec) -> Iterator[tuple[str, float, int, int]]:
    """Name, ranks, width and tier of each group; the width is the number of ranks from its first to its last."""
    whole = int(shape.num_ranks)
    widths = {
        "tp": int(shape.tp),
        "cp": int(shape.tp * shape.cp),
        "ep": int(shape.ep * shape.etp),
        "dp": whole if shape.dp_outermost else int(whole / shape.pp),
        "pp": int(shape.pp) * int(shape.stage_stride),
    }
    named = {"dp": int(shape.dp)}
    for group, size, places in groups_of(shape):
        if named.get(group, size) > 1:
            members = [int(count) for count in members_by_tier(size, places, cluster.tiers)]
            yield group, named.get(group, size), widths[group], members.index(size)


def _placed(group: str, size: int, width: int, level: int, cluster: ClusterSpec) -> Placement:
    tier = cluster.tiers[level]
    domain = cluster.nvlink_domain_size
    shares = level == 0 and width <= domain < cluster.num_gpus and domain % width > 0
    return Placement(
        group=group,  # type: ignore[arg-type]
        size=size,
        tier=tier.name,
        is_inside_nvlink=level == 0,
        tier_gpus=tier.num_gpus,
        oversubscription=tier.oversubscription,
        fills_gpus=domain // width * width if shares else None,
    )
