"""preflight.py: the program that looks at a node before its ranks start, with the checks of one plan."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from planner.answer import Plan
from planner.export.common.trainer_files import ExportFile, LaunchCommand
from planner.export.launch.nodes import nodes_of

PREFLIGHT = "preflight.py"
_NO_CHECKS = 'json.loads("{}")'


def preflight(plan: Plan, command: LaunchCommand) -> ExportFile:
    """The program, and what it looks for: GPUs of a node, packages, placeholders, the trainer's version."""
    _, gpus, _ = nodes_of(plan)
    checks = {
        "gpus": gpus,
        "packages": [asdict(requirement) for requirement in command.requirements],
        "placeholders": [asdict(placeholder) for placeholder in command.placeholders],
        "trainer": asdict(command.trainer),
    }
    source = Path(__file__).with_name("node_check.py").read_text(encoding="utf-8")
    before, found, after = source.partition(_NO_CHECKS)
    assert found
    # JSON in a literal of Python: no text of a plan can leave it
    return ExportFile(PREFLIGHT, f"{before}json.loads({json.dumps(json.dumps(checks))}){after}")
