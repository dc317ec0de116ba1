"""How to probe, what part of the plan that runs, and the result put together."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from planner.answer import Plan, StagePlan
from planner.errors import ProbeError
from planner.probe.plan_side.eager import EAGER
from planner.probe.plan_side.slices import RECOMPUTABLE, Grid, Slice, fully_shards, sampled_stages
from planner.probe.result import Comparison, Measured, ProbeResult
from planner.probe.run import Device
from planner.probe.verdict.activity import activity
from planner.probe.verdict.compare import finite, run_checks
from planner.schedule.actions import Schedule
from planner.specs.units import gib

DEFAULT_TOLERANCE = 0.1
"""Of a prediction."""


class Options(NamedTuple):
    """How to probe."""

    device: Device = "cpu"
    stages: Literal["all"] | int | None = None
    """One device, one stage at a time: all distinct ones, or one of them."""
    hidden_size: int = 64
    """Of the scaled-down model on the CPU."""
    num_processes: int = 8
    """At most, on the CPU."""
    most_layers: int = 2
    """Per virtual stage, on the CPU."""
    sleep: bool = False
    """On the CPU: sleep for the plan's seconds, scaled, in place of computing."""
    num_steps: int = 3
    tolerance_fraction: float = DEFAULT_TOLERANCE
    timeout_s: float = 120.0
    """Longest that a rank may show no progress."""
    order: Schedule | None = None
    """Another order than the plan's, such as one read from a CSV file."""


def gathers_keys(plan: Plan) -> bool:
    """Whether the plan's ranks, too, gather keys and values where they split sequences."""
    return plan.parallelism.cp == 1 or plan.runtime_spec.cp_comm_type == "all_gather"


def slice_of(plan: Plan, grid: Grid, order: Schedule, options: Options, reduced: Sequence[str] = ()) -> Slice:
    """What is run of the plan, in words."""
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
    unshared = [axis for axis, (_, asked, run) in zip(axes, sizes, strict=False) if asked > run == 1]
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
    return Slice(
        asked=f"{layout} · {layout.schedule}",
        run=f"{ranks} · {order.name} · {order.num_microbatches} micro-batches",
        reduced=(*(f"{name} {asked} → {run}" for name, asked, run in sizes if asked != run), *reduced),
        verified=tuple(verified),
        extrapolated=tuple(extrapolated),
    )


def _claims(options: Options, grid: Grid) -> tuple[list[str], list[str]]:
    """What a run of this kind verifies, and what it cannot."""
    if options.stages is not None:
        others = ["network", "ranks waiting for each other"]
        if options.device == "cpu":  # which keeps no account of memory
            return ["compute seconds of each stage that ran"], ["memory", *others]
        return ["compute seconds and memory of each stage that ran"], others
    if options.device == "cuda":
        return ["seconds and memory of each stage that ran", "exchanges among the ranks that ran"], []
    proved = ["bubble"] if options.sleep else ["loss", "gradients", "gradient norm"]
    exchanges = ["exchanges"] if grid.pp > 1 else []
    return ["order", *exchanges, "in flight", *proved], ["GPU seconds", "GPU memory", "network"]


def result(
    plan: Plan,
    options: Options,
    part: Slice,
    measured: Measured,
    comparisons: Sequence[Comparison],
    step_s: float | None = None,
    eager: Plan | None = None,
) -> ProbeResult:
    """Everything together; `step_s` where no rank ran a whole step, `eager` where the plan's own stages ran."""
    ranks, run, alone = measured.ranks, measured.run, options.stages is not None
    complete = bool(ranks) and not alone
    steps = [max(rank.steps[i].step_s for rank in ranks) for i in range(run.num_steps)] if complete else []
    repeated = [steps] if complete else [[step.step_s for step in rank.steps] for rank in ranks]
    memory, pp = measured.out_of_memory, plan.parallelism.pp
    stage_of = list(range(pp)) if alone else sampled_stages(pp, run.pp)
    part = part if ranks else part.model_copy(update={"verified": ()})
    predicted = None if memory is None else (eager or plan).stages[stage_of[memory.stage]]
    if predicted is not None and eager is not None:
        _refuse_expected(predicted, plan)
    return ProbeResult(
        mode="stages" if alone else "ranks",
        device=ranks[0].device_name if ranks else options.device,
        torch_version=ranks[0].torch_version if ranks else "",
        inputs_sha256=plan.inputs_sha256,
        slice=part,
        sleeps=run.sleep is not None,
        tolerance_fraction=options.tolerance_fraction,
        comparisons=tuple(comparisons),
        checks=tuple(run_checks(run, ranks) if complete else [finite(ranks)] if ranks else []),
        activity=activity(run, ranks) if complete else (),
        step_s=median(steps) if steps else step_s,
        step_spread_s=max((max(seconds) - min(seconds) for seconds in repeated), default=0.0),
        loss=ranks[0].steps[-1].loss if complete and run.sleep is None else None,
        run=run,
        ranks=ranks,
        out_of_memory=memory,
        predicted_bytes=None if predicted is None else predicted.memory.total_bytes,
        plan_runtime=plan.runtime,
        plan_step_s=None if eager is None else plan.step.step_s,
    )


def _refuse_expected(stage: StagePlan, plan: Plan) -> None:
    """Raise ProbeError where a stage that ran out of memory was to do so in eager torch, which contradicts no plan."""
    needed_bytes, capacity_bytes = stage.memory.total_bytes, plan.cluster.hardware.memory_bytes
    if needed_bytes > capacity_bytes:
        raise ProbeError(
            f"stage {stage.stage} ran out of memory as predicted: eager torch, which the probe runs, needs "
            f"{gib(needed_bytes):.1f} GiB there of {gib(capacity_bytes):.1f}",
            f"this says nothing of the plan under {plan.runtime}; what fits in eager torch can be probed: "
            "plan with --runtime torch-eager",
        )
