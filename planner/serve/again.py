"""The layout on the screen under changed controls, priced at once: the first thing that a reader sees of a change."""

from __future__ import annotations

from planner.answer import Plan, PricedLayout
from planner.errors import PlannerError
from planner.layout.assemble import assemble
from planner.layout.evaluate import priced_as_given
from planner.search.case import Case
from planner.search.recipes import pinned, pinned_by
from planner.specs.training import Parallelism
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched


def same_layout(shown: Plan, case: Case) -> Plan | None:
    """The plan's best layout priced for another case, whether it fits or not.

    None where it cannot be run there, is not within the case's pins, or has an order that was made to measure.
    """
    layout = shown.best
    if layout.actions or shown.model.spec.num_hidden_layers != case.model.num_hidden_layers:
        return None
    if any(getattr(layout.parallelism, axis) not in values for axis, values in case.pins.items() if axis != "dp"):
        return None
    try:
        runtime = _runtime(shown, pinned(case))
        candidate, priced = priced_as_given(case.model, case.cluster, case.training, _as_stated(layout), runtime)
    except PlannerError:
        return None
    plan = assemble(candidate.pricing, candidate.pricing.totals, [priced], ())
    return plan if "dp" not in case.pins or plan.parallelism.dp in case.pins["dp"] else None


def _runtime(shown: Plan, case: Case) -> RuntimeSpec:
    """The case's trainer with the switches on the screen, but for those that the case pins or the trainer refuses."""
    own = case.runtime
    if case.limits.switches == "default":
        return own
    kept, has = pinned_by(case), switches_of(own)
    recipe = {name: v for name, v in shown.best.recipe.items() if name not in kept and v in has.get(name, ())}
    runtime = switched(own, recipe)
    legal = not any(broken_recipe_rules(Setting(case.model, case.cluster, case.training, runtime)))
    return runtime if legal else own


def _as_stated(layout: PricedLayout) -> Parallelism:
    """The layout as a user would state it; dp is left to the number of GPUs."""
    sizes = layout.parallelism
    chunks = sorted(chunk for stage in layout.stages for chunk in stage.chunks)
    recomputed = tuple(_recomputed_layers(layout))
    stated = {
        **{axis: getattr(sizes, axis) for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch_size")},
        "zero_stage": sizes.zero_stage,
        "schedule": sizes.schedule,
        "sequence_parallel": sizes.sequence_parallel,
        "rank_order": sizes.rank_order,
        "layers_per_stage": tuple(last - first for first, last in chunks),
        "recompute": "full" if recomputed else sizes.recompute if sizes.recompute != "full" else "none",
        "recompute_modules": sizes.recompute_modules,
        "recompute_layers": recomputed or None,
        "fsdp": sizes.shard_size if sizes.shard_size < sizes.dp * sizes.cp else None,
    }
    return Parallelism(**{name: value for name, value in stated.items() if value is not None})


def _recomputed_layers(layout: PricedLayout) -> list[int]:
    """Numbers of the layers that are recomputed whole: the first ones of each chunk."""
    layers: list[int] = []
    for stage in layout.stages:
        left = stage.recompute.get("full", 0)
        for index, (first, last) in enumerate(stage.chunks):
            count = sum(stage.num_recomputed[index]) if stage.num_recomputed else min(left, last - first)
            left -= count
            layers += range(first, first + count)
    return sorted(layers)
