"""The plan's virtual stages in model order, with the layers and modules that each holds."""

from __future__ import annotations

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


def _looped(stage: int, pp: int) -> tuple[int, int]:
    """(rank, chunk) of a virtual stage dealt out round robin: interleaved schedules, and one chunk per rank."""
    return stage % pp, stage // pp


def _v_shaped(stage: int, pp: int) -> tuple[int, int]:
    """(rank, chunk) of a virtual stage where stages go down the ranks and back up: ZB-V, DualPipeV."""
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
    for placement in (_looped, _v_shaped) if vpp == 2 else (_looped,):
        places = [placement(stage, pp) for stage in range(pp * vpp)]
        bounds = [ranks[rank].chunks[chunk] for rank, chunk in places]
        if _chains(bounds, num_layers):
            return _assemble(places, bounds, ranks)
    raise SpecError(
        f"stages: {[list(stage.chunks) for stage in best.stages]} do not hold {num_layers} layers once, in order",
        "plan again, or export one of the alternatives",
    )


def _chains(bounds: list[tuple[int, int]], num_layers: int) -> bool:
    """Each stage begins where the one before it ends, from layer 0 to the last."""
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
    """Virtual stage j is on rank j mod pp, for every j."""
    return all(stage.rank == j % pp for j, stage in enumerate(stages))


def is_even(stages: tuple[VirtualStage, ...]) -> bool:
    """Virtual stages have equally many layers, and MTP blocks are where trainers put them unasked."""
    return len({stage.num_layers for stage in stages}) == 1 and all(
        not stage.mtp or j == len(stages) - 1 for j, stage in enumerate(stages)
    )
