"""The recipe of a plan: the value of each switch that has an effect on its layout, and the rules that it breaks."""

from __future__ import annotations

from collections.abc import Iterable

from planner.answer import Plan
from planner.export.common.refusal import Reason, shape_of
from planner.export.common.spelling import Spelling, spelling_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules, has_effect
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, Value, written

_LEFT_OUT = ("overlap_param_gather",)
"""Switches that are left out with a note where the rest of a recipe does not allow them."""


def setting_of(plan: Plan) -> Setting:
    """The plan as rules of recipes look at it."""
    layout = plan.parallelism
    return Setting(
        model=plan.model.spec,
        cluster=plan.cluster,
        training=plan.training,
        runtime=runtime_of(plan),
        shape=shape_of(layout, plan.training.seq_length),
        recompute=layout.recompute,
        modules=layout.recompute_modules if layout.recompute == "selective" else (),
    )


def runtime_of(plan: Plan) -> RuntimeSpec:
    """The runtime that priced the plan, with what its dtype means for bytes."""
    return plan.runtime_spec.in_dtype(plan.training.dtype, plan.cluster.hardware.architecture)


def recipe_of(plan: Plan, rows: Iterable[Spelling]) -> dict[str, Value]:
    """The values of the switches that `rows` spell and that have an effect on the plan's layout."""
    setting = setting_of(plan)
    names = dict.fromkeys(row.switch for row in rows)
    recipe = {name: _value(name, setting) for name in names if has_effect(name, setting)}
    if recipe.get("overlap_grad_reduce") is False:
        # gathers of weights hide only where reductions of gradients do
        recipe.pop("overlap_param_gather", None)
    return recipe


def _value(name: str, setting: Setting) -> Value:
    """The value of a switch: lists of modules in full, and the dispatcher that the links of the cluster ask for."""
    runtime = setting.runtime
    if name == "cuda_graph" and runtime.graphed_modules:
        return "+".join(runtime.graphed_modules)
    if name == "activation_offload" and runtime.offload_modules:
        return "+".join(runtime.offload_modules)
    if name == "optimizer_offload":
        return runtime.optimizer_offload_fraction
    if name == "cp_comm_type":
        return runtime.cp_comm_type
    if name == "dispatcher":
        flexible = "hybridep" if setting.cluster.is_rack else "deepep"
        return runtime.dispatcher or (flexible if runtime.sends_tokens_once else "alltoall")
    return SWITCHES[name].value_of(runtime)


def broken_rules_of_recipe(plan: Plan) -> list[Reason]:
    """The rules that the plan's recipe breaks on its layout; the search chooses none that breaks one."""
    setting = setting_of(plan)
    return [
        Reason(rule.switch, rule.says)
        for rule in broken_recipe_rules(setting)
        if has_effect(rule.switch, setting) and rule.switch not in _LEFT_OUT
    ]


def unspelled(plan: Plan, rows: Iterable[Spelling], trainer: str) -> list[Reason]:
    """The switches for whose values the plan's version of a trainer has no word."""
    rows, version = tuple(rows), plan.runtime_spec.version
    return [
        Reason(name, f"{trainer} {version or 'of today'} has no {name}={written(value)}")
        for name, value in recipe_of(plan, rows).items()
        if spelling_of(rows, name, value, version) is None
    ]


def canonical(features: dict[str, Value]) -> dict[str, Value]:
    """Features with the values that switches give them: a list of graphed modules by the name of its set."""
    graphs, modules = SWITCHES["cuda_graph"], tuple(str(features.get("cuda_graph", "")).split("+"))
    known = (value for value, fields in graphs.values.items() if fields["graphed_modules"] == modules)
    value = next(known, None)
    return features if value is None else {**features, "cuda_graph": value}
