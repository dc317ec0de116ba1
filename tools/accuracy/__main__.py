"""python -m tools.accuracy finetunes | plans | unsaid [--family NAME] [--json]: studies of accuracy (docs/ACCURACY.md).

`finetunes` holds predictions against published fine-tuning runs, `plans` the planner's own choices against the layouts
that others published, `unsaid` published runs without their switches against the intervals that they then get.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from planner.errors import SpecError, exit_code_of
from planner.validate.rows import load_rows
from planner.validate.score import evaluate_rows
from tools.accuracy.finetunes import show_runs
from tools.accuracy.plans import show_plans
from tools.accuracy.unsaid import show_unsaid


def main(arguments: Sequence[str]) -> None:
    """Print the study that the first argument names."""
    parser = argparse.ArgumentParser(prog="python -m tools.accuracy", description="Studies of accuracy.")
    parser.add_argument("study", choices=("finetunes", "plans", "unsaid"))
    parser.add_argument("--family", metavar="NAME", help="only the runs of this source")
    parser.add_argument("--json", action="store_true")
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
    else:
        show_unsaid(scored, asked.json)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
