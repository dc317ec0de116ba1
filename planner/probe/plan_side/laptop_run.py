"""The run of a plan's schedule on processes of this machine: a small model that computes, or sleeps."""

from __future__ import annotations

from collections.abc import Sequence

from planner.answer import Plan
from planner.probe.plan_side.chunks import fully_shards, real_chunks, recompute_modules, scaled_chunks, slice_schedule
from planner.probe.plan_side.options import FEWEST_STEPS, ProbeOptions
from planner.probe.plan_side.planned_seconds import planned_seconds, replay_durations, scaled_seconds
from planner.probe.plan_side.rank_grid import RankGrid, fit_processes, sampled_stages
from planner.probe.plan_side.small_model import scaled_model
from planner.probe.run import ProbeRun, SleepSeconds
from planner.schedule.actions import Schedule
from planner.schedule.replay import replay

MEAN_SLEEP_S = 0.012
"""Mean seconds of a sleeping forward: long enough that a message between processes is short in comparison."""
MAX_STEP_S = 20.0
SEQ_LENGTH = 16


def laptop_run(plan: Plan, options: ProbeOptions) -> tuple[ProbeRun, RankGrid]:
    """The run of processes on a CPU, and its grid of ranks."""
    layout, model = plan.best, plan.model.spec
    grid = fit_processes(layout, options.num_processes, most_dp=1 if options.sleep else 2)
    if options.order is not None:
        grid = grid._replace(pp=options.order.pp)
    order = options.order or slice_schedule(layout, grid.pp)
    stages = sampled_stages(layout.parallelism.pp, grid.pp)
    chunks = scaled_chunks(real_chunks(layout, order, stages), options.most_layers)
    planned = planned_seconds(layout, order, stages)
    run = ProbeRun.of(
        order,
        model=scaled_model(model, options.hidden_size, chunks[-1].last_layer, SEQ_LENGTH, grid),
        tp=grid.tp,
        dp=grid.dp,
        cp=grid.cp,
        ep=grid.ep,
        dp_outermost=layout.parallelism.dp_outermost,
        zero=layout.parallelism.zero_stage > 0,
        fully_sharded=fully_shards(layout, order),
        sequence_parallel=grid.tp > 1 and layout.parallelism.sequence_parallel,
        micro_batch_size=min(2, layout.parallelism.micro_batch_size),
        seq_length=SEQ_LENGTH // grid.cp,
        chunks=chunks,
        recompute_modules=recompute_modules(layout),
        sleep=scaled_seconds(planned, mean_sleep_s(order, planned)) if options.sleep else None,
        check=not options.sleep,
        warm_up_steps=1 if options.sleep else 0,
        num_steps=options.num_steps or FEWEST_STEPS,
        timeout_s=options.timeout_s,
    )
    return run, grid


def mean_sleep_s(order: Schedule, planned: Sequence[SleepSeconds]) -> float:
    """Seconds of a mean forward, such that a step ends within MAX_STEP_S."""
    forward_s = sum(seconds.forward_s for seconds in planned) / len(planned)
    step_in_forwards = float(replay(order, replay_durations(planned)).makespan_s) / forward_s
    return min(MEAN_SLEEP_S, MAX_STEP_S / step_in_forwards)
