"""The recipe of a plan in a few lines: what is on, what each switch saves, what is refused, what consent would buy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap

from planner.answer import Offer, Plan, PricedLayout, RecipeGain, RecipeRefusal
from planner.report.format import percent
from planner.trainers.switches import SWITCHES, Value, written

LEAST_GAIN = 0.001
"""A switch that saves a smaller share of the step is named without a number."""
LINE = 68
"""Characters of a sentence on a line of a terminal of 80 columns."""

Line = tuple[str, str]
"""A subject and a sentence about it."""


def recipe_lines(layout: PricedLayout, variables: Mapping[str, str], is_brief: bool = False) -> tuple[Line, ...]:
    """The lines of the recipe; none for a layout whose recipe is not known. In brief: what is on, and what consent
    would buy."""
    if not layout.recipe:
        return ()
    if not is_brief:
        return tuple(_lines(layout, variables))
    on = _some(_on(layout), ", ", 2, "more in --show recipe") or "every switch at its plainest value"
    offers = _some([says_offer(offer, layout.step.step_s) for offer in layout.offers], "; ", 1, "with --full")
    return tuple(line for line in (("recipe", on), ("consent", offers)) if line[1])


def recipe_heading(layout: PricedLayout) -> str:
    """The title of the recipe's lines, which says how gains were priced."""
    replanned = {gain.replanned for gain in layout.recipe_gains}
    if not replanned:
        return "Recipe"
    how = "of this layout" if False in replanned else "planned again without it"
    how += ", or * planned again" if len(replanned) > 1 else ""
    return f"Recipe, and the share of the step that each switch saves ({how})"


def environment_of(plan: Plan) -> dict[str, str]:
    """The variables that the plan's recipe needs, as the trainer's export sets them."""
    if plan.runtime_spec.family != "megatron" or plan.runtime_spec.year is not None:
        return {}
    from planner.export.environment import megatron_environment

    return megatron_environment(plan)


def named(switch: str, value: Value) -> str:
    """A value of a switch as short as it can be said: `ep_overlap`, `no ep_overlap`, `ep_overlap delayed`."""
    if isinstance(value, bool):
        return switch if value else f"no {switch}"
    return f"{switch} {written(value)}"


def differences(layout: PricedLayout, beside: PricedLayout) -> Iterator[str]:
    """The values of a layout's switches that another layout has otherwise, both having an effect."""
    for switch, value in layout.recipe.items():
        if switch in beside.recipe and beside.recipe[switch] != value:
            yield named(switch, value)


def saved_fraction(gain: RecipeGain, step_s: float) -> float:
    """The share of the step without the switch that the switch saves."""
    return 1 - step_s / gain.without_step_s if gain.without_step_s else 0.0


def says_offer(offer: Offer, step_s: float) -> str:
    """`--allow fp8: 4.1% faster, changes numerics`."""
    # what is priced on this layout alone may gain more in another
    least = "" if offer.replanned else "at least "
    faster = f"{least}{percent(1 - offer.step_s / step_s)} faster"
    chosen = (
        "" if offer.allow == (offer.switch,) or offer.switch == "dtype" else f" {named(offer.switch, offer.value)},"
    )
    return f"--allow {','.join(offer.allow)}:{chosen} {faster}, changes {offer.changes}"


def says_refusal(refusal: RecipeRefusal) -> str:
    """`cuda_graph full_iteration: needs nan_checks=false`."""
    name = named(refusal.switch, refusal.value)
    return f"{name}: {refusal.rule.removeprefix(f'{refusal.switch} ').removeprefix(f'{written(refusal.value)} ')}"


def _lines(layout: PricedLayout, variables: Mapping[str, str]) -> Iterator[Line]:
    yield "on", _some(_on(layout), ", ", 3) or "every switch is at its plainest value"
    if layout.recipe_refused:
        yield "refused", _some([says_refusal(refusal) for refusal in layout.recipe_refused], "; ", 2)
    if layout.offers:
        yield "consent", _some([says_offer(offer, layout.step.step_s) for offer in layout.offers], "; ", 2)
    if variables:
        yield "env", _some([f"{name}={value}" for name, value in variables.items()], ", ", 1, "more exported")


def _on(layout: PricedLayout) -> list[str]:
    """The switches that are not at their plainest value, those that save most first."""
    step_s, are_mixed = layout.step.step_s, len({gain.replanned for gain in layout.recipe_gains}) > 1
    gains = {gain.switch: saved_fraction(gain, step_s) for gain in layout.recipe_gains}
    marks = {gain.switch: "*" for gain in layout.recipe_gains if gain.replanned and are_mixed}
    on = [name for name, value in layout.recipe.items() if value != next(iter(SWITCHES[name].values), value)]
    on.sort(key=lambda name: -gains.get(name, 0.0))
    shares = {name: f" {percent(gain)}{marks.get(name, '')}" for name, gain in gains.items() if abs(gain) >= LEAST_GAIN}
    return [f"{named(name, layout.recipe[name])}{shares.get(name, '')}" for name in on]


def _some(texts: Sequence[str], between: str, num_lines: int, others: str = "more in --json") -> str:
    """As many of the texts as fit in some lines, the first in any case, and how many more there are elsewhere."""
    shown = list(texts[:1])
    for text in texts[1:]:
        left = len(texts) - len(shown)
        more = f"{between}{left} {others}"
        if _num_lines(between.join([*shown, text]) + (more if left > 1 else "")) > num_lines:
            return between.join(shown) + more
        shown.append(text)
    return between.join(shown)


def _num_lines(text: str) -> int:
    return len(wrap(text, LINE, break_long_words=False, break_on_hyphens=False))
