"""A changed layout or recipe: priced as its candidate is, and in the words of `plan`'s command line."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from planner.errors import PlannerError
from planner.layout.candidate import Candidate
from planner.layout.given import given_layout
from planner.layout.recipe import setting_of, settled
from planner.schedule.orders import SCHEDULES
from planner.specs.training import Parallelism
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import RecipeRule, broken_recipe_rules
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, Value, written

FUSIONS = ("flash_attention", "attention_kernel", "activation_fusion", "gradient_accumulation_fusion")
"""Features of runs that no search chooses: a trainer has them unless someone switches them off."""
_SIZES = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "micro_batch_size", "zero_stage")
_CHUNKS = frozenset(("pp", "vpp", "schedule"))
"""Changes under which layers are cut anew."""


def near(candidate: Candidate, **others: Any) -> Candidate | None:
    """The candidate with other sizes of its layout, as `plan evaluate` prices it; None where its trainer refuses it."""
    with suppress(PlannerError, ValueError):
        wanted = _stated(candidate, others)
        pricing = candidate.pricing
        if wanted.recompute_modules:
            pricing = replace(pricing, selective_modules=wanted.recompute_modules)
        given = given_layout(pricing, wanted)
        if given.warnings:
            return None
        runtime = pricing.runtime.for_schedules(SCHEDULES[given.schedule].splits_backward)
        pricing, split = replace(pricing, runtime=runtime), given.split
        if not _CHUNKS & others.keys():
            split = replace(split, mtp_stage=candidate.split.mtp_stage)
        table = pricing.table(given.shape, split.priced_modes)
        return Candidate(pricing, table, split, given.schedule, rank_factors=candidate.rank_factors)
    return None


def _stated(candidate: Candidate, others: Mapping[str, Any]) -> Parallelism:
    """The layout as someone would state it, with `others` in place of its own sizes."""
    shape = candidate.shape
    values: dict[str, Any] = {axis: int(getattr(shape, axis)) for axis in _SIZES}
    values |= {"schedule": candidate.schedule, "sequence_parallel": bool(shape.sequence_parallel)}
    values |= {"rank_order": shape.rank_order}
    if int(shape.shard_size) != int(shape.dp * shape.cp):
        values["fsdp"] = int(shape.shard_size)
    if not _CHUNKS & others.keys():
        values["layers_per_stage"] = candidate.split.counts
    if "recompute" not in others:
        values |= recompute_of(candidate)
    return Parallelism(**{**values, **others})


def recompute_of(candidate: Candidate) -> dict[str, Any]:
    """The fields of a layout that say what is recomputed."""
    split, sums = candidate.split, tuple(map(sum, candidate.split.recomputed))
    if any(sums):
        every = sums == split.counts
        return {"recompute": "full", **({} if every else {"recompute_num_layers": max(sums)})}
    if split.base == "selective":
        return {"recompute": "selective", "recompute_modules": candidate.pricing.selective_modules}
    return {"recompute": "none"}


def takes(candidate: Candidate, now: Candidate) -> bool:
    """True where no rule of recipes refuses the change, and where it fits, or needs no more memory than now."""
    room = max(0.0, *now.excess_bytes)
    return max(candidate.excess_bytes) <= room and broken_rule(candidate, now) is None


def broken_rule(candidate: Candidate, now: Candidate) -> RecipeRule | None:
    """A rule of recipes that the change breaks; a run that breaks one already goes on to."""
    already = {(rule.switch, rule.says) for rule in broken_recipe_rules(setting_of(now))}
    broken = broken_recipe_rules(setting_of(candidate))
    return next((rule for rule in broken if (rule.switch, rule.says) not in already), None)


def runtime_of(candidate: Candidate) -> RuntimeSpec:
    """The trainer of a candidate with the dispatcher that its GPUs ask for."""
    return settled(candidate.pricing.runtime, candidate.pricing.cluster, candidate.pricing.model)


def options_between(before: Candidate, after: Candidate) -> tuple[str, ...]:
    """The words of `plan evaluate` that make `after` of `before`."""
    words: list[str] = []
    for axis in _SIZES:
        if int(getattr(before.shape, axis)) != int(getattr(after.shape, axis)):
            words += [f"--{axis.replace('_', '-')}", str(int(getattr(after.shape, axis)))]
    if before.order_name != after.order_name and after.order_name != "none":
        words += ["--schedule", after.order_name]
    if (now := recompute_of(after)) != recompute_of(before):
        for name, value in now.items():
            words += [f"--{name.replace('_', '-')}", ",".join(value) if isinstance(value, tuple) else str(value)]
    if switches := switches_between(before, after):
        words += ["--switch", ",".join(f"{name}={written(value)}" for name, value in switches.items())]
    return tuple(words)


def switches_between(before: Candidate, after: Candidate) -> dict[str, Value]:
    """The switches that have another value in `after`."""
    old, new = runtime_of(before), runtime_of(after)
    pairs = {name: (SWITCHES[name].value_of(old), SWITCHES[name].value_of(new)) for name in spoken(after)}
    return {name: value for name, (had, value) in pairs.items() if had != value}


def spoken(candidate: Candidate) -> tuple[str, ...]:
    """The switches of the candidate's trainer, and the fused kernels that no switch of it is about."""
    has = switches_of(candidate.pricing.runtime)
    touched = {field for name in has for field in SWITCHES[name].touched}
    return (*has, *(name for name in FUSIONS if not touched & SWITCHES[name].touched))
