"""launch.sh: a script that is started by hand on every node."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.trainer_files import ExportFile, LaunchCommand
from planner.export.launch.nodes import last_node_lines, nodes_of, start_line
from planner.export.launch.shell import (
    ADDRESS,
    PREFLIGHT_LINE,
    first_run_note,
    passed_arguments,
    placeholders,
    prologue,
)

LAUNCH = "launch.sh"
_NODE = '"${NODE_RANK:-0}"'


def torchrun_script(plan: Plan, command: LaunchCommand) -> ExportFile:
    """launch.sh: runs this node's ranks; NODE_RANK and MASTER_ADDR say which node it is and where the first one is."""
    lines = [
        "#!/usr/bin/env bash",
        (command.comments + first_run_note(command, f"bash {LAUNCH}")).rstrip("\n"),
        *_per_node_note(plan),
        '[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"',
        *placeholders(command.placeholders),
        "set -euo pipefail",
        'PLAN_DIR="${PLAN_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}"',
        *prologue(command),
        ADDRESS,
        *last_node_lines(plan, _NODE),
        PREFLIGHT_LINE,
        f"{start_line(plan, command, _NODE)} \\\n  {passed_arguments(command)}",
    ]
    return ExportFile(LAUNCH, "\n".join(lines) + "\n", executable=True, placeholders=command.placeholders)


def _per_node_note(plan: Plan) -> list[str]:
    nodes, *_ = nodes_of(plan)
    return [f"# run on each of {nodes} nodes with NODE_RANK=0..{nodes - 1} and MASTER_ADDR"] if nodes > 1 else []
