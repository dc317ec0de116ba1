"""The part of a plan that runs, in words: what is smaller, what the run verifies and what it leaves open."""

from __future__ import annotations

from collections.abc import Sequence

from planner.answer import Plan
from planner.probe.plan_side.chunks import RECOMPUTABLE, fully_shards
from planner.probe.plan_side.eager import EAGER
from planner.probe.plan_side.options import ProbeOptions
from planner.probe.plan_side.rank_grid import RankGrid
from planner.probe.result import PlanSlice
from planner.schedule.actions import Schedule


def describe_slice(
    plan: Plan, grid: RankGrid, order: Schedule, options: ProbeOptions, reduced: Sequence[str] = ()
) -> PlanSlice:
    """The part of the plan that runs, in words."""
    layout = plan.best.parallelism
    sizes = (
        ("TP", layout.tp, grid.tp),
        ("CP", layout.cp, grid.cp),
        ("PP", layout.pp, grid.pp),
        ("DP", layout.dp, grid.dp),
        ("EP", layout.ep, grid.ep),
        ("micro-batches", layout.num_microbatches, order.num_microbatches),
    )
    verified, extrapolated = _claims(options, grid)
    axes = ("tensor", "context", "pipeline", "data", "expert")
    unshared = [axis for axis, (_, planned, running) in zip(axes, sizes, strict=False) if planned > running == 1]
    extrapolated += [f"{axis}-parallel exchanges" for axis in unshared]
    if layout.num_gpus_used > grid.num_ranks:
        extrapolated.append(f"{layout.num_gpus_used - grid.num_ranks:,} more ranks")
    is_sharded = fully_shards(plan.best, order) and grid.dp * grid.cp > 1
    own_stages = options.device == "cuda" or options.stages is not None
    if is_sharded and own_stages:
        extrapolated.append("seconds of passes that gather weights (shown, not judged)")
    if layout.zero_stage > 1 and not is_sharded:
        extrapolated.append(f"ZeRO-{layout.zero_stage} (this run shards optimizer states only)")
    if grid.cp > 1 and not (options.sleep or gathers_keys(plan)):
        exchange = plan.runtime_spec.cp_comm_type
        extrapolated.append(f"context parallelism by {exchange} (this run gathers keys and values)")
    left_out = [name for name in layout.recompute_modules if name not in RECOMPUTABLE]
    if left_out:
        extrapolated.append(f"recomputation of {', '.join(left_out)}")
    if plan.training.dtype != "bf16" and own_stages:
        extrapolated.append(f"{plan.training.dtype} (the probe computes in bf16)")
    if plan.runtime != EAGER.name and own_stages:
        extrapolated.append(f"{plan.runtime}'s own kernels and overlaps (the probe runs eager torch)")
    context = f"CP {grid.cp} × " if layout.cp > 1 else ""
    ranks = f"TP {grid.tp} × {context}PP {grid.pp} × DP {grid.dp}"
    return PlanSlice(
        asked=f"{layout} · {layout.schedule}",
        run=f"{ranks} · {order.name} · {order.num_microbatches} micro-batches",
        reduced=(
            *(f"{name} {planned} → {running}" for name, planned, running in sizes if planned != running),
            *reduced,
        ),
        verified=tuple(verified),
        extrapolated=tuple(extrapolated),
    )


def gathers_keys(plan: Plan) -> bool:
    """True if the plan's ranks split no sequences, or gather keys and values as the probe does."""
    return plan.parallelism.cp == 1 or plan.runtime_spec.cp_comm_type == "all_gather"


def _claims(options: ProbeOptions, grid: RankGrid) -> tuple[list[str], list[str]]:
    """Two lists of words: what a run of this kind verifies, and what it cannot."""
    if options.stages is not None:
        not_verified = ["network", "ranks waiting for each other"]
        if options.device == "cpu":  # which keeps no account of memory
            return ["compute seconds of each stage that ran"], ["memory", *not_verified]
        return ["compute seconds and memory of each stage that ran"], not_verified
    if options.device == "cuda" and options.ranks_per_gpu > 1:
        return ["order", "memory of each stage that ran"], ["seconds: ranks share a GPU"]
    if options.device == "cuda":
        return ["seconds and memory of each stage that ran", "exchanges among the ranks that ran"], []
    results = ["bubble"] if options.sleep else ["loss", "gradients", "gradient norm"]
    exchanges = ["exchanges"] if grid.pp > 1 else []
    return ["order", *exchanges, "in flight", *results], ["GPU seconds", "GPU memory", "network"]
