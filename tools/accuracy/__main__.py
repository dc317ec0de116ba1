"""python -m tools.accuracy finetunes | plans | unsaid | plot [--family NAME] [--json] [-o FILE] (docs/ACCURACY.md).

`finetunes` holds predictions against published fine-tuning runs, `plans` the planner's own choices against the layouts
that others published, `unsaid` published runs without their switches against the intervals that they then get; `plot`
draws predicted against measured as HTML.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from planner.errors import SpecError
from planner.files import write_text
from planner.validate.rows import load_rows
from planner.validate.score import evaluate_rows
from tools import exit_code_of
from tools.accuracy.finetunes import show_runs
from tools.accuracy.plans import show_plans
from tools.accuracy.scatter import points_of, scatter_page
from tools.accuracy.unsaid import show_unsaid


def main(arguments: Sequence[str]) -> None:
    """Print the study that the first argument names."""
    parser = argparse.ArgumentParser(prog="python -m tools.accuracy", description="Studies of accuracy.")
    parser.add_argument("study", choices=("finetunes", "plans", "unsaid", "plot"))
    parser.add_argument("--family", metavar="NAME", help="only the runs of this source")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-o", "--output", metavar="FILE", default="predicted.html", help="the plot [%(default)s]")
    asked = parser.parse_args(arguments)
    if asked.study == "finetunes":
        show_runs(asked.json)
        return
    families = dict.fromkeys(row.family for row in load_rows())
    if asked.family is not None and asked.family not in families:
        raise SpecError(f"--family: {asked.family!r} is unknown", f"one of {', '.join(families)}")
    scored = evaluate_rows([row for row in load_rows() if asked.family in (None, row.family)])
    if asked.study == "plans":
        show_plans(scored, asked.json, each=asked.family is not None)
    elif asked.study == "unsaid":
        show_unsaid(scored, asked.json)
    else:
        write_text(asked.output, scatter_page(points_of(scored, each=asked.family is not None)), force=True)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
