"""Switches of a plan that the trainer it is exported to is not told: those that save memory are refused, others noted.

A plan is made for one trainer, and may be exported to another: a layout means the same there, a recipe often does not.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.answer import Plan
from planner.export.common.refusal import Reason
from planner.trainers.switches import SWITCHES, Value, written

Told = Mapping[str, tuple[Value, ...] | None]
"""The switches that a target is told (None), or the values that it has unasked. Of all others it has the plainest."""

_SAVES_MEMORY = ("optimizer_offload", "activation_offload", "bf16_gradients", "bf16_moments")
"""Switches without which a layout needs more memory than planned."""


def refused_switches(plan: Plan, target: str, told: Told) -> list[Reason]:
    """The switches that saved memory in the plan and that the target is not told."""
    return [
        Reason(name, f"planned with {name}={written(value)}, which saves memory and {target} is not told")
        for name, value in _untold(plan, told).items()
        if name in _SAVES_MEMORY
    ]


def notes_on_switches(plan: Plan, target: str, told: Told) -> list[str]:
    """A note that names the other switches which the target is not told, if there are any."""
    recipe = {name: value for name, value in _untold(plan, told).items() if name not in _SAVES_MEMORY}
    if not recipe:
        return []
    listed = ", ".join(f"{name}={written(value)}" for name, value in recipe.items())
    return [f"the step was planned with {listed}, which {target} is not told: it may take another time"]


def _untold(plan: Plan, told: Told) -> dict[str, Value]:
    return {name: value for name, value in plan.best.recipe.items() if not _has(name, value, told)}


def _has(name: str, value: Value, told: Told) -> bool:
    values = told.get(name, tuple(SWITCHES[name].values)[:1])
    return values is None or value in values
