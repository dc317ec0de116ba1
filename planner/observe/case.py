"""An observed run with what it is held against, and the layout and recipe that it has; changed ones are priced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from planner.answer import Plan
from planner.errors import PlannerError
from planner.layout.candidate import Candidate
from planner.layout.confidence import headroom_bytes
from planner.layout.given import given_layout
from planner.layout.price import parallelism_of, price_layout, reprice
from planner.layout.variation import setting_of, settled, under
from planner.observe.observation import GapRemedy, Observation, Observed, Prediction, Term
from planner.observe.traces.recorded import Recorded
from planner.schedule.orders import SCHEDULES
from planner.shape import RANK_ORDERS, Shape
from planner.specs.base import Fields, Said, Texts, grouped
from planner.specs.problems import checked
from planner.specs.training import Parallelism, SearchLimits
from planner.trainers.generations import described, runtime_of_its_day
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import broken_recipe_rules, has_effect
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import own_runtime, switched
from planner.trainers.switches import SWITCHES, written


@dataclass(frozen=True)
class ObservedCase:
    """An observed run; None for what is not known of it."""

    observation: Observation
    recorded: Recorded | None = None
    prediction: Prediction | None = None
    """The price of its layout, or an earlier run."""
    plan: Plan | None = None
    """The plan that it is a run of."""
    earlier: Observed | None = None
    """The earlier run that it is held against, if that is what the prediction is."""

    @property
    def has_log(self) -> bool:
        """True where a log printed the steps, and not a profiler alone."""
        kinds = self.recorded.kinds if self.recorded else {}
        return any(source.path not in kinds for source in self.observation.sources)

    @cached_property
    def candidate(self) -> Candidate | None:
        """The plan's best layout, which can be replayed and changed."""
        return None if self.plan is None else reprice(self.plan, self.plan.best)


def grid_of(case: ObservedCase) -> Shape | None:
    """The plan's grid, or else that which the log's arguments state; None where neither says it."""
    if case.candidate is not None:
        return case.candidate.shape
    facts = case.observation.facts
    stated = facts.run.get("parallelism") or {}
    tp, cp, pp = (stated.get(axis, 1) for axis in ("tp", "cp", "pp"))
    if not (stated and facts.num_gpus and all(isinstance(size, int) and size > 0 for size in (tp, cp, pp))):
        return None
    dp, left = divmod(facts.num_gpus, tp * cp * pp)
    outermost = int(stated.get("rank_order", RANK_ORDERS[0]) != RANK_ORDERS[0])
    return None if left else Shape.of(tp=tp, cp=cp, pp=pp, dp=dp, dp_outermost=outermost)


def stage_of(grid: Shape, rank: int) -> int:
    """The pipeline stage of a rank."""
    return rank // int(grid.stage_stride) % int(grid.pp)


Changes = Said
"""Fields of a layout with other values."""
Layouts = Callable[[Candidate], Iterable[Changes]]
LEAST_WORD = 0.02
"""Least share of a step that a switch has to cost before a run is told of it."""
_OF_LAYOUT = ("recompute", "zero_stage")
"""Settings that are no switches: what is recomputed is a row of its own."""
FUSIONS = ("flash_attention", "attention_kernel", "activation_fusion", "gradient_accumulation_fusion")
"""Features of runs that no search chooses: a trainer has them unless someone switches them off."""
_CHUNKS = frozenset(("pp", "vpp", "schedule"))
"""Changes under which layers are cut anew."""


def near(candidate: Candidate, **others: Any) -> Candidate | None:
    """The candidate with other sizes of its layout, as `plan evaluate` prices it; None where its trainer refuses it."""
    with suppress(PlannerError, ValueError):
        wanted = _as_stated(candidate, others)
        pricing = candidate.pricing
        if wanted.recompute_modules:
            pricing = replace(pricing, selective_modules=wanted.recompute_modules)
        given = given_layout(pricing, wanted)
        if given.warnings:
            return None
        runtime = pricing.runtime.for_schedules(SCHEDULES[given.schedule].splits_backward)
        pricing = replace(pricing, runtime=runtime)
        split = given.split
        if not _CHUNKS & others.keys():
            split = replace(split, mtp_stage=candidate.split.mtp_stage)
        table = pricing.table(given.shape, split.priced_modes)
        return Candidate(pricing, table, split, given.schedule, rank_factors=candidate.rank_factors)
    return None


def _as_stated(candidate: Candidate, others: Changes) -> Parallelism:
    """The layout as someone would state it, with `others` in place of its own sizes."""
    layout = parallelism_of(candidate)
    own: Fields = {"dp": layout.dp}
    if not _CHUNKS & others.keys():
        own["layers_per_stage"] = candidate.split.counts
    if "recompute" not in others:
        own |= {"recompute_modules": (), **recompute_of(candidate)}
    elif "recompute_modules" not in others:
        own["recompute_modules"] = ()
    return layout.replace(**{**own, **others})


def recompute_of(candidate: Candidate) -> Fields:
    """The fields of a layout that say what is recomputed."""
    split = candidate.split
    if split.recompute == "full":
        return {"recompute": "full", "recompute_num_layers": split.recompute_num_layers}
    if split.base == "selective":
        return {"recompute": "selective", "recompute_modules": candidate.pricing.selective_modules}
    return {"recompute": "none"}


def takes(candidate: Candidate, now: Candidate) -> bool:
    """True where the change breaks no rule that the run keeps, and fits, or needs no more memory than now."""
    already, broken = (
        {(rule.switch, rule.says) for rule in broken_recipe_rules(setting_of(each))} for each in (now, candidate)
    )
    return max(candidate.excess_bytes) <= max(0.0, *now.excess_bytes) and broken <= already


def runtime_of(candidate: Candidate) -> RuntimeSpec:
    """The trainer of a candidate with the dispatcher that its GPUs ask for."""
    return settled(candidate.pricing.runtime, candidate.pricing.cluster, candidate.pricing.model)


def moves(now: Candidate, layouts: Layouts) -> Iterator[tuple[Texts, Candidate]]:
    """Layouts that the trainer takes and that fit, with the words of `plan evaluate` that make them of this one."""
    for others in layouts(now):
        moved = near(now, **others)
        if moved is not None and takes(moved, now):
            words = ((f"--{name.replace('_', '-')}", _text(value)) for name, value in others.items())
            yield tuple(word for pair in words for word in pair), moved


def spoken(candidate: Candidate) -> Texts:
    """The switches of the candidate's trainer, and the fused kernels that no switch of it is about."""
    has = switches_of(candidate.pricing.runtime)
    touched = {field for name in has for field in SWITCHES[name].touched}
    return (*has, *(name for name in FUSIONS if not touched & SWITCHES[name].touched))


LEAST_GAIN = 1e-3
"""Least share of a step that a remedy has to win."""


def expected_step_s(case: ObservedCase, now: Candidate, changed: Candidate) -> float:
    """Seconds of the step after a change: measured − (price now − price changed) · min(1, measured / price now).

    Whatever else makes a run slower than its price stays as it is, so that no more is won than the price says; a run
    that is faster than its price wins in proportion. Never below the lower end of the changed price's interval, in the
    same proportion. Without a measured step, the changed price.
    """
    measured_s = case.observation.step_s
    if measured_s is None:
        return changed.step_s
    share = min(1.0, measured_s / now.step_s)
    interval = price_layout(changed, exact=False).step.step_s_interval
    least_s = interval[0] if interval else changed.step_s
    return max(measured_s - (now.step_s - changed.step_s) * share, least_s * share)


_RECOMPUTE = ("recompute", "recompute_modules", "recompute_num_layers")


@dataclass(frozen=True, slots=True)
class StatedDifference:
    """A setting that a log states otherwise than its plan, and the layout with it and with all those before it."""

    name: str
    planned: str
    has: str
    candidate: Candidate


def stated_otherwise(case: ObservedCase) -> tuple[StatedDifference, ...]:
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


def layout_before(case: ObservedCase) -> Candidate | None:
    """The layout that the run is held against: the plan's, with what the log of an earlier run says otherwise."""
    if case.earlier is None:
        return case.candidate
    known = stated_otherwise(ObservedCase(case.earlier.observation, plan=case.plan))
    return known[-1].candidate if known else case.candidate


def running(case: ObservedCase) -> Candidate | None:
    """The layout that the run has, as far as plan and log tell, with the headroom that a search leaves.

    Memory that was measured above the layout's price counts as used: changes may not have it.
    """
    known = stated_otherwise(case)
    candidate = known[-1].candidate if known else layout_before(case)
    if candidate is None:
        return None
    pricing = candidate.pricing
    free = headroom_bytes(pricing, SearchLimits()) + _measured_above(case, candidate)
    return candidate.priced_as(replace(pricing, headroom_bytes=free))


def states_switches(case: ObservedCase) -> bool:
    """True where the log's own arguments say which switches are on."""
    return bool(case.observation.facts.stated_switches)


def _measured_above(case: ObservedCase, candidate: Candidate) -> float:
    """Bytes that the run allocates above the price of its layout."""
    observation = case.observation
    if observation.peak_memory_bytes is None or observation.peak_memory_kind != "allocated":
        return 0.0
    return max(0.0, observation.peak_memory_bytes - max(stage.peak_allocated_bytes for stage in candidate.memory))


def _stated_runtime(case: ObservedCase, candidate: Candidate) -> RuntimeSpec:
    """The trainer as the log's arguments describe it; of another trainer, its words under the plan's own."""
    run = case.observation.facts.run
    pricing = candidate.pricing
    hardware = pricing.cluster.hardware
    model = pricing.model
    used = {"precision_recipe": run.get("precision_recipe"), **run["features"]}
    layout = checked(Parallelism, run.get("parallelism") or {}, "the log")
    dated = own_runtime(pricing.runtime)
    if run.get("runtime") == dated.family and (dated.name == dated.family or dated.year is not None):
        dated = runtime_of_its_day(dated.family, hardware.architecture, model, layout, used)
    stated, _ = described(dated, hardware, model, used)
    return settled(stated.for_schedules(SCHEDULES[candidate.schedule].splits_backward), pricing.cluster, model)


def _of_recipe(candidate: Candidate, stated: RuntimeSpec, named: Collection[str]) -> Iterator[StatedDifference]:
    """Switches that the log names, then fused kernels, with another value than the plan's."""
    setting = setting_of(candidate)
    has = switches_of(candidate.pricing.runtime)
    both = {*FUSIONS, *(has.keys() & switches_of(stated).keys())}
    names = [name for name in SWITCHES if name in both and name in named]
    for name in (name for name in names if has_effect(name, setting)):
        planned, found = (SWITCHES[name].value_of(runtime) for runtime in (runtime_of(candidate), stated))
        if planned != found:
            candidate = under(candidate, switched(candidate.pricing.runtime, {name: found}))
            yield StatedDifference(name, written(planned), written(found), candidate)


def _of_layout(case: ObservedCase, candidate: Candidate) -> Iterator[StatedDifference]:
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
        if other is not None and (other.split, other.shape) != (candidate.split, candidate.shape):
            before = recompute_of(candidate) if name == "recompute" else {name: int(candidate.shape.zero_stage)}
            yield StatedDifference(name, _said(before), _said(others), other)
            candidate = other


def _said(fields: Said) -> str:
    """The values of fields, in words."""
    return " ".join(_text(value) for value in fields.values())


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def other_values(now: Candidate, name: str) -> Iterator[tuple[Texts, Candidate]]:
    """The layout with a switch at each other value that changes no numerics, that its rules allow, and that fits."""
    if name not in spoken(now) or not has_effect(name, setting_of(now)):
        return
    row = SWITCHES[name]
    had = row.value_of(runtime_of(now))
    own = (row.value_of(own_runtime(now.pricing.runtime)),)
    values = own if name in FUSIONS else switches_of(now.pricing.runtime).get(name, ())
    for value in values:
        if value != had and (name in FUSIONS or value not in row.consent):
            moved = under(now, switched(now.pricing.runtime, {name: value}))
            if takes(moved, now):
                yield ("--switch", f"{name}={written(value)}"), moved


def fewer_recomputed(now: Candidate) -> Iterator[Changes]:
    """Nothing recomputed, or modules in place of layers, or fewer layers; nothing where nothing is recomputed."""
    if recompute_of(now) == {"recompute": "none"}:
        return
    yield {"recompute": "none"}
    has = now.pricing.runtime.recomputable_modules
    if has and any(map(any, now.split.recomputed)):
        own = tuple(name for name in now.pricing.selective_modules if name in has)
        yield {"recompute": "selective", "recompute_modules": own or has[:1]}
    for count in range(1, max(map(sum, now.split.recomputed), default=0)):
        yield {"recompute": "full", "recompute_num_layers": count}


def chunked(now: Candidate) -> Iterator[Changes]:
    """Two chunks on a rank in place of one, and micro-batches of half as many sequences."""
    if int(now.shape.pp) > 1 and int(now.shape.vpp) == 1:
        yield {"vpp": 2, "schedule": "interleaved-1f1b"}
    if int(now.shape.micro_batch_size) % 2 == 0:
        yield {"micro_batch_size": int(now.shape.micro_batch_size) // 2}


def remedy_of_change(case: ObservedCase, switches: Collection[str], layouts: str = "") -> GapRemedy | None:
    """The fastest change of some switches or of the layout, priced for this job; None where none wins anything."""
    now = running(case)
    if now is None or not (switches or layouts):
        return None
    changed = [other for name in switches for other in other_values(now, name)]
    changed += moves(now, globals()[layouts]) if layouts else ()
    options, best = min(changed, key=lambda change: change[1].step_s, default=((), now))
    if best.step_s > now.step_s * (1 - LEAST_GAIN):
        return None
    return GapRemedy(options=options, step_s=expected_step_s(case, now, best))


def recipe_terms(case: ObservedCase) -> tuple[Term, ...]:
    """The price of the layout under the log's recipe less that under the plan's, one switch at a time.

    The order is fixed, and the terms add up to the whole difference, whichever way switches act on each other. Beside
    an earlier run, the recipe is that of its log; nothing where that says none.
    """
    return tuple(term for _, term in _costs(case))


def _costs(case: ObservedCase) -> tuple[tuple[str, Term], ...]:
    """Each setting that the log states otherwise than what it is held against, with what that costs by the price."""
    before = layout_before(case)
    terms = []
    theirs = "the plan"
    if case.earlier is not None:
        theirs = "the earlier run"
        if not states_switches(ObservedCase(case.earlier.observation)):
            return ()
    for row in stated_otherwise(case):
        assert before is not None
        cost_s = row.candidate.step_s - before.step_s
        says = f"the log shows {row.name} {row.has}, {theirs} has {row.planned}"
        more = Term(term=f"recipe: {row.name}", seconds=cost_s, evidence=says, recoverable_s=max(0.0, cost_s))
        terms.append((row.name, more))
        before = row.candidate
    return tuple(terms)


def slower_settings(case: ObservedCase, row_of_switch: Mapping[str, str]) -> dict[str, list[tuple[str, Term]]]:
    """The settings that the log states otherwise than the plan or an earlier run, and that cost `LEAST_WORD` of the
    step, by the row of the gap that each is of."""
    if case.prediction is None:
        return {}
    least_s = LEAST_WORD * case.prediction.step_s
    costly = [(name, term) for name, term in _costs(case) if name not in _OF_LAYOUT and term.seconds > least_s]
    return grouped((row_of_switch.get(name, "recipe"), (name, term)) for name, term in costly)
