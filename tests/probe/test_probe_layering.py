"""The folders of the probe import each other in one direction only, imports inside functions included."""

from __future__ import annotations

import re
from pathlib import Path

PROBE = Path(__file__).parents[2] / "planner" / "probe"
PARTS = ("model", "rank", "launch")
"""The folders of the probe. A module imports only from its own folder and from those before it."""
FIRST = ("run", "result", "run_price", "torch_build", "plan_slice", "plan_runs")
"""Modules of the probe's own folder that the folders import; the others (probe, worker) import these."""


def test_each_part_of_the_probe_imports_only_parts_before_it() -> None:
    def part(name: str) -> int:
        return PARTS.index(name) if name in PARTS else -1 if name in FIRST else len(PARTS)

    upward = {
        f"{path.relative_to(PROBE)} imports {imported}"
        for path in PROBE.rglob("*.py")
        for imported in re.findall(r"^\s*from planner\.probe\.(\w+)", path.read_text(), re.MULTILINE)
        if part(imported) > part(path.relative_to(PROBE).parts[0].removesuffix(".py"))
    }
    assert upward == set()
