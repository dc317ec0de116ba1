"""`plan explain`: why this layout, or why not the one that the pins ask for."""

from __future__ import annotations

import sys

from planner.cli import options as o
from planner.cli.job_options import SearchOptions, job_options


@job_options
def explain_command(
    asked: SearchOptions,
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

    job, limits = read_job(asked), read_limits(asked)
    with waiting("searching"):
        answer = explain(job.model, job.cluster, job.training, limits=limits, runtime=job.runtime_spec)
    if json:
        sys.stdout.write(dumps(answer.to_json()))
    else:
        show(render_explanation(answer))
