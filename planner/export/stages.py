"""The plan's virtual stages in model order, what each recomputes, and the order of their actions for torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from planner.answer import Plan, PricedLayout, StagePlan
from planner.errors import SpecError
from planner.export.refusal import Reason, broken_rules, hint_for, refuse
from planner.export.trainer_files import names_of
from planner.layout.price import order_of
from planner.record import record
from planner.schedule.graph import to_torch_csv
from planner.specs.base import Named, Said
from planner.specs.expressions import text_of, value_of
from planner.specs.reading import shipped_table
from planner.trainers.load import has_dtype
from planner.trainers.rules.rule_rows import Rule


@record
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


Stages = tuple[VirtualStage, ...]
"""Virtual stages in model order."""


def _looped(stage: int, pp: int) -> tuple[int, int]:
    """(rank, chunk) of a virtual stage dealt out round robin: interleaved schedules, and one chunk per rank."""
    return stage % pp, stage // pp


def _v_shaped(stage: int, pp: int) -> tuple[int, int]:
    """(rank, chunk) of a virtual stage where stages go down the ranks and back up: ZB-V, DualPipeV."""
    return (stage, 0) if stage < pp else (2 * pp - 1 - stage, 1)


def virtual_stages(plan: Plan) -> Stages:
    """All chunks of all ranks in model order.

    Raises SpecError when they do not hold every layer once, first to last, under either placement.
    """
    pp, vpp, num_layers = plan.parallelism.pp, plan.parallelism.vpp, plan.model.spec.num_hidden_layers
    ranks = {stage.stage: stage for stage in plan.stages}
    if sorted(ranks) != list(range(pp)) or any(len(stage.chunks) != vpp for stage in plan.stages):
        shown = ", ".join(f"{s.stage}: {len(s.chunks)}" for s in plan.stages)
        raise SpecError(f"stages: chunks by stage {shown}, expected {vpp} for each of pp {pp}", "plan again")
    for placement in (_looped, _v_shaped) if vpp == 2 else (_looped,):
        places = [placement(stage, pp) for stage in range(pp * vpp)]
        bounds = [ranks[rank].chunks[chunk] for rank, chunk in places]
        if _chains(bounds, num_layers):
            return _assemble(places, bounds, ranks)
    raise SpecError(
        f"stages: {[list(stage.chunks) for stage in plan.stages]} do not hold {num_layers} layers once, in order",
        "plan again, or export one of the alternatives",
    )


def _chains(bounds: list[tuple[int, int]], num_layers: int) -> bool:
    """Each stage begins where the one before it ends, from layer 0 to the last."""
    starts, ends = [first for first, _ in bounds], [last for _, last in bounds]
    return (
        starts == [0, *ends[:-1]] and ends[-1] == num_layers and all(a <= b for a, b in zip(starts, ends, strict=True))
    )


def _assemble(places: list[tuple[int, int]], bounds: list[tuple[int, int]], ranks: dict[int, StagePlan]) -> Stages:
    last = len(places) - 1
    mtp_ranks = [stage.stage for stage in ranks.values() if "mtp" in stage.holds]
    # a rank's multi-token-prediction blocks come after all its decoder layers
    mtp_stage = max((j for j, (rank, _) in enumerate(places) if rank in mtp_ranks), default=None)
    return tuple(
        VirtualStage(rank, chunk, *bounds[j], embedding=j == 0, mtp=j == mtp_stage, head=j == last)
        for j, (rank, chunk) in enumerate(places)
    )


def is_looped(stages: Stages, pp: int) -> bool:
    """Virtual stage j is on rank j mod pp, for every j."""
    return all(stage.rank == j % pp for j, stage in enumerate(stages))


def is_even(stages: Stages) -> bool:
    """Virtual stages have equally many layers, and MTP blocks are where trainers put them unasked."""
    return len({stage.num_layers for stage in stages}) == 1 and all(
        not stage.mtp or j == len(stages) - 1 for j, stage in enumerate(stages)
    )


def _full_layers(best: PricedLayout) -> dict[int, int]:
    """Number of layers recomputed whole, by pipeline rank."""
    return {stage.stage: stage.recompute.get("full", 0) for stage in best.stages}


def all_full(best: PricedLayout) -> bool:
    """Every layer is recomputed whole."""
    return all(stage.recompute.get("full", 0) == stage.num_layers for stage in best.stages)


def block_size(best: PricedLayout, stages: Sequence[VirtualStage]) -> int | None:
    """The n for which the plan recomputes the first n layers of every virtual stage; None where these differ."""
    planned = _full_layers(best)
    for size in range(max(stage.num_layers for stage in stages) + 1):
        counts = dict.fromkeys(planned, 0)
        for stage in stages:
            counts[stage.rank] += min(size, stage.num_layers)
        if counts == planned:
            return size
    return None


def recomputed_layers(best: PricedLayout, stages: Sequence[VirtualStage]) -> list[int]:
    """Number of layers, the first of each virtual stage, that are recomputed whole.

    Where the plan counts them by rank only, every chunk gets the same number if that adds up; if not, the first chunks
    get theirs first.
    """
    if all(stage.num_recomputed for stage in best.stages):
        return [sum(best.stages[stage.rank].num_recomputed[stage.chunk]) for stage in stages]
    if (size := block_size(best, stages)) is not None:
        return [min(size, stage.num_layers) for stage in stages]
    left = _full_layers(best)
    counts = []
    for stage in stages:
        counts.append(min(left[stage.rank], stage.num_layers))
        left[stage.rank] -= counts[-1]
    return counts


ORDER_FILE = "schedule.csv"


def _objection_to_order(plan: Plan) -> str:
    """The reason why torch's runtime cannot run the plan's order; empty where it can."""
    try:
        to_torch_csv(order_of(plan.best))
    except SpecError as error:
        return error.message
    return ""


_FACTS: Said = {
    "all_full": all_full, "is_even": is_even, "is_looped": is_looped, "block_size": block_size,
    "has_dtype": has_dtype, "objection_to_order": _objection_to_order,
    "ranks_of_order": lambda plan: list(order_of(plan.best).stage_to_rank),
}  # fmt: skip


def objections_to(plan: Plan, name: str, stages: Sequence[VirtualStage] = (), /, **more: Any) -> list[Reason]:
    """The rows of a list of objections.yaml that refuse a plan; `more` are names that only its expressions read."""
    names = {
        **_FACTS,
        **names_of(plan),
        "stages": stages,
        "modes": {mode for stage in plan.best.stages for mode, count in stage.recompute.items() if count},
        "recomputed": ", ".join(f"stage {stage.stage} {stage.recompute}" for stage in plan.best.stages),
        **more,
    }
    return [Reason(row["reason"], text_of(row["says"], names)) for row in _rows(name) if _refuses(row, names)]


def check_expressible(
    plan: Plan,
    runtime: str,
    of_model: tuple[Rule, ...],
    of_layout: Iterable[Rule],
    stages: Stages = (),
    /,
    *,
    target: str = "",
    rows: str = "",
    more: Iterable[Reason] = (),
    **names: Any,
) -> None:
    """Raise Inexpressible, with every reason, where the files of a runtime cannot say what the plan says.

    These are broken rules of models and of layouts, the rows of a list of objections.yaml, whose expressions read
    `names`, and `more`. Target and list are called as the runtime is unless they are given.
    """
    reasons = broken_rules((*of_model, *of_layout), plan) + objections_to(plan, rows or runtime, stages, **names)
    refuse(target or runtime, [*reasons, *more], hint_for(plan, runtime, of_model))


def _rows(name: str) -> Iterator[Named]:
    for row in shipped_table("export/objections.yaml")[name]:
        yield from _rows(row) if isinstance(row, str) else (row,)


def _refuses(row: Mapping[str, str], names: Said) -> bool:
    return bool(value_of(row["refuses"], names)) if "refuses" in row else not value_of(row["holds"], names)
