"""Replays and comparisons of schedules as JSON; seconds and counts, fields are only added."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from planner.schedule.compare import ScheduleComparison, StragglerCost
from planner.schedule.synthesis import Synthesis
from planner.schedule.timeline import Timeline


def comparison_json(row: ScheduleComparison) -> dict[str, Any]:
    """One schedule of a comparison."""
    shape = {"schedule": row.name, "vpp": row.vpp}
    if row.timeline is None:
        return {**shape, "refused": row.refusal.message if row.refusal else ""}
    schedule = row.timeline.schedule
    return {
        **shape,
        "step_s": row.step_s,
        "bubble_fraction": row.bubble_fraction,
        "peak_in_flight_microbatches": row.timeline.peak_in_flight_microbatches.tolist(),
        "num_weight_copies": schedule.num_weight_copies,
        "splits_backward": schedule.splits_backward,
        "asynchronous": schedule.asynchronous,
    }


def timeline_json(
    timeline: Timeline, synthesis: Synthesis | None = None, straggler: StragglerCost | None = None
) -> dict[str, Any]:
    """A replay with every action's start and end; how an order was found and what slow ranks cost, where known."""
    schedule = timeline.schedule
    answer: dict[str, Any] = {
        "schedule": schedule.name,
        "pp": schedule.pp,
        "vpp": schedule.vpp,
        "num_microbatches": schedule.num_microbatches,
        "makespan_s": timeline.makespan_s,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_of_useful_fraction": timeline.bubble_of_useful_fraction,
        "busy_s": timeline.busy_s.tolist(),
        "idle_s": {cause: seconds.tolist() for cause, seconds in timeline.idle_s.items()},
        "peak_in_flight_microbatches": timeline.peak_in_flight_microbatches.tolist(),
        "stage_to_rank": list(schedule.stage_to_rank),
        "ranks": [
            [{"action": str(action), "start_s": start_s, "end_s": end_s} for action, start_s, end_s in rank]
            for rank in (
                zip(actions, starts.tolist(), ends.tolist(), strict=True)
                for actions, starts, ends in zip(schedule.ranks, timeline.start_s, timeline.end_s, strict=True)
            )
        ],
    }
    if synthesis is not None:
        answer["lower_bound_s"], answer["gap"] = synthesis.lower_bound_s, synthesis.gap_fraction
        answer["best_named"] = None if synthesis.named is None else synthesis.named
        answer["best_named_s"] = None if synthesis.named is None else synthesis.named_makespan_s
    if straggler is not None:
        answer["straggler"] = asdict(straggler)
    return answer
