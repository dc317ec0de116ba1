"""The schedule that runs, and the layers that each of its virtual stages holds."""

from __future__ import annotations

from collections.abc import Sequence

from planner.answer import PricedLayout, StagePlan
from planner.errors import ProbeError
from planner.probe.run import ChunkSpec
from planner.schedule.actions import Schedule
from planner.schedule.orders import build_schedule, violation

MAX_MICROBATCHES_PER_RANK = 3
RECOMPUTABLE = frozenset({"core_attn", "mlp", "moe", "shared_experts"})
"""Modules that the probe's model can recompute selectively."""


def slice_schedule(layout: PricedLayout, pp: int, most_microbatches: int | None = None) -> Schedule:
    """The plan's schedule on `pp` ranks, with at most `most_microbatches` (a few per rank unless given)."""
    parallelism = layout.parallelism
    name = parallelism.schedule if pp > 1 else "none"
    vpp = parallelism.vpp if pp > 1 else 1
    most_microbatches = min(parallelism.num_microbatches, most_microbatches or max(2, MAX_MICROBATCHES_PER_RANK * pp))
    for count in (*range(most_microbatches, 0, -1), *range(most_microbatches, 8 * pp * vpp + 1)):
        if violation(name, pp, vpp, count) is None:
            return build_schedule(name, pp, vpp, count)
    error = violation(name, pp, vpp, most_microbatches)
    raise ProbeError(f"the plan's schedule cannot be run on {pp} stages: {error}", "give it more ranks")


def fully_shards(layout: PricedLayout, order: Schedule) -> bool:
    """True if the run shards weights and gradients as the plan does; torch's fully_shard cannot split backwards."""
    return layout.parallelism.zero_stage == 3 and not order.splits_backward


def recompute_modules(layout: PricedLayout) -> tuple[str, ...]:
    """Selectively recomputed modules that the probe's model can recompute."""
    return tuple(name for name in layout.parallelism.recompute_modules if name in RECOMPUTABLE)


def real_chunks(layout: PricedLayout, order: Schedule, stages: Sequence[int]) -> tuple[ChunkSpec, ...]:
    """Virtual stages with the plan's own layers; `stages` are the plan's stages that the pipeline ranks stand for."""
    n, num_chunks_seen = order.num_model_stages, [0] * order.pp
    chunks = []
    for virtual in range(n):
        rank = order.stage_to_rank[virtual]
        plan_stage = layout.stages[stages[rank]]
        first, last = _span(plan_stage, num_chunks_seen[rank], order.vpp)
        num_chunks_seen[rank] += 1
        recomputed = _recomputed(plan_stage, last - first)
        chunks.append(
            ChunkSpec(
                first_layer=first,
                last_layer=last,
                embedding=virtual == 0,
                head=virtual == n - 1,
                mtp=virtual == n - 1 and any("mtp" in stage.holds for stage in layout.stages),
                num_recomputed=recomputed,
            )
        )
    return tuple(chunks)


def _span(stage: StagePlan, index: int, vpp: int) -> tuple[int, int]:
    """Layers of a chunk: the plan's own, or an even part of the stage's layers where an order has more or fewer
    chunks."""
    if vpp == len(stage.chunks):
        return stage.chunks[index]
    first, layers = stage.chunks[0][0], stage.num_layers
    return first + layers * index // vpp, first + layers * (index + 1) // vpp


def _recomputed(stage: StagePlan, layers: int) -> int:
    """Layers of a chunk that are recomputed whole: the stage's share of them."""
    total = max(1, sum(stage.recompute.values()))
    return round(layers * stage.recompute.get("full", 0) / total)


def scaled_chunks(chunks: Sequence[ChunkSpec], most_layers: int) -> tuple[ChunkSpec, ...]:
    """The chunks shrunk in proportion to at most `most_layers` layers each. A chunk that has layers keeps at least
    one."""
    largest = max(chunk.num_layers for chunk in chunks)
    scaled, first = [], 0
    for chunk in chunks:
        layers = max(1, round(chunk.num_layers * min(1.0, most_layers / largest))) if chunk.num_layers else 0
        share = chunk.num_recomputed / chunk.num_layers if chunk.num_layers else 0
        scaled.append(
            chunk.model_copy(
                update={
                    "first_layer": first,
                    "last_layer": first + layers,
                    "num_recomputed": round(layers * share),
                }
            )
        )
        first += layers
    return tuple(scaled)
