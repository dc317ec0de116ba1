"""Recompute as trainers say it: none, some modules of every layer, or the first n layers of every virtual stage."""

from __future__ import annotations

from collections.abc import Sequence

from planner.answer import PricedLayout
from planner.export.common.refusal import Objections
from planner.export.common.stages import VirtualStage


def _full_layers(best: PricedLayout) -> dict[int, int]:
    """Number of layers recomputed whole, by pipeline rank."""
    return {stage.stage: stage.recompute.get("full", 0) for stage in best.stages}


def all_full(best: PricedLayout) -> bool:
    """Every layer is recomputed whole."""
    return all(stage.recompute.get("full", 0) == stage.num_layers for stage in best.stages)


def block_size(best: PricedLayout, stages: Sequence[VirtualStage]) -> int | None:
    """The n for which the plan recomputes the first n layers of every virtual stage; None where it recomputes all.

    Raises ValueError where virtual stages differ.
    """
    if all_full(best):
        return None
    planned = _full_layers(best)
    for size in range(max(stage.num_layers for stage in stages) + 1):
        counts = dict.fromkeys(planned, 0)
        for stage in stages:
            counts[stage.rank] += min(size, stage.num_layers)
        if counts == planned:
            return size
    raise ValueError("recompute differs between stages")


def recomputed_layers(best: PricedLayout, stages: Sequence[VirtualStage]) -> list[int]:
    """Number of layers, the first of each virtual stage, that are recomputed whole.

    Where the plan counts them by rank only, every chunk gets the same number if that adds up; if not, the first chunks
    get theirs first.
    """
    if all(stage.num_recomputed for stage in best.stages):
        return [sum(best.stages[stage.rank].num_recomputed[stage.chunk]) for stage in stages]
    try:
        size = block_size(best, stages)
        return [stage.num_layers if size is None else min(size, stage.num_layers) for stage in stages]
    except ValueError:
        left = _full_layers(best)
        counts = []
        for stage in stages:
            counts.append(min(left[stage.rank], stage.num_layers))
            left[stage.rank] -= counts[-1]
        return counts


def check_mixture(best: PricedLayout, objections: Objections) -> None:
    """Object where modules are recomputed beside whole layers, or in some layers only."""
    shown = ", ".join(f"stage {stage.stage} {stage.recompute}" for stage in best.stages)
    modes = {mode for stage in best.stages for mode, count in stage.recompute.items() if count}
    objections.when(
        len(modes - {"none"}) > 1, "recompute_mixed", f"whole layers and modules are recomputed together ({shown})"
    )
    objections.when(
        {"none", "selective"} <= modes, "recompute_per_stage", f"one setting must do for all layers ({shown})"
    )


def check_recompute(best: PricedLayout, stages: Sequence[VirtualStage], objections: Objections) -> None:
    """Object where `check_mixture` does, and where virtual stages need different numbers of whole layers."""
    check_mixture(best, objections)
    try:
        block_size(best, stages)
    except ValueError:
        shown = ", ".join(f"stage {stage.stage} {stage.recompute}" for stage in best.stages)
        objections.when(True, "recompute_per_stage", f"no one number of layers per virtual stage gives {shown}")
