"""The stages of a plan: runs of alike ones in short, and every stage with its layers and its memory by item, folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from planner.answer import Plan
from planner.report.format import gibibytes, large
from planner.report.html.pieces import Html, folded, table
from planner.report.labels import MEMORY
from planner.report.rows import STAGE_HEADS, runs_of_stages, shown_cells
from planner.report.view import View


def stages(plan: Plan, view: View) -> Iterator[Html]:
    """A row for each run of neighbouring stages that hold the same; then every stage, folded."""
    rows = [shown_cells(row.cells, view.mixes_recompute) for row in runs_of_stages(view.stages)]
    heads = shown_cells(STAGE_HEADS, view.mixes_recompute)
    yield table(heads, rows, "rll" + "l" * (len(heads) - 7) + "rrrr")
    yield folded("Every stage: seconds, layers and parameters", _each(plan, view))
    yield folded("Every stage: memory by item, in GiB", _memory(plan))


def _each(plan: Plan, view: View) -> Html:
    heads = (*STAGE_HEADS, "parameters", "layers, counted from 0")
    rows = [
        (*row.cells, large(stage.num_parameters), chunks(stage.chunks))
        for row, stage in zip(view.stages, plan.stages, strict=True)
    ]
    return table(heads, rows, "rlllrrrrrn")


def chunks(ranges: Sequence[tuple[int, int]]) -> str:
    """`0–6`, `3, 19, 35`, or `2–3, then every 16 on to 114–115` where as many come again and again."""
    held = [(first, end) for first, end in ranges if end > first]
    gaps = {after[0] - before[0] for before, after in pairwise(held)}
    sizes = {end - first for first, end in held}
    if len(held) > 3 and len(gaps) == len(sizes) == 1:
        return f"{_range(*held[0])}, then every {gaps.pop()} on to {_range(*held[-1])}"
    return ", ".join(_range(first, end) for first, end in held)


def _range(first: int, end: int) -> str:
    return f"{first}–{end - 1}" if end > first + 1 else str(first)


def _memory(plan: Plan) -> Html:
    heads = ["stage", *MEMORY.values()]
    rows: list[list[object]] = [
        [stage.stage, *(gibibytes(getattr(stage.memory, name)) for name in MEMORY)] for stage in plan.stages
    ]
    if any(stage.memory.total_bytes_interval for stage in plan.stages):
        heads.append("80% interval")
        for row, stage in zip(rows, plan.stages, strict=True):
            row.append("–".join(map(gibibytes, stage.memory.total_bytes_interval or ())))
    return table(heads, rows, "r" * len(heads))
