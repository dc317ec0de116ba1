"""Schedules in the CSV that torch.distributed.pipelining loads, with one row of compute actions per rank.

`_PipelineScheduleRuntime(stages, num_microbatches, loss_fn)._load_csv(file)` runs it; torch adds sends and receives.
The spelling is that of torch 2.13 (`_Action.from_str`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from planner.errors import SpecError
from planner.schedule.actions import Action, Schedule
from planner.schedule.graph import compile_schedule
from planner.specs.reading import parse_rows

_HINT = "give one row of actions such as 0F0,1F0,1B0 a rank, as `plan schedule 1f1b --csv FILE` writes them"


def to_torch_csv(schedule: Schedule) -> str:
    """The schedule in `_load_csv`'s compute-only format.

    Forwards that run together with a backward (DualPipeV) are written `(0F8;7B0)OVERLAP_F_B`; torch runs the two one
    after the other unless a custom function is registered. Raises SpecError for schedules that torch's runtime cannot
    run: two copies of the model, steps without a flush, forwards alone, lists that deadlock.
    """
    for refused, why in (
        (schedule.num_directions > 1, "holds the model twice; torch places each stage on one rank"),
        (schedule.asynchronous, "runs steps without a flush; torch flushes after each"),
        (schedule.forward_only, "has no backward"),
    ):
        if refused:
            raise SpecError(
                f"schedule {schedule.name} {why}", hint="choose another schedule, such as 1f1b, zb-v or dualpipe-v"
            )
    compile_schedule(schedule)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for rank, actions in enumerate(schedule.ranks):
        pairs = set(schedule.overlapped[rank]) if schedule.overlapped else set()
        writer.writerow(
            f"({action};{actions[index + 1]})OVERLAP_F_B" if index in pairs else str(action)
            for index, action in enumerate(actions)
            if index - 1 not in pairs
        )
    return text.getvalue()


def from_torch_csv(text: str, name: str = "csv") -> Schedule:
    """Read compute actions back and skip idle cells; raises SpecError unless they form a schedule that can run."""
    ranks: list[tuple[Action, ...]] = []
    overlapped: list[tuple[int, ...]] = []
    for row in parse_rows(text, "the schedule is no CSV", _HINT):
        actions: list[Action] = []
        pairs: list[int] = []
        for cell in (cell.strip() for cell in row):
            if cell.endswith("OVERLAP_F_B"):
                pairs.append(len(actions))
                actions.extend(Action.parse(part) for part in cell.removesuffix("OVERLAP_F_B").strip("()").split(";"))
            elif cell:
                actions.append(Action.parse(cell))
        ranks.append(tuple(actions))
        overlapped.append(tuple(pairs))
    schedule = _schedule(name, tuple(ranks), tuple(overlapped))
    compile_schedule(schedule)
    return schedule


def made_order(lines: Sequence[str], name: str) -> Schedule:
    """The order of a saved layout's actions, one line a rank; SpecError unless they form a schedule that can run."""
    return from_torch_csv("\n".join(",".join(line.split()) for line in lines), name)


def _schedule(name: str, ranks: tuple[tuple[Action, ...], ...], overlapped: tuple[tuple[int, ...], ...]) -> Schedule:
    rank_of = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
    missing = next((number for number, stage in enumerate(sorted(rank_of)) if number != stage), None)
    if missing is not None or not rank_of or not all(ranks):
        raise SpecError(f"the schedule has no actions for stage {missing or 0}, or a rank without any", _HINT)
    return Schedule(
        name,
        ranks,
        tuple(rank_of[stage] for stage in sorted(rank_of)),
        1 + max(action.microbatch for actions in ranks for action in actions),
        splits_backward=any(action.kind == "I" for actions in ranks for action in actions),
        overlapped=overlapped if any(overlapped) else (),
    )
