"""The recipe in the answer: the switches, the worth of each, what rules refuse, and what consent would buy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.answer import Offer, PricedLayout, RecipeGain, RecipeRefusal
from planner.layout.candidate import Candidate
from planner.layout.recipe import recipe_of, setting_of
from planner.physics.kernels.products import is_narrow
from planner.search.recipes import BUNDLES, Recipes
from planner.trainers.load import has_dtype, switches_of
from planner.trainers.rules.recipe import broken_recipe_rules, has_effect
from planner.trainers.stated import NARROW_DTYPES, Recipe, consent_of, switched
from planner.trainers.switches import SWITCHES, Value

LEAST_OFFER = 1e-3
"""Least gain, as a share of the step, that is worth an offer."""


def with_recipe(layout: PricedLayout, best: Candidate, recipes: Recipes) -> PricedLayout:
    """The layout with all that is said of its recipe; every price is of this layout, with nothing planned again."""
    plain = best if best.made_order is None else replace(best, made_order=None)
    offers = sorted(_offers(plain, recipes), key=lambda offer: offer.step_s)
    refused = {(r.switch, r.value): r for r in _refusals(plain, recipes)}
    return layout.model_copy(
        update={
            "recipe_gains": tuple(_gains(plain, recipes)),
            "offers": tuple(offers),
            "recipe_refused": tuple(refused.values()),
        }
    )


def _gains(best: Candidate, recipes: Recipes) -> Iterator[RecipeGain]:
    """The worth of each switch that is not at its plainest value; none where another switch needs it."""
    for name, value in recipe_of(best).items():
        plainest = next(iter(SWITCHES[name].values))
        if value == plainest:
            continue
        without = recipes.moved(best, _with_dependents(best, name, plainest))
        if without is None:
            continue
        yield RecipeGain(
            switch=name, value=value, without_step_s=without.step_s, replanned=False, source=SWITCHES[name].source
        )


def _with_dependents(best: Candidate, name: str, value: Value) -> Recipe:
    """A switch at another value, and those that this value rules out at their plainest."""
    setting = replace(setting_of(best), runtime=switched(best.pricing.runtime, {name: value}))
    others = [rule.switch for rule in broken_recipe_rules(setting) if rule.switch != name]
    return {name: value} | {other: next(iter(SWITCHES[other].values)) for other in others}


def _offers(best: Candidate, recipes: Recipes) -> Iterator[Offer]:
    """Values that need a consent which was not given and make the step shorter, with the switches that they need."""
    pricing, limits = best.pricing, recipes.case.limits
    if limits.switches == "default":
        return
    held, hardware = set(limits.switches or {}), pricing.cluster.hardware
    for name, values in switches_of(pricing.runtime).items():
        for value in values:
            if consent_of(name, value, hardware) and name not in (*limits.allow, *held):
                yield from _offer(best, recipes, name, value, {name: value})
    for bundle in BUNDLES:
        needed = [name for name, value in bundle.items() if consent_of(name, value, hardware)]
        if needed and not held & set(bundle) and any(name not in limits.allow for name in needed):
            name, value = next(iter(bundle.items()))
            yield from _offer(best, recipes, name, value, bundle)
    for dtype in NARROW_DTYPES:
        narrow = pricing.training.model_copy(update={"dtype": dtype})
        is_wide = pricing.training.dtype in ("bf16", "fp16") and dtype not in limits.allow
        if is_wide and is_narrow(pricing.cluster.hardware, dtype) and has_dtype(pricing.runtime, dtype):
            other = best.priced_as(replace(pricing, training=narrow))
            yield from _offer(other, recipes, "dtype", dtype, {}, best.step_s, (dtype,))


def _offer(
    best: Candidate,
    recipes: Recipes,
    name: str,
    value: Value,
    bundle: Recipe,
    now_s: float | None = None,
    allow: tuple[str, ...] = (),
) -> Iterator[Offer]:
    """The offer of one value with the rest of its bundle, if it is legal and makes the step shorter."""
    has = switches_of(best.pricing.runtime)
    if any(part not in has.get(switch, ()) for switch, part in bundle.items()):
        return
    moved = recipes.moved(best, bundle)
    if moved is None or not moved.fits:
        return
    now_s = best.step_s if now_s is None else now_s
    if moved.step_s >= now_s * (1 - LEAST_OFFER):
        return
    changed = {switch: consent_of(switch, part, best.pricing.cluster.hardware) for switch, part in bundle.items()}
    consents = {switch: says for switch, says in changed.items() if says}
    yield Offer(
        switch=name,
        value=value,
        step_s=moved.step_s,
        replanned=False,
        changes=" and ".join(dict.fromkeys(consents.values())) or "numerics",
        allow=allow or tuple(consents),
    )


def _refusals(best: Candidate, recipes: Recipes) -> Iterator[RecipeRefusal]:
    """The values that the search may choose and a rule refuses beside the rest of the recipe."""
    for name, values in recipes.free.items():
        for value in values:
            plainest = next(iter(SWITCHES[name].values))
            if value in (plainest, SWITCHES[name].value_of(best.pricing.runtime)):
                continue
            if not has_effect(name, setting_of(best)):
                continue
            changed = switched(best.pricing.runtime, {name: value})
            setting = replace(setting_of(best), runtime=changed)
            rules = list(broken_recipe_rules(setting))
            for rule in [] if any(rule.is_about_model for rule in rules) else rules[:1]:
                yield RecipeRefusal(switch=name, value=value, rule=f"{rule.switch} {rule.says}")
