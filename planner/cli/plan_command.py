"""`plan --model … --gpus …`: the main job."""

from __future__ import annotations

import typer

from planner.cli import options as o
from planner.cli.job_options import PlanOptions, command_line, job_options
from planner.errors import SpecError


@job_options
def plan_command(
    ctx: typer.Context,
    asked: PlanOptions,
    json: o.Json = False,
    output: o.Output = None,
    force: o.Force = False,
) -> None:
    """Plan how to lay a large model out on N GPUs: the fastest layout that fits, proven, and why not the others.

    An option of the layout pins that axis to a value, or restricts it to a comma list.

    \b
    Example:
      plan --model 405b --gpus 2048
      plan --model ./config.json --gpus 512 --hardware h200 -s 8192 -b 1024
      plan --model deepseek-v3 --gpus 2048 --pp 8,16 --tokens 15T -o plan.json
      plan --model 405b --gpus 2048 --phases docs/phases/llama-3-405b.yaml
      plan --from plan.json --gpus 1984
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options_before(ctx)
        return
    if asked.phases is not None:
        from planner.cli.phases import plan_phases

        return plan_phases(asked, asked.phases, json, output, force)
    if asked.from_ is not None:
        from planner.cli.replan import replan_command

        return replan_command(asked, asked.from_, asked.keep, json, output, force)
    if asked.keep is not None:
        raise SpecError("--keep: without --from, no job has anything to keep", "add --from plan.json")
    from planner.cli.inputs import read_job, read_limits
    from planner.cli.output import answer, waiting
    from planner.files import refuse_to_overwrite
    from planner.search.search import plan

    if asked.tokens is not None or asked.examples is not None:
        for name in ("days", "usd"):
            if getattr(asked, name) is not None:
                raise SpecError(f"--{name}: asks how many tokens, which are given", f"leave --{name} out")
    job = read_job(asked)
    limits = read_limits(asked, job)
    if output is not None:
        refuse_to_overwrite(output, force)
    with waiting("searching"):
        best = plan(job.model, job.cluster, job.training, limits=limits, runtime=job.runtime_spec)
    if asked.days is not None or asked.usd is not None:
        from planner.layout.assemble import within

        best = within(best, asked.days, asked.usd)
    answer(best.model_copy(update={"command": command_line(asked)}), json, output, force)


def _refuse_options_before(ctx: typer.Context) -> None:
    given = [name for name, value in ctx.params.items() if value is not None and value is not False]
    if given:
        option, command = "--" + given[0].strip("_").replace("_", "-"), ctx.invoked_subcommand
        raise SpecError(f"{option}: stands before the command {command}", f"write plan {command} {option} …")
