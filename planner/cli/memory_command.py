"""`plan memory`: what fills the memory of a plan's stages, tensor by tensor, and over the step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from planner.cli import options as o
from planner.errors import SpecError

if TYPE_CHECKING:
    from planner.answer.memory import MemoryAnswer, MemoryOfStage
    from planner.layout.candidate import Candidate

_log = logging.getLogger(__name__)
_WHAT = "What to show"

Stage = Annotated[int | None, o.number(_WHAT, "--stage", "One stage. [all, and tensors of the fullest]")]
Alternative = Annotated[int | None, o.number(_WHAT, "--alternative", "The plan's N-th alternative. [the best]")]
Plot = Annotated[
    str | None, o.text(o.OUTPUT, "--plot", "FILE", "Draw it over the step: .png, .svg or .html; - is the terminal.")
]
Snapshot = Annotated[
    str | None, o.text(o.OUTPUT, "--snapshot", "FILE", "Write the stage's step for pytorch.org/memory_viz.")
]
Output = Annotated[str | None, o.text(o.OUTPUT, "--output -o", "FILE", "Save the answer as JSON; - is stdout.")]
Force = Annotated[bool, o.text(o.OUTPUT, "--force", None, "Let -o, --plot and --snapshot replace a file.")]


def memory_command(
    plan: o.PlanFile,
    stage: Stage = None,
    alternative: Alternative = None,
    json: o.Json = False,
    plot: Plot = None,
    snapshot: Snapshot = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Show the tensors that are alive when a stage's memory is fullest: which, of what shape, and who frees them.

    They add up to the plan's peak. What a change would free, and what it would cost, is priced. --plot and --snapshot
    show the stage that --stage names, or the fullest.

    \b
    Example:
      plan memory plan.json
      plan memory plan.json --stage 0 --plot -
      plan memory plan.json --stage 0 --snapshot stage0.pickle
    """
    from planner.cli.output import dumps, show_and_save, waiting
    from planner.files import STDOUT, refuse_to_overwrite, write_text
    from planner.layout.replan import reprice
    from planner.layout.tensors.explore import explore, shown
    from planner.plan_file import read_plan, with_alternative
    from planner.report.memory.text import render_memory

    for path in (output, plot, snapshot):
        if path is not None:
            refuse_to_overwrite(path, force)
    if plot == output == STDOUT:
        raise SpecError("--plot - and -o -: both are standard output", "name a file for one of them")
    if snapshot == STDOUT:
        raise SpecError("--snapshot: - is no file", "name one, such as --snapshot stage.pickle")
    draw = None if plot is None else _drawing_to(plot)
    chosen = with_alternative(read_plan(plan), alternative)
    num_stages = len(chosen.best.stages)
    if stage is not None and not 0 <= stage < num_stages:
        raise SpecError(f"--stage {stage}: the plan has {num_stages} stages", f"0 to {num_stages - 1}")
    with waiting("listing tensors"):
        candidate = shown(reprice(chosen, chosen.best))
        answer = explore(chosen, chosen.best, candidate, range(num_stages) if stage is None else (stage,))
    _note_fewer(candidate, chosen.best.parallelism.num_microbatches)
    fullest = max(answer.stages, key=lambda one: one.memory.total_bytes)
    if draw is not None and plot is not None:
        draw(answer, fullest, plot, force)
    if snapshot is not None:
        _write_snapshot(answer, fullest, candidate, snapshot, force)
    data = answer.model_dump(mode="json") if json or output is not None else None
    if plot != STDOUT:
        show_and_save(data, render_memory(answer, fullest), json, output, force, indent=None)
    elif output is not None:
        write_text(output, dumps(data, None), force)


def _note_fewer(candidate: Candidate, num_microbatches: int) -> None:
    if candidate.num_microbatches < num_microbatches:
        _log.warning(
            "a step of %s micro-batches is too long to show; one of %s has the same peaks",
            f"{num_microbatches:,}", f"{candidate.num_microbatches:,}",
        )  # fmt: skip


def _drawing_to(path: str) -> Callable[[MemoryAnswer, MemoryOfStage, str, bool], None]:
    """The function that draws a stage, once it is known that it can draw to `path`."""
    from pathlib import PurePath

    from planner.files import STDOUT
    from planner.report.memory.plot import SUFFIXES, draw_memory

    if path != STDOUT and PurePath(path).suffix.lower() not in SUFFIXES:
        stem = PurePath(path).stem or "memory"
        raise SpecError(f"--plot: {path}: no such kind of picture", f"name it {stem}.svg, {stem}.png or {stem}.html")
    return draw_memory


def _write_snapshot(answer: MemoryAnswer, stage: MemoryOfStage, candidate: Candidate, path: str, force: bool) -> None:
    from planner.files import write_bytes
    from planner.layout.memory_curve import memory_curves
    from planner.layout.tensors.step import step_of
    from planner.report.memory.torch_snapshot import snapshot
    from planner.schedule.replay import replay

    timeline = replay(candidate.order, candidate.durations)
    step = step_of(candidate, timeline, memory_curves(candidate, timeline)[stage.stage])
    write_bytes(path, snapshot(step.tensors, step.events, stage.stage, answer.model), force)
    _log.info("wrote %s, stage %d: open it at pytorch.org/memory_viz", path, stage.stage)
