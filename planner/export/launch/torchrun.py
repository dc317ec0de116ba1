"""launch.sh: a script that is started by hand on every node."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.trainer_files import ExportFile, LaunchCommand
from planner.export.launch.nodes import nodes_of, torchrun_line
from planner.export.launch.shell import ADDRESS, passed_arguments, prologue


def torchrun_script(plan: Plan, command: LaunchCommand) -> ExportFile:
    """launch.sh: runs this node's ranks; NODE_RANK and MASTER_ADDR say which node it is and where the first one is."""
    run = torchrun_line(plan, '"${NODE_RANK:-0}"')
    lines = [
        "#!/usr/bin/env bash",
        command.comments.rstrip("\n"),
        *_per_node_note(plan),
        "set -euo pipefail",
        'PLAN_DIR="${PLAN_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}"',
        *prologue(command),
        ADDRESS,
        "",
        f"{run} \\\n  {command.program} {passed_arguments(command)}",
    ]
    return ExportFile("launch.sh", "\n".join(lines) + "\n", executable=True)


def _per_node_note(plan: Plan) -> list[str]:
    nodes, *_ = nodes_of(plan)
    return [f"# run on each of {nodes} nodes with NODE_RANK=0..{nodes - 1} and MASTER_ADDR"] if nodes > 1 else []
