"""A saved plan priced again: all that it says of its layouts follows from its own inputs."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from typing import Any, Final

from planner.answer import Plan, PricedLayout
from planner.layout.candidate import Candidate
from planner.layout.evaluate import assemble
from planner.layout.price import price_layout, reprice
from planner.layout.variation import told_assumptions, with_unsaid

MOVED: Final = 1e-3
"""Changes of a step below this share are no news."""
_ROUNDING: Final = 1e-9
_PRICED: Final = (
    "evidence", "fits", "parallelism", "stages", "step", "recipe", "rank_order", "placement", "oom_probability",
)  # fmt: skip
"""The fields of a layout that follow from its inputs alone."""


def step_now_s(plan: Plan) -> float:
    """Seconds of the best layout's step by this version of the planner."""
    return _again(reprice(plan, plan.best), plan.best, exact=True).step.step_s


def first_difference(plan: Plan) -> tuple[str, object, object] | None:
    """The first field of the best layout that is not what its inputs price to: its name, its value and the price."""
    again = _again(reprice(plan, plan.best), plan.best, exact=True)
    saved, priced = (layout.model_dump(mode="json", include=set(_PRICED)) for layout in (plan.best, again))
    return next(_differences(saved, priced, "best"), None)


def priced_again(plan: Plan) -> Plan:
    """The plan's inputs and layouts at the prices of this version. What its search alone knew is left out."""
    candidate = reprice(plan, plan.best)
    layouts = [_again(candidate, plan.best, exact=True)]
    layouts += [_again(reprice(plan, other), other, exact=False) for other in plan.alternatives]
    told = told_assumptions(candidate, with_switches=plan.search is None)
    made = assemble(candidate.pricing, candidate.pricing.totals, layouts, told)
    return made.model_copy(update={"planner_version": plan.planner_version, "command": plan.command})


def _again(candidate: Candidate, layout: PricedLayout, exact: bool) -> PricedLayout:
    priced = price_layout(candidate, exact=exact)
    priced = with_unsaid(candidate, priced) if layout.unsaid else priced
    kept = {"warnings": layout.warnings, "id": layout.id, "runtime_spec": layout.runtime_spec}
    return priced.model_copy(update=kept)


def _differences(saved: Any, priced: Any, name: str) -> Iterator[tuple[str, object, object]]:
    """Every field of two plain data that differs, in order."""
    if isinstance(saved, dict) and isinstance(priced, dict):
        for key in (*saved, *(key for key in priced if key not in saved)):
            yield from _differences(saved.get(key), priced.get(key), f"{name}.{key}")
    elif isinstance(saved, list) and isinstance(priced, list) and len(saved) == len(priced):
        for index, pair in enumerate(zip(saved, priced, strict=True)):
            yield from _differences(*pair, f"{name}[{index}]")
    elif isinstance(saved, float) and isinstance(priced, float):
        if not isclose(saved, priced, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
            yield name, saved, priced
    elif saved != priced:
        yield name, saved, priced
