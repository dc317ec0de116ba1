"""Signs in exchanges: slower than their links, more exposed than planned, hidden behind nothing, a longer bubble."""

from __future__ import annotations

from statistics import median

from planner.observe.causes.signs.seen import Rank, Seen
from planner.observe.causes.signs.sign import Sign, large, sure
from planner.observe.gap.account import Account, Exchanges
from planner.observe.gap.terms import (
    ATTENTION,
    BUBBLE,
    HOST_GAPS,
    MEMORY_BOUND,
    OTHER,
    PIPELINE,
    PP_LINK_RATE,
    PRODUCTS,
)
from planner.observe.traces.groups import POINT_TO_POINT, UNKNOWN
from planner.physics.passes import COMM_GROUPS
from planner.report.format import seconds

GROUPS = ("tp", "cp", "ep", "dp")
"""Groups whose exchanges have prices of their own."""
SLOWER, _NOISE = 1.25, 0.08
"""Exchanges beside products take up to so much longer, which share the GPU with them; so do prices of links err."""
_LEAST_FRACTION = 0.01
_EXPOSED_FRACTION, _MORE, _MORE_ON_HOST = 0.03, 0.05, 0.09
_PAIRS = (POINT_TO_POINT, "pp")
_GRADIENTS = (
    "all-grads-sync", "grads-all-reduce", "backward-params-all-reduce", "backward-reduce-model-grads",
    "params-all-gather", "bwd_allreduce",
)  # fmt: skip
"""Timers of what of gradients and parameters is not hidden."""
_COMPUTING = (PRODUCTS, ATTENTION, MEMORY_BOUND, OTHER, HOST_GAPS)
_PASSES, _BOTH = ("forward-compute", "backward-compute"), "forward-backward"


def slow(seen: Seen, group: str) -> Sign | None:
    """Transfers of a group that take longer than their bytes take over the links; waits for late ranks are left out."""
    known = [pair for pair in _known(seen, group) if pair[0].late_s is not None]
    if not known or seen.step_s is None or (seen.earlier_ranks and seen.ranks):
        return None
    found_s, due_s = (median(_moved_s(pair[side]) for pair in known) for side in (0, 1))
    if due_s < _LEAST_FRACTION * seen.step_s:
        return None
    says = f"transfers of the {group} group take {found_s / due_s:.1f} times as long as over links as planned"
    return Sign(sure(found_s / due_s, SLOWER, _NOISE), says, max(0.0, found_s - due_s), group)


def long(seen: Seen, group: str) -> Sign | None:
    """Exchanges of a group that run longer than planned, where no trace of a peer tells transfers from waits."""
    known = _known(seen, group)
    if not known or seen.step_s is None or any(found.late_s is not None for found, _ in known) or seen.earlier_ranks:
        return None
    found_s, due_s = (median(pair[side].busy_s for pair in known) for side in (0, 1))
    if due_s < _LEAST_FRACTION * seen.step_s:
        return None
    says = f"exchanges of the {group} group run {found_s / due_s:.1f} times as long as planned, waits among them"
    return Sign(sure(found_s / due_s, SLOWER, _NOISE), says, max(0.0, found_s - due_s), group)


def _known(seen: Seen, group: str) -> list[tuple[Exchanges, Exchanges]]:
    """A group's exchanges on each rank, found and expected."""
    return [
        (pair.found.exchanges[group], pair.expected.exchanges[group])
        for pair in seen.pairs
        if pair.expected and group in pair.found.exchanges and group in pair.expected.exchanges
    ]


def _moved_s(one: Exchanges) -> float:
    return one.busy_s - (one.late_s or 0.0)


def slower_than_before(seen: Seen) -> Sign | None:
    """Exchanges of a group that transfer slower than in the earlier run; waits for late ranks are left out."""
    before = {rank.report.rank: rank for rank in seen.earlier_ranks}
    rows: dict[str, list[tuple[float, float]]] = {}
    for rank in seen.ranks:
        then = before.get(rank.report.rank)
        if then is None:
            continue
        for group in sorted(_groups_of(rank) & _groups_of(then)):
            rows.setdefault(group, []).append((_transferred_s(rank, group), _transferred_s(then, group)))
    if not rows or seen.step_s is None:
        return None
    told = []
    for group, pairs in rows.items():
        # all ranks of a collective transfer together; of a pair, one may only wait
        chosen = max if group in _PAIRS else min
        now_s, then_s = chosen(pairs, key=lambda pair: pair[0] - pair[1])
        told.append((now_s - then_s, now_s / max(then_s, 1e-9), group))
    more_s, ratio, group = max(told)
    name = "" if group == UNKNOWN else f" of the {group} group" if group not in _PAIRS else " between pairs of ranks"
    says = f"transfers{name} take {seconds(max(0.0, more_s))} of a step more than in the earlier run"
    least = _MORE_ON_HOST if any(rank.on_host for rank in seen.ranks) else _MORE
    strength = min(sure(ratio, SLOWER, _NOISE), sure(more_s / seen.step_s, least, least / 3))
    times = max(1.0, more_s / seen.step_s / least)
    return Sign(strength, says, max(0.0, more_s), _where(seen, group), times)


def _where(seen: Seen, group: str) -> str:
    """The group; one without a name is that of the only axis with several ranks."""
    axes = [axis for axis in (*GROUPS, "pp") if (seen.size(axis) or 1) > 1]
    return group if group in GROUPS else axes[0] if len(axes) == 1 else ""


def _groups_of(rank: Rank) -> set[str]:
    return {one.group for one in rank.report.collectives if one.wait_s is not None}


def _transferred_s(rank: Rank, group: str) -> float:
    """Seconds of a step in which a group's exchanges run, without waits for late ranks."""
    busy_s = rank.middle(lambda step: sum(one.busy_s for one in step.groups if one.group == group))
    rows = [one for one in rank.report.collectives if one.group == group and one.wait_s is not None]
    waited_s = sum((one.wait_s or 0.0) * one.count for one in rows) / max(1, len(rank.report.steps))
    return max(0.0, busy_s - waited_s)


def exposed(seen: Seen, group: str) -> Sign | None:
    """Communication of a group that nothing hides, beyond what the plan exposes; the rank that waits least says it."""
    if seen.step_s is None:
        return None
    known = [(_shown_s(found), _shown_s(due) + _slower_s(seen, found, due)) for found, due in _known(seen, group)]
    if not known and group == "dp":
        known = _by_timers(seen)
    if not known:
        return None
    found_s, due_s = min(known, key=lambda pair: pair[0] - pair[1])
    more_s = found_s - due_s
    noise = 0.01 + 0.08 * due_s / seen.step_s
    says = f"{seconds(found_s)} of {group} communication show in a step, {seconds(due_s)} expected"
    return Sign(sure(more_s / seen.step_s, _EXPOSED_FRACTION, noise), says, max(0.0, more_s), group)


def _slower_s(seen: Seen, found: Exchanges, due: Exchanges) -> float:
    """Seconds that show because transfers are slower than in the earlier run: the link's, not those of hiding less."""
    if not seen.earlier_ranks or found.late_s is None or due.late_s is None:
        return 0.0
    return max(0.0, _moved_s(found) - _moved_s(due))


def _shown_s(one: Exchanges) -> float:
    """Seconds that show, without waits for late ranks where these are known."""
    return max(0.0, one.busy_s - one.hidden_s - (one.late_s or 0.0))


def _by_timers(seen: Seen) -> list[tuple[float, float]]:
    """The trainer's timers of gradients and parameters on the rank that waits least."""
    timers = [timer.min_s for timer in seen.case.observation.timers if timer.name in _GRADIENTS]
    prediction = seen.case.prediction
    if not timers or prediction is None or prediction.kind == "run":
        return []
    return [(sum(timers), prediction.breakdown.get("exposed_dp_s", 0.0))]


def unhidden(seen: Seen, group: str) -> Sign | None:
    """Communication of a group that runs beside little computing."""
    found = [pair.found.exchanges[group] for pair in seen.pairs if group in pair.found.exchanges]
    busy_s, hidden_s = sum(one.busy_s for one in found), sum(one.hidden_s for one in found)
    if not found or busy_s < _EXPOSED_FRACTION * sum(pair.rank.wall_s for pair in seen.pairs):
        return None
    says = f"{hidden_s / busy_s:.0%} of {group} communication runs behind computing"
    return Sign(sure(0.35, hidden_s / busy_s, 0.1), says, (busy_s - hidden_s) / len(found), group)


def late_changes(seen: Seen) -> Sign | None:
    """Exchanges of experts in which every rank waits, since the rank that comes last changes."""
    known = [(found.late_s, due.late_s or 0.0) for found, due in _known(seen, "ep") if found.late_s is not None]
    if len(known) < 2 or seen.step_s is None:
        return None
    least_s = min(found_s - due_s for found_s, due_s in known)
    says = f"each rank waits {seconds(max(0.0, least_s))} more of a step in exchanges of experts: the late one changes"
    return large(least_s / seen.step_s, _EXPOSED_FRACTION, 0.01, says, max(0.0, least_s), "ep")


def longer_bubble(seen: Seen) -> Sign | None:
    """Stages that stand still longer than the order of the passes says, where these take as long as they do."""
    if seen.step_s is None or seen.size("pp") == 1:
        return None
    known = [
        (_pipeline_s(pair.found), _pipeline_s(pair.expected) * _longer(_passes_s(pair.found), _passes_s(pair.expected)))
        for pair in seen.pairs
        if pair.expected is not None
    ]
    known = known or _still_s(seen)
    if not known:
        return None
    found_s, due_s = min(known, key=lambda pair: pair[0] - pair[1])
    says = f"stages stand still for {seconds(max(0.0, found_s))} of a step, {seconds(due_s)} by their order"
    share = (found_s - due_s) / seen.step_s
    return Sign(sure(share, 0.03, 0.01 + 0.1 * due_s / seen.step_s), says, max(0.0, found_s - due_s))


def _pipeline_s(account: Account) -> float:
    return sum(account.parts.get(name, 0.0) for name in (BUBBLE, PP_LINK_RATE, PIPELINE))


def _passes_s(account: Account) -> float:
    """Seconds of a step that a rank's passes take."""
    inside = (account.exchanges[group] for group in COMM_GROUPS if group in account.exchanges)
    return sum(account.parts.get(name, 0.0) for name in _COMPUTING) + sum(one.busy_s - one.hidden_s for one in inside)


def _longer(found_s: float, due_s: float) -> float:
    """How many times as long passes take: the stages that wait for them wait so many times as long."""
    return max(1.0, found_s / due_s) if due_s > 0 else 1.0


def _still_s(seen: Seen) -> list[tuple[float, float]]:
    """Seconds in which the busiest rank waits for other stages, by the timer around all passes."""
    timers = {timer.name: timer for timer in seen.case.observation.timers}
    prediction = seen.case.prediction
    if _BOTH not in timers or not all(name in timers for name in _PASSES):
        return []
    if prediction is None or prediction.kind == "run" or not seen.size("pp"):
        return []
    due_s = prediction.breakdown.get("bubble_s", 0.0) + prediction.breakdown.get("pp_comm_s", 0.0)
    passes_s = sum(timers[name].max_s for name in _PASSES)
    inside = ("compute_s", *(f"{group}_comm_s" for group in COMM_GROUPS))
    planned_s = sum(prediction.breakdown.get(name, 0.0) for name in inside)
    return [(timers[_BOTH].max_s - passes_s, due_s * _longer(passes_s, planned_s))]
