"""The plan's schedule on processes of this machine: a model in small that must equal one process, or sleeps."""

from __future__ import annotations

from collections.abc import Sequence

from planner.answer import Plan
from planner.probe.launch.launcher import launch
from planner.probe.plan_side import slices
from planner.probe.result import Measured, ProbeResult
from planner.probe.run import ProbeRun, SleepSeconds
from planner.probe.verdict.activity import durations
from planner.probe.verdict.compare import compare_bubble
from planner.probe.verdict.outcome import Options, result, slice_of
from planner.schedule.actions import Schedule
from planner.schedule.replay import replay

MEAN_SLEEP_S = 0.012
"""Of a forward: long enough that a message between processes is short beside it."""
MAX_STEP_S = 20.0
SEQ_LENGTH = 16


def probe_laptop(plan: Plan, options: Options) -> ProbeResult:
    """Prove order, exchanges, in-flight counts and gradients; or measure the bubble (options.sleep)."""
    run, grid = laptop_run(plan, options)
    return laptop_result(plan, options, launch(run), grid)


def laptop_run(plan: Plan, options: Options) -> tuple[ProbeRun, slices.Grid]:
    """What the processes run, and its sizes."""
    layout, model = plan.best, plan.model.spec
    grid = slices.fit_grid(layout, options.num_processes, most_dp=1 if options.sleep else 2)
    if options.order is not None:
        grid = grid._replace(pp=options.order.pp)
    order = options.order or slices.slice_schedule(layout, grid.pp)
    stages = slices.sampled_stages(layout.parallelism.pp, grid.pp)
    chunks = slices.scaled_chunks(slices.real_chunks(layout, order, stages), options.most_layers)
    planned = slices.planned_seconds(layout, order, stages)
    run = ProbeRun.of(
        order,
        model=slices.scaled_model(model, options.hidden_size, chunks[-1].last_layer, SEQ_LENGTH, grid),
        tp=grid.tp,
        dp=grid.dp,
        cp=grid.cp,
        ep=grid.ep,
        zero=layout.parallelism.zero_stage > 0,
        fully_sharded=slices.fully_shards(layout, order),
        sequence_parallel=grid.tp > 1 and layout.parallelism.sequence_parallel,
        micro_batch_size=min(2, layout.parallelism.micro_batch_size),
        seq_length=SEQ_LENGTH // grid.cp,
        chunks=chunks,
        recompute_modules=slices.recompute_modules(layout),
        sleep=slices.scaled_seconds(planned, mean_sleep_s(order, planned)) if options.sleep else None,
        check=not options.sleep,
        warm_up_steps=1 if options.sleep else 0,
        num_steps=options.num_steps,
        timeout_s=options.timeout_s,
    )
    return run, grid


def laptop_result(plan: Plan, options: Options, measured: Measured, grid: slices.Grid) -> ProbeResult:
    """What the processes proved, and the bubble where they slept."""
    run, model = measured.run, plan.model.spec
    comparisons = compare_bubble(run, measured.ranks) if options.sleep and measured.ranks else []
    reduced = [
        f"{name} {getattr(model, name)} → {getattr(run.model, name)}" for name in ("hidden_size", "num_hidden_layers")
    ]
    return result(plan, options, slice_of(plan, grid, run.order, options, reduced), measured, comparisons)


def mean_sleep_s(order: Schedule, planned: Sequence[SleepSeconds]) -> float:
    """Seconds of a mean forward, such that a step ends within MAX_STEP_S."""
    forward_s = sum(seconds.forward_s for seconds in planned) / len(planned)
    step_in_forwards = float(replay(order, durations(planned)).makespan_s) / forward_s
    return min(MEAN_SLEEP_S, MAX_STEP_S / step_in_forwards)
