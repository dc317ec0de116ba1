"""The layouts that are recommended where the fastest is not: safer ones, simpler ones, those that lose less.

Where no layout has a risk of running out of memory as small as was asked, the safest come first. Within a percent of
the fastest, the one comes first that loses least where an assumption fails and that cuts the model into fewest chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product

from planner.answer import Plan, Recommendation
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.price import parallelism_of
from planner.layout.variation import NUM_LAYOUTS, assumed_steps, setting_of
from planner.record import record
from planner.search.case import Case
from planner.search.chunks import least_step_s
from planner.search.enumerate import schedule_options
from planner.search.rebalance import level_split
from planner.search.recipes import pinned, pinned_by
from planner.search.why.misses import least_state_bytes, nearest_miss
from planner.specs.units import gib
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import broken_recipe_rules
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, written


def safer_first(case: Case) -> Iterator[Iterable[Case]]:
    """Cases to search where no layout fits within the risk, those alike of which the fastest counts: with switches that
    save memory, then for the safest layouts, then for all that fit.

    The layout that needs least memory, among the shapes that promise it, says how much can be left free.
    """
    capacity_bytes = case.cluster.hardware.memory_bytes
    # 0 where the host has no room for its part
    yield (saving for saving in saving_memory(case) if 0 < least_state_bytes(saving) <= capacity_bytes)
    if case.limits.memory_headroom_gib is not None or least_state_bytes(case) > capacity_bytes:
        return
    miss = nearest_miss(case)
    if miss is not None and miss.shortfall_bytes < case.headroom_bytes:
        free_gib = gib(case.headroom_bytes - miss.shortfall_bytes)
        yield [case.limited(memory_headroom_gib=free_gib * (1 - 1e-9))]
    yield [case.filling]


def saving_memory(case: Case) -> Iterator[Case]:
    """The case with each switch that only saves memory at each value that needs no consent, where nobody pinned it: by
    itself, or beside a way to shard that it needs."""
    stated = case.limits.switches or {}
    if not isinstance(stated, dict):
        return
    held = pinned_by(case)
    moves = [
        (SWITCHES[name], {name: value})
        for name, values in switches_of(case.runtime).items()
        for value in values[1:]
        if name not in held and value not in SWITCHES[name].consent
    ]
    ways = [{}, *(move for row, move in moves if row.divides_layouts)]
    for way, saving in product(ways, (move for row, move in moves if row.only_saves_memory)):
        with suppress(SpecError):  # it does not go with the job
            yield pinned(case.limited(switches={**stated, **way, **saving}))


def exceeds_risk(plan: Plan, case: Case) -> bool:
    """True if the plan's best layout is likelier to run out of memory than the case accepts."""
    risk = plan.best.oom_probability
    return case.limits.memory_headroom_gib is None and risk is not None and risk > case.limits.oom_risk * (1 + 1e-9)


def with_warning(plan: Plan, found_for: Case, case: Case) -> Plan:
    """The plan with a warning in front of the others of what it took to fit: a switch, or more risk than was asked."""
    best, stage = plan.best, plan.best.worst_stage
    asked, risk = case.limits.oom_risk, best.oom_probability or 0.0
    needed, capacity = gib(stage.memory.total_bytes), plan.cluster.hardware.memory_gib
    says = (
        f"no layout fits with a probability of {100 * (1 - asked):g}%: this one, the safest found, "
        f"fits with {1 - risk:.0%}, for stage {stage.stage} needs {needed:.1f} of {capacity:.1f} GiB"
    )
    held, saving = case.limits.switches or {}, found_for.limits.switches
    if isinstance(saving, dict) and isinstance(held, dict) and saving != held:
        chosen = ",".join(f"{name}={written(value)}" for name, value in saving.items() if name not in held)
        says = f"no layout fits without a switch that saves memory: --switch {chosen}, the fastest found, was chosen"
    elif not exceeds_risk(plan, case):
        return plan
    return plan.model_copy(update={"best": best.model_copy(update={"warnings": (says, *best.warnings)})})


NEAR = 0.01
"""Share of the fastest step that a simpler or more robust layout may cost."""
ALIKE = 0.005
"""Losses within so much of each other count as the same; then the layout with fewer chunks comes first."""
MOST_CHUNKINGS = 5
"""Smaller numbers of chunks that are tried in the place of a layout's own."""


@record
class Recommended:
    """The layouts near the fastest, the one recommended first, and their steps under each assumption."""

    candidates: list[Candidate]
    assumed_s: dict[str, list[float]]
    """Seconds of the first few of them by assumption, as `assumed_steps` has them."""
    reason: Recommendation | None = None


def standing(fastest: Candidate, others: list[Candidate], case: Case, trainer: RuntimeSpec) -> Recommended:
    """The candidates with the most robust of the near ones first, which costs no more than `NEAR`.

    It has the least of the largest losses to the other near ones, over all assumptions. Losses that are alike leave it
    to the number of chunks, and then to the step.
    """
    ranked, most_s = [fastest, *others], fastest.step_s * (1 + NEAR)
    if not case.limits.fastest:
        ranked = [_simplest(each, most_s, case) if each.step_s <= most_s else each for each in ranked[:NUM_LAYOUTS]]
        ranked += others[NUM_LAYOUTS - 1 :]
    told = ranked[:NUM_LAYOUTS]
    steps_s = assumed_steps(told, trainer)
    near = [place for place, each in enumerate(told) if each.step_s <= most_s]
    worst = {place: _worst_loss(steps_s, place, near) for place in near}
    least = min(loss for loss, _ in worst.values())

    def order(place: int) -> tuple[bool, int, float]:
        return worst[place][0] > least + ALIKE, _chunks(told[place]), told[place].step_s

    first = 0 if case.limits.fastest else min(near, key=order)
    if first == 0 and ranked[0] is fastest:
        return Recommended(ranked, steps_s)
    places = [first, *sorted(set(range(len(told))) - {first}, key=lambda place: told[place].step_s)]
    (loss, _), (lost, assumption) = worst[first], worst[0]
    is_robust = first > 0 and lost > loss
    reason = Recommendation(
        fastest=str(parallelism_of(fastest)),
        fastest_step_s=fastest.step_s,
        chunks=_chunks(told[first]),
        fastest_chunks=_chunks(fastest),
        worst_loss_fraction=loss if is_robust else None,
        fastest_worst_loss_fraction=lost if is_robust else None,
        assumption=assumption if is_robust else "",
    )
    reordered = {name: [seconds[place] for place in places] for name, seconds in steps_s.items()}
    return Recommended([*(told[place] for place in places), *ranked[NUM_LAYOUTS:]], reordered, reason)


def _worst_loss(steps_s: Mapping[str, list[float]], place: int, near: list[int]) -> tuple[float, str]:
    """The largest share by which a layout is slower than the best of the near ones, and under which assumption."""
    losses = {name: s[place] / min(s[other] for other in near) - 1 for name, s in steps_s.items()}
    name = max(losses, key=lambda assumption: losses[assumption])
    return losses[name], name


def _chunks(candidate: Candidate) -> int:
    return int(candidate.shape.pp) * int(candidate.shape.vpp)


def _simplest(candidate: Candidate, most_s: float, case: Case) -> Candidate:
    """The candidate in the fewest chunks a rank with which it fits and takes no longer than `most_s`."""
    if int(candidate.shape.vpp) == 1 or candidate.made_order is not None:
        return candidate
    options = schedule_options(candidate.shape, case.model, case.limits, candidate.pricing.runtime)
    fewer = [option for option in options if option[0].vpp < candidate.shape.vpp and option[1] in _PLAIN]
    for shape, schedule in fewer[:MOST_CHUNKINGS]:
        start = replace(candidate, table=replace(candidate.table, shape=shape), schedule=schedule)
        simpler = start.with_split(level_split(start))
        if (
            simpler.fits
            and least_step_s(simpler) <= most_s >= simpler.step_s
            and not any(broken_recipe_rules(setting_of(simpler)))
        ):
            return simpler
    return candidate


_PLAIN = ("1f1b", "interleaved-1f1b")
"""Schedules that a simpler layout may have."""
