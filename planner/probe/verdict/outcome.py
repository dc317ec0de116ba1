"""The result of a probe, put together from what was measured and what was compared."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from planner.answer import Plan, StagePlan
from planner.errors import ProbeError
from planner.probe.plan_side.options import ProbeOptions
from planner.probe.plan_side.rank_grid import sampled_stages
from planner.probe.result import ComparedQuantity, MeasuredRun, PlanSlice, ProbeResult
from planner.probe.verdict.activity import activity
from planner.probe.verdict.checks import check_finite, run_checks
from planner.probe.verdict.conditions import conditions_of
from planner.probe.verdict.kernels import kernel_notes
from planner.specs.units import gib


def probe_result(
    plan: Plan,
    options: ProbeOptions,
    plan_slice: PlanSlice,
    measured: MeasuredRun,
    comparisons: Sequence[ComparedQuantity],
    step_s: float | None = None,
    eager: Plan | None = None,
) -> ProbeResult:
    """The result of a probe. `step_s` is given where no rank ran a whole step, `eager` where the plan's own stages
    ran."""
    ranks, run, alone = measured.ranks, measured.run, options.stages is not None
    complete = bool(ranks) and not alone
    same_steps = zip(*(rank.steps for rank in ranks), strict=True) if complete else ()
    steps = [max(step.step_s for step in same) for same in same_steps]
    steps_by_rank = [steps] if complete else [[step.step_s for step in rank.steps] for rank in ranks]
    out_of_memory, pp = measured.out_of_memory, plan.parallelism.pp
    stage_of = list(range(pp)) if alone else sampled_stages(pp, run.pp)
    plan_slice = plan_slice if ranks else plan_slice.model_copy(update={"verified": ()})
    predicted = None if out_of_memory is None else (eager or plan).stages[stage_of[out_of_memory.stage]]
    if predicted is not None and eager is not None:
        _refuse_expected(predicted, plan)
    return ProbeResult(
        mode="stages" if alone else "ranks",
        device=ranks[0].device_name if ranks else options.device,
        torch_version=ranks[0].torch_version if ranks else "",
        inputs_sha256=plan.inputs_sha256,
        slice=plan_slice,
        sleeps=run.sleep is not None,
        tolerance_fraction=options.tolerance_fraction,
        comparisons=tuple(comparisons),
        checks=tuple(run_checks(run, ranks) if complete else [check_finite(ranks)] if ranks else []),
        activity=activity(run, ranks) if complete else (),
        step_s=median(steps) if steps else step_s,
        step_spread_s=max((max(seconds) - min(seconds) for seconds in steps_by_rank), default=0.0),
        loss=ranks[0].steps[-1].loss if complete and run.sleep is None else None,
        conditions=conditions_of(ranks),
        run=run,
        ranks=ranks,
        out_of_memory=out_of_memory,
        predicted_bytes=None if predicted is None else predicted.memory.total_bytes,
        plan_runtime=plan.runtime,
        plan_step_s=None if eager is None else plan.step.step_s,
        notes=() if eager is None else kernel_notes(run, ranks, plan.cluster.hardware),
    )


def _refuse_expected(stage: StagePlan, plan: Plan) -> None:
    """Raise ProbeError if the plan predicts that the stage runs out of memory in eager torch: then nothing contradicts
    it."""
    needed_bytes, capacity_bytes = stage.memory.total_bytes, plan.cluster.hardware.memory_bytes
    if needed_bytes > capacity_bytes:
        raise ProbeError(
            f"stage {stage.stage} ran out of memory as predicted: eager torch, which the probe runs, needs "
            f"{gib(needed_bytes):.1f} GiB there of {gib(capacity_bytes):.1f}",
            f"this says nothing of the plan under {plan.runtime}; what fits in eager torch can be probed: "
            "plan with --runtime torch-eager",
        )
