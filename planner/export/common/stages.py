"""The plan's stages as exporters need them: virtual stages in model order, with what each holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.answer import PricedLayout, StagePlan
from planner.errors import SpecError


@dataclass(frozen=True, slots=True)
class VirtualStage:
    """One chunk of one pipeline rank."""

    rank: int
    chunk: int
    """Position among the rank's chunks, in the order a micro-batch meets them."""
    first_layer: int
    last_layer: int
    """Exclusive."""
    embedding: bool = False
    mtp: bool = False
    head: bool = False

    @property
    def num_layers(self) -> int:
        return self.last_layer - self.first_layer

    @property
    def is_empty(self) -> bool:
        return not (self.num_layers or self.embedding or self.mtp or self.head)


Placement = Callable[[int, int], tuple[int, int]]
"""(virtual stage, pp) → (rank, chunk)."""


def looped(stage: int, pp: int) -> tuple[int, int]:
    """Rank j mod pp, round robin: interleaved schedules, and one chunk per rank."""
    return stage % pp, stage // pp


def v_shaped(stage: int, pp: int) -> tuple[int, int]:
    """Down the ranks and back up: ZB-V, DualPipeV."""
    return (stage, 0) if stage < pp else (2 * pp - 1 - stage, 1)


def virtual_stages(best: PricedLayout, num_layers: int) -> tuple[VirtualStage, ...]:
    """All chunks of all ranks in model order.

    Raises SpecError when they do not hold every layer once, first to last, under either placement.
    """
    pp, vpp = best.parallelism.pp, best.parallelism.vpp
    ranks = {stage.stage: stage for stage in best.stages}
    if sorted(ranks) != list(range(pp)) or any(len(stage.chunks) != vpp for stage in best.stages):
        shown = ", ".join(f"{s.stage}: {len(s.chunks)}" for s in best.stages)
        raise SpecError(f"stages: chunks by stage {shown}, expected {vpp} for each of pp {pp}", "plan again")
    for placement in (looped, v_shaped) if vpp == 2 else (looped,):
        places = [placement(stage, pp) for stage in range(pp * vpp)]
        bounds = [ranks[rank].chunks[chunk] for rank, chunk in places]
        if _chains(bounds, num_layers):
            return _assemble(places, bounds, ranks)
    raise SpecError(
        f"stages: {[list(stage.chunks) for stage in best.stages]} do not hold {num_layers} layers once, in order",
        "plan again, or export one of the alternatives",
    )


def _chains(bounds: list[tuple[int, int]], num_layers: int) -> bool:
    starts, ends = [first for first, _ in bounds], [last for _, last in bounds]
    return (
        starts == [0, *ends[:-1]] and ends[-1] == num_layers and all(a <= b for a, b in zip(starts, ends, strict=True))
    )


def _assemble(
    places: list[tuple[int, int]], bounds: list[tuple[int, int]], ranks: dict[int, StagePlan]
) -> tuple[VirtualStage, ...]:
    last = len(places) - 1
    mtp_ranks = [stage.stage for stage in ranks.values() if "mtp" in stage.holds]
    # a rank's multi-token-prediction blocks come after all its decoder layers
    mtp_stage = max((j for j, (rank, _) in enumerate(places) if rank in mtp_ranks), default=None)
    return tuple(
        VirtualStage(rank, chunk, *bounds[j], embedding=j == 0, mtp=j == mtp_stage, head=j == last)
        for j, (rank, chunk) in enumerate(places)
    )


def is_looped(stages: tuple[VirtualStage, ...], pp: int) -> bool:
    """Whether virtual stage j is on rank j mod pp."""
    return all(stage.rank == j % pp for j, stage in enumerate(stages))


def is_even(stages: tuple[VirtualStage, ...]) -> bool:
    """Whether virtual stages have equally many layers, and MTP blocks are where trainers put them unasked."""
    return len({stage.num_layers for stage in stages}) == 1 and all(
        not stage.mtp or j == len(stages) - 1 for j, stage in enumerate(stages)
    )


def module_names(stage: VirtualStage, embedding: str, layer: str, norm: str, head: str) -> list[str]:
    """Names of what a virtual stage holds, in order; `layer` is a prefix such as `layers.`."""
    names = [embedding] if stage.embedding else []
    names += [f"{layer}{index}" for index in range(stage.first_layer, stage.last_layer)]
    return names + ([norm, head] if stage.head else [])
