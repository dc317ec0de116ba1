"""`plan report`: a plan as one HTML file."""

from __future__ import annotations

import logging
from typing import Annotated

from planner.cli import options as o

_log = logging.getLogger(__name__)
Output = Annotated[str, o.text(o.OUTPUT, "--output -o", "FILE", "File to write; - is stdout. [report.html]")]
Force = Annotated[bool, o.text(o.OUTPUT, "--force", None, "Replace the file.")]


def report_command(plan: o.PlanFile, output: Output = "report.html", force: Force = False) -> None:
    """Write a plan as one HTML file that needs nothing else: stages, memory, seconds, schedule, alternatives, inputs.

    \b
    Example:
      plan report plan.json -o report.html
      plan --model 8b --gpus 16 -o - | plan report - -o report.html
    """
    from planner.cli.output import waiting
    from planner.files import STDOUT, refuse_to_overwrite
    from planner.plan_file import read_plan
    from planner.report.page import write_report

    refuse_to_overwrite(output, force)
    read = read_plan(plan)
    with waiting("drawing"):
        write_report(read, output, force=force)
    if output != STDOUT:
        _log.info("wrote %s", output)
