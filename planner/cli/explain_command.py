"""`plan explain`: why this layout, or why not the one that the pins ask for."""

from __future__ import annotations

import sys

import typer

from planner.cli import options as o


def explain_command(
    ctx: typer.Context,
    model: o.Model = None,
    gpus: o.Gpus = None,
    hardware: o.Hardware = None,
    gpus_per_node: o.GpusPerNode = None,
    seq_length: o.SeqLength = None,
    global_batch_size: o.GlobalBatchSize = None,
    batch_tokens: o.BatchTokens = None,
    dtype: o.Dtype = None,
    runtime: o.Runtime = None,
    tokens: o.Tokens = None,
    tp: o.Tps = None,
    pp: o.Pps = None,
    dp: o.Dps = None,
    cp: o.Cps = None,
    ep: o.Eps = None,
    etp: o.Etps = None,
    vpp: o.Vpps = None,
    micro_batch_size: o.MicroBatchSizes = None,
    schedule: o.Schedules = None,
    zero_stage: o.ZeroStages = None,
    shard_size: o.ShardSizes = None,
    recompute: o.Recomputes = None,
    top: o.Top = None,
    time_limit: o.TimeLimit = None,
    tp_across_nodes: o.TpAcrossNodes = False,
    memory_headroom: o.Headroom = None,
    moe_imbalance: o.Imbalance = None,
    straggler_fraction: o.Straggler = None,
    assume: o.Assume = None,
    calibration: o.Calibration = None,
    json: o.Json = False,
) -> None:
    """Say why the best layout is the best or, with some of its axes pinned, why those are not chosen.

    Takes the main job's options. With pins it plans with them and without, and says what refuses them, what does not
    fit, or where the seconds go; without, what decides against each alternative and what would change the choice.

    \b
    Example:
      plan explain --model 405b --gpus 2048 --tp 16
      plan explain --model 405b --gpus 2048
    """
    from planner.cli.inputs import read_job, read_limits
    from planner.cli.output import dumps, show, waiting
    from planner.report.explain import render_explanation
    from planner.search.why.explain import explain

    job, limits = read_job(ctx.params), read_limits(ctx.params)
    with waiting("searching"):
        answer = explain(job.model, job.cluster, job.training, limits=limits, runtime=job.runtime_spec)
    if json:
        sys.stdout.write(dumps(answer.to_json()))
    else:
        show(render_explanation(answer))
