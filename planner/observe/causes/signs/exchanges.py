"""Signs in exchanges: slower than their links, more exposed than planned, hidden behind nothing, a longer bubble."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import get_args

from planner.layout.candidate import Candidate
from planner.observe.causes.signs.ranks import waits
from planner.observe.causes.signs.seen import Rank, Seen
from planner.observe.causes.signs.sign import Sign, sure
from planner.observe.traces.results import CollectiveTime, TraceStep
from planner.physics.communication import Kind, Places, collective_s, data_parallel_places, group_of
from planner.report.format import seconds

SLOWER = 1.25
"""Exchanges beside products take up to so much longer, which share the GPU with them; so do prices of links err."""
_NOISE = 0.1
_LEAST_S = 1e-4
"""Shorter exchanges are latency, which varies."""
_EXPOSED_FRACTION = 0.04
_TERMS = {"tp": "tp_comm_s", "cp": "cp_comm_s", "ep": "ep_comm_s", "dp": "exposed_dp_s"}
_SAME = {"etp": "tp", "edp": "dp"}
_GRADIENTS = (
    "all-grads-sync", "grads-all-reduce", "backward-params-all-reduce", "backward-reduce-model-grads",
    "params-all-gather", "bwd_allreduce",
)  # fmt: skip
"""Timers of what of gradients and parameters is not hidden."""
_PASSES, _BOTH = ("forward-compute", "backward-compute"), "forward-backward"


@dataclass(frozen=True, slots=True)
class _Rate:
    """The exchanges of one group: seconds that they take and that they should take, of a step."""

    group: str
    taken_s: float
    due_s: float


def slow_exchange(seen: Seen) -> Sign | None:
    """Exchanges whose transfers take longer than their bytes take over the links, or than in the earlier run."""
    rates = _rates(seen)
    if not rates:
        return None
    worst = max(rates, key=lambda rate: rate.taken_s / rate.due_s)
    ratio, held = worst.taken_s / worst.due_s, "their links say" if seen.case.earlier is None else "in the earlier run"
    says = f"transfers of the {worst.group} group take {ratio:.1f} times as long as {held}"
    return Sign(sure(ratio, SLOWER, _NOISE), says, max(0.0, worst.taken_s - worst.due_s), worst.group)


def _rates(seen: Seen) -> list[_Rate]:
    earlier = {_form(one): one for rank in seen.earlier_ranks for one in rank.report.collectives}
    sums: dict[str, list[tuple[float, float]]] = {}
    for rank in seen.ranks:
        taken: dict[str, tuple[float, float]] = {}
        for one in rank.report.collectives:
            then = earlier.get(_form(one))
            due_s = (then.transfer_s or then.median_s) if then else _due_s(seen.case.candidate, one)
            taken_s = one.median_s if then and then.transfer_s is None else one.transfer_s
            if due_s is None or taken_s is None or due_s < _LEAST_S:
                continue
            count, before = one.count / max(1, len(rank.report.steps)), taken.get(one.group, (0.0, 0.0))
            taken[one.group] = (before[0] + taken_s * count, before[1] + due_s * count)
        for group, pair in taken.items():
            sums.setdefault(group, []).append(pair)
    return [
        _Rate(group, median(taken for taken, _ in pairs), median(due for _, due in pairs))
        for group, pairs in sums.items()
    ]


def _form(one: CollectiveTime) -> tuple[str, str, int | None, int | None]:
    return one.group, one.collective, one.num_bytes, one.group_size


def _due_s(candidate: Candidate | None, one: CollectiveTime) -> float | None:
    """Seconds that the exchange's bytes take over the links of its group; None for groups that no price knows."""
    group = _SAME.get(one.group, one.group)
    if candidate is None or not one.num_bytes or not one.group_size or one.collective not in get_args(Kind):
        return None
    places: Places
    shape = candidate.shape
    if group == "dp":
        places = data_parallel_places(shape)[one.group == "edp"]
    elif group in ("tp", "cp", "ep"):
        places = group_of(one.group, shape)[1]  # type: ignore[arg-type]
    else:
        return None
    cluster = candidate.pricing.cluster
    return float(collective_s(one.collective, one.num_bytes, one.group_size, places, cluster))  # type: ignore[arg-type]


def exposed(seen: Seen, group: str) -> Sign | None:
    """Communication of a group that nothing hides, beyond what the plan exposes; the rank that waits least says it."""
    planned_s, step_s = _planned_s(seen, group), seen.step_s
    if planned_s is None or step_s is None:
        return None
    found = [rank.middle(partial(_exposed_s, group=group)) for rank in seen.on_gpus]
    timers = [timer.min_s for timer in seen.case.observation.timers if timer.name in _GRADIENTS]
    if group == "dp" and timers and not found:
        found = [sum(timers)]
    if not found:
        return None
    more_s = min(found) - planned_s
    noise = 0.015 + 0.1 * planned_s / step_s
    says = f"{seconds(min(found))} of {group} communication show in a step, {seconds(planned_s)} expected"
    return Sign(sure(more_s / step_s, _EXPOSED_FRACTION, noise), says, max(0.0, more_s), group)


def _groups(group: str) -> Iterable[str]:
    return (group, *(name for name, same in _SAME.items() if same == group))


def _exposed_s(step: TraceStep, group: str) -> float:
    return sum(one.exposed_s for one in step.groups if one.group in _groups(group))


def _planned_s(seen: Seen, group: str) -> float | None:
    """Seconds of a group's communication that the prediction shows; None where it does not say."""
    if seen.earlier_ranks:
        return min(rank.middle(partial(_exposed_s, group=group)) for rank in seen.earlier_ranks)
    prediction = seen.case.prediction
    return None if prediction is None or prediction.kind == "run" else prediction.breakdown.get(_TERMS[group])


def unhidden(seen: Seen, group: str) -> Sign | None:
    """Communication of a group that runs beside little computing."""
    steps = [step for rank in seen.on_gpus for step in rank.steps]
    found = [one for step in steps for one in step.groups if one.group in _groups(group)]
    busy_s, hidden_s = sum(one.busy_s for one in found), sum(one.hidden_s for one in found)
    total_s = sum(step.wall_s for step in steps)
    if not total_s or busy_s < _EXPOSED_FRACTION * total_s:
        return None
    says = f"{hidden_s / busy_s:.0%} of {group} communication runs behind computing"
    share = (busy_s - hidden_s) / total_s * (seen.step_s or 0.0)
    return Sign(sure(0.35, hidden_s / busy_s, 0.1), says, share, group)


def longer_bubble(seen: Seen) -> Sign | None:
    """Stages that stand still longer than the order of the passes says."""
    prediction, step_s, size = seen.case.prediction, seen.step_s, seen.size("pp")
    if prediction is None or prediction.kind == "run" or step_s is None or size is None or size < 2:
        return None
    planned_s = prediction.breakdown.get("bubble_s", 0.0) + prediction.breakdown.get("pp_comm_s", 0.0)
    found_s = _still_s(seen)
    if found_s is None:
        return None
    more_s = found_s - planned_s
    says = f"stages stand still for {seconds(max(0.0, found_s))} of a step, {seconds(planned_s)} by their order"
    return Sign(sure(more_s / step_s, 0.05, 0.02 + 0.1 * planned_s / step_s), says, max(0.0, more_s))


def _still_s(seen: Seen) -> float | None:
    """Seconds in which the busiest rank waits for other stages, by traces or by the timer around all passes."""
    if seen.on_gpus:
        return min(_waits_in_pipeline_s(rank) for rank in seen.on_gpus)
    timers = {timer.name: timer for timer in seen.case.observation.timers}
    if _BOTH not in timers or not all(name in timers for name in _PASSES):
        return None
    return timers[_BOTH].max_s - sum(timers[name].max_s for name in _PASSES)


def _waits_in_pipeline_s(rank: Rank) -> float:
    return rank.middle(lambda step: waits(step) - sum(_exposed_s(step, group) for group in _TERMS))
