"""Changes that may help a run: other values of switches, and layouts near its own, each priced as it is.

A move is a function of the layout that runs; all that it yields obeys the trainer's rules and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from planner.layout.candidate import Candidate
from planner.layout.recipe import setting_of, under
from planner.observe.remedy.change import FUSIONS, broken_rule, near, options_between, runtime_of, spoken, takes
from planner.schedule.orders import SCHEDULES
from planner.shape import divisors
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import RecipeRule, has_effect
from planner.trainers.stated import own_runtime, partners, switched
from planner.trainers.switches import SWITCHES, Value

Move = Callable[[Candidate], Iterator[Candidate]]
MOST_MENDED = 3
"""Most switches that are moved beside one, so that the trainer's rules allow it."""
MOST_MICROBATCHES = 1024
"""Most micro-batches of a step that is replayed for a remedy: one replay takes some milliseconds."""


def values_allowed(candidate: Candidate, name: str) -> tuple[Value, ...]:
    """The values of a switch that change no numerics, or that the run has already, and that its trainer has."""
    row, now = SWITCHES[name], SWITCHES[name].value_of(runtime_of(candidate))
    if name in FUSIONS:
        own = row.value_of(own_runtime(candidate.pricing.runtime))
        return tuple(dict.fromkeys((now, own)))
    values = switches_of(candidate.pricing.runtime).get(name, ())
    return tuple(value for value in values if value == now or value not in row.consent)


def with_switch(candidate: Candidate, name: str, value: Value, consented: bool = False) -> Candidate | None:
    """The layout with a switch at another value, and others moved where the rules ask for it.

    None where that takes a consent which was not given, where no such value mends a rule, or where it does not fit.
    """
    recipe: dict[str, Value] = {name: value}
    for _ in range(MOST_MENDED + 1):
        moved = under(candidate, switched(candidate.pricing.runtime, recipe))
        broken = broken_rule(moved, candidate)
        if broken is None:
            return moved if takes(moved, candidate) else None
        mended = _mended(moved, broken, recipe, consented)
        if mended is None:
            return None
        recipe |= mended
    return None


def _mended(moved: Candidate, rule: RecipeRule, recipe: dict[str, Value], consented: bool) -> dict[str, Value] | None:
    setting = setting_of(moved)
    for other, value in partners(setting, rule, recipe):
        if other not in recipe and (consented or value not in SWITCHES[other].consent):
            return {other: value}
    return None


def switch(*names: str) -> Move:
    """Each other value of some switches that acts on the layout."""

    def move(candidate: Candidate) -> Iterator[Candidate]:
        for name in names:
            if not acts(candidate, name):
                continue
            now = SWITCHES[name].value_of(runtime_of(candidate))
            for value in values_allowed(candidate, name):
                if value != now and (moved := with_switch(candidate, name, value)) is not None:
                    yield moved

    return move


def consented(*names: str) -> Move:
    """Each other value of some switches, whatever it or those that it needs change: whoever takes it has to say so."""

    def move(candidate: Candidate) -> Iterator[Candidate]:
        for name in (name for name in names if acts(candidate, name)):
            now = SWITCHES[name].value_of(runtime_of(candidate))
            for value in switches_of(candidate.pricing.runtime).get(name, ()):
                moved = None if value == now else with_switch(candidate, name, value, consented=True)
                if moved is not None:
                    yield moved

    return move


def acts(candidate: Candidate, name: str) -> bool:
    """True where the trainer has the switch and it changes anything on the layout."""
    return name in spoken(candidate) and has_effect(name, setting_of(candidate))


def after(first: Move, *others: Move) -> Move:
    """Every layout of the first move, changed by the next one too, and so on."""

    def move(candidate: Candidate) -> Iterator[Candidate]:
        for moved in first(candidate):
            yield from after(*others)(moved) if others else (moved,)

    return move


def where(applies: Callable[[Candidate], bool], move: Move) -> Move:
    """A move on the layouts that it is about."""
    return lambda candidate: move(candidate) if applies(candidate) else iter(())


def micro_batch(larger: bool) -> Move:
    """Micro-batches of twice, or of half, as many sequences."""

    def move(candidate: Candidate) -> Iterator[Candidate]:
        size = int(candidate.shape.micro_batch_size)
        if larger or size % 2 == 0:
            yield from _fitting(candidate, micro_batch_size=size * 2 if larger else size // 2)

    return move


def schedules(candidate: Candidate) -> Iterator[Candidate]:
    """The schedules of the trainer, and other numbers of chunks on a rank, for the same grid of ranks."""
    pp, vpp = int(candidate.shape.pp), int(candidate.shape.vpp)
    if pp < 2 or candidate.num_microbatches > MOST_MICROBATCHES or candidate.made_order is not None:
        return
    layers = candidate.pricing.model.num_hidden_layers // pp
    had = SCHEDULES[candidate.schedule].splits_backward
    for name in candidate.pricing.runtime.schedules:
        kind = SCHEDULES[name]
        if had and not kind.splits_backward:
            continue
        for chunks in (n for n in divisors(layers, layers) if kind.min_vpp <= n <= kind.max_vpp):
            if (name, chunks) != (candidate.schedule, vpp):
                yield from _fitting(candidate, vpp=chunks, schedule=name)


def interleaved(candidate: Candidate) -> Iterator[Candidate]:
    """The same schedule with two chunks on a rank, which overlaps of exchanges ask for."""
    if int(candidate.shape.pp) > 1 and int(candidate.shape.vpp) == 1:
        yield from _fitting(candidate, vpp=2, schedule="interleaved-1f1b")


def fewer_recomputed(candidate: Candidate) -> Iterator[Candidate]:
    """Nothing recomputed, or modules in place of layers, or fewer layers."""
    yield from _fitting(candidate, recompute="none")
    has = candidate.pricing.runtime.recomputable_modules
    if has and any(map(any, candidate.split.recomputed)):
        own = tuple(name for name in candidate.pricing.selective_modules if name in has)
        yield from _fitting(candidate, recompute="selective", recompute_modules=own or has[:1])
    for count in range(1, max(map(sum, candidate.split.recomputed), default=0)):
        yield from _fitting(candidate, recompute="full", recompute_num_layers=count)


def sharded(candidate: Candidate) -> Iterator[Candidate]:
    """A sharded optimizer where there is none."""
    if int(candidate.shape.zero_stage) == 0 and 1 in candidate.pricing.runtime.zero_stages:
        yield from _fitting(candidate, zero_stage=1)


def fewer_expert_ranks(candidate: Candidate) -> Iterator[Candidate]:
    """Experts spread over half as many ranks, or a quarter."""
    ep = int(candidate.shape.ep)
    for parts in (parts for parts in (2, 4) if ep % parts == 0):
        yield from _fitting(candidate, ep=ep // parts)


def dropping(candidate: Candidate) -> Iterator[Candidate]:
    """Experts that take a fixed number of tokens and drop the others, so that they are balanced."""
    for moved in consented("token_drop")(candidate):
        pricing = moved.pricing
        balanced = pricing.training.model_copy(update={"moe_imbalance": 1.0})
        yield moved.priced_as(replace(pricing, training=balanced))


def _fitting(candidate: Candidate, **others: Any) -> Iterator[Candidate]:
    """The layout with other sizes, if its trainer takes it and it fits."""
    moved = near(candidate, **others)
    if moved is not None and takes(moved, candidate) and options_between(candidate, moved):
        yield moved
