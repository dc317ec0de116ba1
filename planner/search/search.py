"""The file to read first: three specs in, one plan out."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from planner import __version__
from planner.errors import SpecError
from planner.physics.layers import ModelTotals, model_totals
from planner.physics.pricing import Pricing
from planner.plan import ModelSummary, Plan, PricedLayout, RunCost, SearchReport
from planner.schedule.orders import SCHEDULES
from planner.search import explain
from planner.search.assumptions import told_assumptions
from planner.search.auto import AUTO, made_to_measure
from planner.search.branch import Branch, Found
from planner.search.candidates import Rejections, enumerate_shapes
from planner.search.expressible import export_warnings
from planner.search.given import GivenLayout, given_layout
from planner.search.nodes import RecomputeChoice
from planner.search.price import price_layout
from planner.search.schedules import by_runtime, check_expressible, schedules_tried
from planner.search.screen import Screen, fits, screen_of
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.problems import nearest
from planner.specs.runtime import RuntimeSpec
from planner.specs.trainers import load_runtime
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.specs.units import GIB


def plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    *,
    limits: SearchLimits | None = None,
    runtime: RuntimeSpec | str = "megatron",
) -> Plan:
    """The fastest layout of `model` on `cluster` that fits, proven within the reported gap; what else was looked at.

    Raises Infeasible when nothing is legal and fits, SpecError when the inputs contradict each other.
    """
    started = time.monotonic()
    limits, runtime = limits or SearchLimits(), _runtime(runtime)
    check_expressible(limits, runtime)
    pricings = [
        (pricing_of(model, cluster, training, priced_as, limits), tried)
        for priced_as, tried in by_runtime(limits, runtime)
    ]
    shapes, rejections = enumerate_shapes(model, cluster, training, limits, runtime)
    if not len(np.atleast_1d(shapes.tp)):
        raise explain.nothing_legal(rejections)
    screens = [(screen_of(pricing, shapes), tried) for pricing, tried in pricings]
    may_fit = [fits(screen, schedules_tried(tried, screen.pricing.runtime)) for screen, tried in screens]
    screen, fitting = screens[0][0], np.flatnonzero(np.any(may_fit, axis=0))
    explain.count_misfits(screen, len(fitting), rejections)
    branch = Branch(limits, recompute_choices(model, runtime, limits), started + limits.time_limit_s, rejections)
    frontier = branch.run([(screen.take(fitting), tried) for screen, tried in screens])
    branch.run_alternatives(frontier)
    best = branch.best
    if best is not None and AUTO in (limits.schedule or ()) and not best.pricing.runtime.compiled:
        best = made_to_measure(best)
    if best is None and not branch.num_ilps and "no_schedule" in rejections.counts:
        raise explain.nothing_legal(rejections)
    if best is None:
        raise explain.nothing_fits(screen.pricing, limits, screen, rejections)
    others = (found for found in branch.found.values() if found.key != best.key)
    found = [best, *sorted(others, key=lambda one: one.step_s)[: limits.top]]
    totals = model_totals(model, runtime, training.seq_length)
    layouts = [_priced(one, best, totals) for one in found]
    layouts[0] = layouts[0].model_copy(update={"warnings": export_warnings(best.pricing)})
    step_s, seconds = layouts[0].step.step_s, time.monotonic() - started
    report = _report(branch, screens, step_s, len(fitting), seconds)
    told = told_assumptions(best.pricing, best.table, best.split, best.schedule)
    return _plan(best.pricing, totals, layouts, told, report, rejections)


def evaluate(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    parallelism: Parallelism,
    *,
    runtime: RuntimeSpec | str = "megatron",
) -> Plan:
    """Price one given layout, whether it fits or not.

    Raises SpecError when the layout contradicts the model, the batch or the number of GPUs.
    """
    pricing, given, priced = _priced_as_given(model, cluster, training, parallelism, _runtime(runtime))
    told = told_assumptions(pricing, pricing.table(given.shape), given.split, given.schedule)
    return _plan(pricing, model_totals(model, pricing.runtime, training.seq_length), [priced], told)


def price_given(
    model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec, parallelism: Parallelism, runtime: RuntimeSpec
) -> PricedLayout:
    """What `evaluate` says of the layout, without the report around it: for many runs."""
    return _priced_as_given(model, cluster, training, parallelism, runtime)[2]


def _priced_as_given(
    model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec, parallelism: Parallelism, runtime: RuntimeSpec
) -> tuple[Pricing, GivenLayout, PricedLayout]:
    split = SCHEDULES.get(parallelism.schedule or "")
    runtime = runtime.for_schedules(split is not None and split.splits_backward)
    modules = parallelism.recompute_modules or runtime.selective_default
    pricing = pricing_of(model, cluster, training, runtime, modules=modules)
    given = given_layout(pricing, parallelism)
    priced = price_layout(pricing, pricing.table(given.shape), given.split, given.schedule, cluster.num_gpus)
    warnings = given.warnings + export_warnings(pricing)
    return pricing, given, priced.model_copy(update={"warnings": warnings})


def _runtime(runtime: RuntimeSpec | str) -> RuntimeSpec:
    return load_runtime(runtime) if isinstance(runtime, str) else runtime


def pricing_of(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    runtime: RuntimeSpec,
    limits: SearchLimits | None = None,
    modules: tuple[str, ...] = (),
) -> Pricing:
    """What stays the same while shapes vary. Raises SpecError where the GPU has no such dtype."""
    hardware = cluster.hardware
    if hardware.peak_flops(training.dtype) is None:
        raise SpecError(
            f"dtype {training.dtype!r}: {hardware.name} has no such peak",
            f"one of {', '.join(hardware.peak_tflops)}",
        )
    headroom = limits.memory_headroom_gib * GIB if limits else 0.0
    for name in modules:
        if name not in MODULES:
            raise SpecError(f"recompute_modules: unknown {name!r}", f"of {', '.join(MODULES)}{nearest(name, MODULES)}")
    return Pricing(
        model=model,
        training=training,
        cluster=cluster,
        runtime=runtime,
        selective_modules=modules or selective_modules(model, runtime),
        headroom_bytes=headroom,
    )


MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "op", "shared_experts")
"""Parts of a layer that can be recomputed by themselves, as Megatron names them; op: torchtitan's, all but
attention and every other product."""


def selective_modules(model: ModelSpec, runtime: RuntimeSpec) -> tuple[str, ...]:
    """Modules that give most memory for least time: the s² matrix without flash attention, else elementwise ones."""
    if not runtime.flash_attention or "op" in runtime.selective_default:
        return runtime.selective_default
    # other norms are part of the products behind them (TELayerNormColumnParallelLinear)
    cheap = ["layernorm"] if model.moe is not None or model.mla is not None else ["mlp"]
    if model.moe is not None:
        cheap.append("moe_act")
    if model.mla is not None:
        cheap.append("mla_up_proj")
    return tuple(m for m in cheap if m in runtime.selective_recompute_modules) or ("core_attn",)


def recompute_choices(model: ModelSpec, runtime: RuntimeSpec, limits: SearchLimits) -> tuple[RecomputeChoice, ...]:
    """The ways to recompute that the trainer can be told and the user allows."""
    allowed = limits.recompute or ("none", *(("selective",) if runtime.has_sequence_parallel else ()), "full")
    choices = []
    if "none" in allowed and "full" in allowed and runtime.recompute_per_stage:
        choices.append(RecomputeChoice("none", "per_stage"))
    elif "none" in allowed and "full" in allowed and len(model.kinds) == 1:
        # one number of layers for all stages counts layers, not kinds
        choices.append(RecomputeChoice("none", "one_count"))
    elif "none" in allowed:
        choices.append(RecomputeChoice("none", "none"))
    if "selective" in allowed:
        choices.append(RecomputeChoice("selective", "none"))
    if "full" in allowed and not (runtime.recompute_per_stage and "none" in allowed):
        choices.append(RecomputeChoice("none", "all"))
    return tuple(choices)


def _priced(found: Found, best: Found, totals: ModelTotals) -> PricedLayout:
    pricing, exact = found.pricing, found is best
    num_gpus, runtime = pricing.cluster.num_gpus, pricing.runtime
    layout = price_layout(pricing, found.table, found.split, found.schedule, num_gpus, totals, exact, found.order)
    return layout if runtime == best.pricing.runtime else layout.model_copy(update={"runtime_spec": runtime})


def _report(
    branch: Branch,
    screens: Sequence[tuple[Screen, SearchLimits]],
    step_s: float,
    num_fitting: int,
    seconds: float,
) -> SearchReport:
    """A search is proven when it ended by itself; its gap is how far the replayed best is from the least bound left."""
    bound = min(branch.lower_bound_s, step_s)
    tried = [name for screen, limits in screens for name in schedules_tried(limits, screen.pricing.runtime)]
    return SearchReport(
        num_shapes=len(screens[0][0].kernel),
        num_fitting=num_fitting,
        num_ilps=branch.num_ilps,
        seconds=seconds,
        outcome="proven" if branch.complete else "feasible",
        lower_bound_s=bound,
        gap=step_s / bound - 1,
        asked_gap_fraction=branch.limits.gap_fraction,
        schedules=tuple(name for name in dict.fromkeys(tried) if name != "none"),
    )


def _plan(
    pricing: Pricing,
    totals: ModelTotals,
    layouts: list[PricedLayout],
    told: tuple[str, ...],
    report: SearchReport | None = None,
    rejections: Rejections | None = None,
) -> Plan:
    best, model, rejections = layouts[0], pricing.model, rejections or Rejections()
    return Plan(
        planner_version=__version__,
        model=ModelSummary(
            name=model.name,
            num_parameters=totals.num_parameters,
            num_active_parameters=totals.num_active_parameters,
            model_flops_per_token=totals.model_flops_per_token,
            spec=model,
        ),
        cluster=pricing.cluster,
        training=pricing.training,
        runtime=pricing.runtime.name,
        runtime_spec=pricing.runtime,
        best=best,
        alternatives=tuple(other.model_copy(update={"trade": explain.trade(best, other)}) for other in layouts[1:]),
        rejections=dict(sorted(rejections.counts.items(), key=lambda item: (-item[1], item[0]))),
        rejection_examples=dict(sorted(rejections.examples.items())),
        search=report,
        run_cost=run_cost(pricing, best),
        assumptions=told,
    )


def run_cost(pricing: Pricing, best: PricedLayout) -> RunCost | None:
    """Days, GPU-hours, dollars and megawatt-hours for all tokens, over every GPU given."""
    tokens, hardware = pricing.training.tokens, pricing.cluster.hardware
    if tokens is None:
        return None
    hours = tokens / best.step.tokens_per_s / 3600
    gpu_hours = hours * pricing.cluster.num_gpus
    return RunCost(
        tokens=tokens,
        days=hours / 24,
        gpu_hours=gpu_hours,
        usd=gpu_hours * hardware.usd_per_gpu_hour if hardware.usd_per_gpu_hour else None,
        mwh=gpu_hours * hardware.watts_per_gpu / 1e6 if hardware.watts_per_gpu else None,
    )
