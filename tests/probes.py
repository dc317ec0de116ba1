"""Results of probes that no run made: the plan's own stages with seconds made up."""

from collections.abc import Callable, Sequence
from typing import Any

from planner.answer import Plan
from planner.probe.compare import compared
from planner.probe.plan_slice import real_chunks, recompute_modules, slice_schedule
from planner.probe.result import (
    ChunkSeconds,
    PlanSlice,
    ProbedExchange,
    ProbedMemory,
    ProbeResult,
    RankResult,
    StepSeconds,
    TimedAction,
)
from planner.probe.run import ProbeRun
from planner.probe.run_price import in_eager_torch

Seconds = Callable[[int], tuple[float, float]]
"""Forward and backward of a micro-batch through a virtual stage."""
GAP_S = 1e-4
"""Of the host between two actions."""


def probe_run(plan: Plan, **changes: Any) -> ProbeRun:
    """All ranks of a plan, as the probe would run them on GPUs."""
    layout, order = plan.best, slice_schedule(plan.best, plan.best.parallelism.pp)
    asked = layout.parallelism
    fields = {
        "model": plan.model.spec, "device": "cuda", "dtype": "bfloat16", "tp": asked.tp, "dp": asked.dp,
        "ep": asked.ep, "cp": asked.cp, "sequence_parallel": asked.sequence_parallel,
        "micro_batch_size": asked.micro_batch_size, "seq_length": plan.training.seq_length // asked.cp,
        "chunks": real_chunks(layout, order, range(asked.pp)), "recompute_modules": recompute_modules(layout),
    }  # fmt: skip
    return ProbeRun.of(order, **(fields | changes))


def probe_result(
    plan: Plan,
    seconds: Seconds,
    *,
    stages: Sequence[int] | None = None,
    run: ProbeRun | None = None,
    exchanges: tuple[ProbedExchange, ...] = (),
    memory: ProbedMemory | None = None,
    **changes: Any,
) -> ProbeResult:
    """A probe that ran `stages` (all of them) one by one; `mode="ranks"` for all of them together."""
    run, pp = run or probe_run(plan), plan.best.parallelism.pp
    held = {stage: run.stages_of(stage) for stage in (range(pp) if stages is None else stages)}
    alone = changes.get("mode", "stages") == "stages"
    ranks = tuple(_rank(run, stage, virtual, seconds, exchanges, memory) for stage, virtual in held.items())
    comparisons = [
        compared("forward", "s", planned.forward_s + (0 if alone else planned.forward_comm_s), 1.0, None, planned.stage)
        for planned in in_eager_torch(plan, alone=alone).stages
        if planned.stage in held
    ]
    fields = {
        "mode": "stages", "device": "NVIDIA H200", "torch_version": "2.11", "inputs_sha256": plan.inputs_sha256,
        "slice": PlanSlice(asked=str(plan.best.parallelism), run="all of it"), "tolerance_fraction": 0.1,
        "comparisons": tuple(comparisons), "checks": (), "run": run, "ranks": ranks,
    }  # fmt: skip
    return ProbeResult.model_validate(fields | changes)


def _rank(
    run: ProbeRun,
    stage: int,
    virtual: Sequence[int],
    seconds: Seconds,
    exchanges: tuple[ProbedExchange, ...],
    memory: ProbedMemory | None,
) -> RankResult:
    times = {j: seconds(j) for j in virtual}
    actions, now = [], 0.0
    for text in run.ranks[stage]:
        took = 1e-3
        actions.append(TimedAction(action=text, ready_s=now, start_s=now, end_s=now + took))
        now += took + GAP_S
    step = StepSeconds(pipeline_s=now, reduce_s=0.0, optimizer_s=1e-3, step_s=now + 1e-3, loss=10.0, gradient_norm=1.0)
    return RankResult(
        rank=stage * run.dp * run.tp, stage=stage, dp=0, tp=0, torch_version="2.11", device_name="NVIDIA H200",
        num_parameters=1, steps=(step,), actions=tuple(actions),
        chunks=tuple(ChunkSeconds(stage=j, forward_s=f, backward_s=b) for j, (f, b) in times.items()),
        exchanges=exchanges, peak_in_flight_chunks=1, memory=memory,
    )  # fmt: skip
