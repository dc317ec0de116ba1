"""The layout and the recipe that a run has: its plan's, with what its log says to be otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import PlannerError
from planner.layout.candidate import Candidate
from planner.layout.recipe import setting_of, settled, under
from planner.layout.risk import headroom_bytes
from planner.observe.case import Case
from planner.observe.remedy.change import FUSIONS, near, options_between, recompute_of, runtime_of
from planner.schedule.orders import SCHEDULES
from planner.specs.checking import checked
from planner.specs.training import Parallelism, SearchLimits
from planner.trainers.generations import described, runtime_of_its_day
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import has_effect
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import own_runtime, switched
from planner.trainers.switches import SWITCHES, written

_RECOMPUTE = ("recompute", "recompute_modules", "recompute_num_layers")


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that a log states otherwise than its plan, and the layout with it and with all those before it."""

    name: str
    planned: str
    has: str
    candidate: Candidate


def differences(case: Case) -> tuple[Difference, ...]:
    """The settings that the log states otherwise than the plan, one after the other, in the order of `SWITCHES`.

    Only what acts on the layout is one: switches, fused kernels, what is recomputed, what ZeRO shards. Beside an
    earlier run they are those that this one's log states, too.
    """
    expected = layout_before(case)
    if expected is None or not states_switches(case):
        return ()
    with suppress(PlannerError):
        stated = _stated_runtime(case, expected)
        recipe = tuple(_of_recipe(expected, stated, case.observation.facts.stated_switches))
        last = recipe[-1].candidate if recipe else expected
        return (*recipe, *_of_layout(case, last))
    return ()


def layout_before(case: Case) -> Candidate | None:
    """The layout that the run is held against: the plan's, with what the log of an earlier run says otherwise."""
    if case.earlier is None:
        return case.candidate
    known = differences(Case(case.earlier.observation, plan=case.plan))
    return known[-1].candidate if known else case.candidate


def running(case: Case) -> Candidate | None:
    """The layout that the run has, as far as plan and log tell; it keeps free what a search keeps free.

    What was measured above the price of its layout is no room for changes either.
    """
    known = differences(case)
    candidate = known[-1].candidate if known else layout_before(case)
    if candidate is None:
        return None
    pricing = candidate.pricing
    free = headroom_bytes(pricing, SearchLimits()) + _measured_above(case, candidate)
    return candidate.priced_as(replace(pricing, headroom_bytes=free))


def restored(case: Case, names: Collection[str], now: Candidate) -> Iterator[Candidate]:
    """The layout that runs, with some switches at the values that it is held against, whatever else rules say."""
    before = layout_before(case)
    changed = {row.name for row in differences(case)} & set(names)
    if before is not None and changed:
        recipe = {name: SWITCHES[name].value_of(runtime_of(before)) for name in names if name in changed}
        yield under(now, switched(now.pricing.runtime, recipe))


def states_switches(case: Case) -> bool:
    """True where the log's own arguments say which switches are on."""
    return bool(case.observation.facts.stated_switches)


def _measured_above(case: Case, candidate: Candidate) -> float:
    """Bytes that the run allocates above the price of its layout."""
    observation = case.observation
    if observation.peak_memory_bytes is None or observation.peak_memory_kind != "allocated":
        return 0.0
    return max(0.0, observation.peak_memory_bytes - max(stage.peak_allocated_bytes for stage in candidate.memory))


def _stated_runtime(case: Case, candidate: Candidate) -> RuntimeSpec:
    """The trainer as the log's arguments describe it; of another trainer, its words under the plan's own."""
    run, pricing = case.observation.facts.run, candidate.pricing
    hardware, model = pricing.cluster.hardware, pricing.model
    used = {"precision_recipe": run.get("precision_recipe"), **run["features"]}
    layout = checked(Parallelism, run.get("parallelism") or {}, "the log")
    dated = own_runtime(pricing.runtime)
    if run.get("runtime") == dated.family and (dated.name == dated.family or dated.year is not None):
        dated = runtime_of_its_day(dated.family, hardware.architecture, model, layout, used)
    stated, _ = described(dated, hardware, model, used)
    return settled(stated.for_schedules(SCHEDULES[candidate.schedule].splits_backward), pricing.cluster, model)


def _of_recipe(candidate: Candidate, stated: RuntimeSpec, named: Collection[str]) -> Iterator[Difference]:
    """Switches that the log names, then fused kernels, with another value than the plan's."""
    setting, has = setting_of(candidate), switches_of(candidate.pricing.runtime)
    both = {*FUSIONS, *(has.keys() & switches_of(stated).keys())}
    names = [name for name in SWITCHES if name in both and name in named]
    for name in (name for name in names if has_effect(name, setting)):
        planned, found = (SWITCHES[name].value_of(runtime) for runtime in (runtime_of(candidate), stated))
        if planned != found:
            candidate = under(candidate, switched(candidate.pricing.runtime, {name: found}))
            yield Difference(name, written(planned), written(found), candidate)


def _of_layout(case: Case, candidate: Candidate) -> Iterator[Difference]:
    """The log's way to recompute, and what its ZeRO shards, where they are not the plan's."""
    stated = checked(Parallelism, case.observation.facts.run.get("parallelism") or {}, "the log")
    runtime = candidate.pricing.runtime
    says = "recompute" in case.observation.facts.stated_switches or stated.recompute != "none"
    fields = {name: getattr(stated, name) for name in _RECOMPUTE if getattr(stated, name)} if says else {}
    if stated.recompute == "selective":
        fields["recompute_modules"] = stated.recompute_modules or runtime.selective_default
    zero = {} if stated.zero_stage is None else {"zero_stage": stated.zero_stage}
    for name, others in (("recompute", fields), ("zero_stage", zero)):
        other = near(candidate, **others) if others else None
        words = None if other is None else options_between(candidate, other)
        if other is not None and words:
            before = recompute_of(candidate) if name == "recompute" else {name: int(candidate.shape.zero_stage)}
            yield Difference(name, _said(before), _said(others), other)
            candidate = other


def _said(fields: Mapping[str, Any]) -> str:
    """The values of fields, in words."""
    return " ".join("+".join(value) if isinstance(value, tuple) else str(value) for value in fields.values())
