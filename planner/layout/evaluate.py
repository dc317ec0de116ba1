"""Priced layouts put together to the plan that is shown and saved, and `evaluate`, which prices one given layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf
from operator import itemgetter
from types import MappingProxyType
from typing import get_args

from planner.answer import Goodput, Layout, ModelSummary, Plan, PricedLayout, RunCost, SearchReport
from planner.distribution import __version__
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.confidence import headroom_bytes
from planner.layout.given import given_layout
from planner.layout.price import price_layout
from planner.layout.step import Examples, run_of_examples
from planner.layout.variation import settled, told_assumptions, with_unsaid
from planner.physics.layers import ModelTotals
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import fits_host, host_shortage
from planner.schedule.orders import SCHEDULES
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.problems import nearest
from planner.specs.registry import model_of
from planner.specs.training import Dtype, Parallelism, SearchLimits, TrainingSpec
from planner.specs.units import gib
from planner.trainers.generations import as_built, described, imbalance_of, usual_trainer
from planner.trainers.load import has_dtype, load_runtime, since_of
from planner.trainers.rules.recipe import export_rules_for
from planner.trainers.spec import BEFORE_FLASH, RuntimeSpec
from planner.trainers.stated import of_today


def assemble(
    pricing: Pricing,
    totals: ModelTotals,
    layouts: list[PricedLayout],
    told: tuple[str, ...],
    report: SearchReport | None = None,
    rejections: Mapping[str, int] = MappingProxyType({}),
    rejection_examples: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """The plan of `layouts`, the best of which comes first; `told` are the assumptions that change its step."""
    best, model = layouts[0], pricing.model
    plan = Plan(
        planner_version=__version__,
        model=ModelSummary(
            name=model.name,
            **{name: getattr(totals, name) for name in ModelSummary.model_fields if name not in ("name", "spec")},
            spec=model,
        ),
        cluster=pricing.cluster,
        training=pricing.training,
        runtime=pricing.runtime.name,
        runtime_spec=pricing.runtime,
        best=best,
        alternatives=tuple(other.model_copy(update={"trade": trade(best, other)}) for other in layouts[1:]),
        rejections=dict(sorted(rejections.items(), key=lambda item: (-item[1], item[0]))),
        rejection_examples=dict(sorted(rejection_examples.items())),
        search=report,
        assumptions=told,
    )
    run = run_of_examples(plan)
    longer_factor = 1.0 if run is None else run.longer_factor
    cost, goodput = whole_run_of(pricing, best, totals.num_trained_parameters, longer_factor)
    if run is not None and cost is not None:
        cost = cost.model_copy(update=_of_examples(pricing.training, run, cost.days))
    return plan.model_copy(update={"run_cost": cost, "goodput": goodput})


def _of_examples(training: TrainingSpec, run: Examples, days: float) -> dict[str, object]:
    """Steps, padding and epochs that stand beside the cost of a run of examples."""
    is_padded = training.batching == "padded"
    return {
        "examples": training.examples,
        "epochs": training.epochs if training.examples is not None else None,
        "num_steps": run.num_steps,
        "padding_fraction": run.padding_fraction if is_padded else None,
        "packed_days": days / run.longer_factor if is_padded else None,
    }


def whole_run_of(
    pricing: Pricing, best: PricedLayout, num_parameters: int, longer_factor: float = 1.0
) -> tuple[RunCost, Goodput] | tuple[None, None]:
    """Cost and goodput of the whole training run, as `whole_run` says; None where the training has no tokens."""
    if pricing.training.tokens is None:
        return None, None
    from planner.months.whole_run import whole_run

    runtime = pricing.runtime
    return whole_run(
        best,
        pricing.cluster,
        pricing.training,
        checkpoint_bytes=runtime.checkpoint_bytes_per_parameter * num_parameters,
        asynchronous=runtime.asynchronous_checkpoints,
        longer_factor=longer_factor,
    )


MOST_GUESSES = 12
"""Guesses after which the tokens of a time or a sum are close enough: days grow nearly along a line with tokens."""


def within(plan: Plan, days: float | None, usd: float | None) -> Plan:
    """The plan with the tokens that its GPUs train in so many days and for so many dollars, whichever are fewer.

    Where neither is asked, it stays as it is.
    Raises SpecError for dollars where nobody says what a GPU costs.
    """
    if days is None and usd is None:
        return plan
    from planner.months.whole_run import whole_run

    run, runtime, training, model = run_of_examples(plan), plan.runtime_spec, plan.training, plan.model
    trained = model.num_trained_parameters or model.num_parameters
    tokens = float(training.tokens_per_step)
    for _ in range(MOST_GUESSES):
        training = training.model_copy(update={"tokens": tokens})
        cost, goodput = whole_run(
            plan.best, plan.cluster, training,
            checkpoint_bytes=runtime.checkpoint_bytes_per_parameter * trained,
            asynchronous=runtime.asynchronous_checkpoints, longer_factor=1.0 if run is None else run.longer_factor,
        )  # fmt: skip
        assert cost is not None
        if usd is not None and not cost.usd:
            raise SpecError(
                f"--usd: nothing says what {plan.cluster.hardware.name} costs", "add --usd-per-gpu-hour 2.5"
            )
        ratios = [days / cost.days if days is not None else inf, usd / cost.usd if usd and cost.usd else inf]
        if abs(min(ratios) - 1) < 1e-4:
            break
        tokens *= min(ratios)
    return plan.model_copy(update={"training": training, "run_cost": cost, "goodput": goodput})


def trade(best: PricedLayout, other: PricedLayout) -> str:
    """The seconds and the memory that an alternative loses or gains against the best layout."""
    slower = other.step.step_s / best.step.step_s - 1
    memory_gib = gib(other.worst_stage.memory.total_bytes - best.worst_stage.memory.total_bytes)
    parts = [f"{slower:+.1%} time", f"{memory_gib:+.1f} GiB"]
    before, after = best.step.breakdown, other.step.breakdown
    changes = [(getattr(after, name) - getattr(before, name), says) for name, says in _TRADED.items()]
    for change, says in (pick(changes, key=itemgetter(0)) for pick in (max, min)):
        if abs(change) > 0.005 * best.step.step_s:
            parts.append(f"{change:+.2f} s {says}")
    return ", ".join(parts)


_TRADED = {
    "compute_s": "compute",
    "tp_comm_s": "TP exchange",
    "cp_comm_s": "CP exchange",
    "ep_comm_s": "EP exchange",
    "pp_comm_s": "PP transfer",
    "exposed_dp_s": "DP exchange",
    "bubble_s": "bubble",
    "optimizer_s": "optimizer",
}


def evaluate(
    model: ModelSpec | str,
    cluster: ClusterSpec,
    training: TrainingSpec,
    parallelism: Parallelism | Layout | PricedLayout,
    *,
    runtime: RuntimeSpec | str | None = None,
    says_switches: bool | Collection[str] | None = None,
) -> Plan:
    """Price one given layout, whether it fits or not: a stated one, that of a plan, or `plan.best` with its layers.

    A runtime by name stands for a run that says no switches, as in `plan evaluate`: it has the likely ones, and the
    step's interval covers their other likely values; `plan.best` says its own. The switches of a RuntimeSpec are what
    runs, unless `says_switches` is false or names those that are said. Raises SpecError when the layout contradicts
    the model, the batch or the number of GPUs.
    """
    is_stated = isinstance(runtime, RuntimeSpec)
    says_switches = is_stated if says_switches is None else says_switches
    model, training, runtime = job_of(model, cluster, training, runtime)
    if not is_stated:
        runtime = of_today(runtime)
        if isinstance(parallelism, PricedLayout) and parallelism.recipe:
            says_switches, (runtime, _) = True, runtime.with_features(parallelism.recipe)
        else:
            runtime, _ = described(runtime, cluster.hardware, model, {})
    if isinstance(parallelism, Layout):
        parallelism = parallelism.replace()
    elif isinstance(parallelism, PricedLayout):
        parallelism = parallelism.stated
    candidate, priced = priced_as_given(model, cluster, training, parallelism, runtime, says_switches)
    totals = candidate.pricing.totals
    return assemble(candidate.pricing, totals, [priced], told_assumptions(candidate, with_switches=True))


def price_given(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    parallelism: Parallelism,
    runtime: RuntimeSpec,
    says_switches: bool | Collection[str] = True,
) -> PricedLayout:
    """The priced layout of `evaluate` without the report around it, for use on many runs."""
    return priced_as_given(model, cluster, training, parallelism, runtime, says_switches)[1]


def priced_as_given(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    parallelism: Parallelism,
    runtime: RuntimeSpec,
    says_switches: bool | Collection[str] = True,
) -> tuple[Candidate, PricedLayout]:
    """The candidate of a given layout, and its price as `evaluate` answers it."""
    split = SCHEDULES.get(parallelism.schedule or "")
    runtime = runtime.for_schedules(split is not None and split.splits_backward)
    runtime = settled(runtime.for_zero_stage(parallelism.zero_stage), cluster, model)
    modules = parallelism.recompute_modules or runtime.selective_default
    pricing = pricing_of(model, cluster, training, runtime, modules=modules)
    given = given_layout(pricing, parallelism)
    table = pricing.table(given.shape, given.split.priced_modes)
    candidate = Candidate(pricing, table, given.split, given.schedule)
    priced = price_layout(candidate)
    priced = with_unsaid(candidate, priced, says_switches)
    warnings = host_warnings(pricing, given.shape) + given.warnings + export_warnings(pricing)
    return candidate, priced.model_copy(update={"warnings": warnings})


def job_of(
    model: ModelSpec | str, cluster: ClusterSpec, training: TrainingSpec, runtime: RuntimeSpec | str | None
) -> tuple[ModelSpec, TrainingSpec, RuntimeSpec]:
    """A model, a training and a trainer as `plan` on the command line takes them.

    No trainer means the usual one; where the training says nothing of them, the dtype is the GPU's usual one, and
    experts are as uneven as in such runs.
    """
    model, tunes = model_of(model), training.adapters is not None
    runtime = runtime or usual_trainer(model, cluster.hardware, tunes)
    runtime = load_runtime(runtime) if isinstance(runtime, str) else runtime
    routing = imbalance_of(model, {}, runtime, tunes).fields
    unsaid = {} if routing.keys() & training.model_fields_set else dict[str, float | str](routing)
    if "dtype" not in training.model_fields_set:
        unsaid = {**unsaid, "dtype": cluster.hardware.usual_dtype}
    training = training.model_copy(update=unsaid)
    return as_built(model, runtime), training, runtime


def pricing_of(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    runtime: RuntimeSpec,
    limits: SearchLimits | None = None,
    modules: tuple[str, ...] = (),
) -> Pricing:
    """The pricing of all shapes for this job; raises SpecError where the GPU has no such dtype.

    Without limits a layout fits where the GPU has the bytes; limits leave a headroom free for the search.
    """
    hardware = cluster.hardware
    if hardware.peak_flops(training.dtype) is None:
        known = [name for name in get_args(Dtype) if name in {*hardware.peak_tflops, "fp16"}]
        raise SpecError(f"dtype {training.dtype!r}: {hardware.name} has no such peak", f"one of {', '.join(known)}")
    if not has_dtype(runtime, training.dtype):
        if runtime.dtypes:
            raise SpecError(
                f"dtype {training.dtype!r}: {runtime.name} computes in {' or '.join(runtime.dtypes)}",
                f"--dtype {runtime.dtypes[0]}",
            )
        since = since_of(runtime, "dtype", training.dtype)
        raise SpecError(
            f"dtype {training.dtype!r}: {runtime.name} {runtime.version} has no such recipe, which came with {since}",
            f"--runtime {runtime.name}@{since} has it",
        )
    for name in modules:
        if name not in MODULES:
            raise SpecError(f"recompute_modules: unknown {name!r}", f"of {', '.join(MODULES)}{nearest(name, MODULES)}")
    pricing = Pricing(model=model, training=training, cluster=cluster, runtime=runtime)
    pricing = pricing.recomputing(modules or selective_modules(model, pricing.runtime))
    return pricing if limits is None else replace(pricing, headroom_bytes=headroom_bytes(pricing, limits))


def export_warnings(pricing: Pricing) -> tuple[str, ...]:
    """Warnings about a plan of this model: first of what exports refuse, then of what trainer or GPU do."""
    model, training, runtime = pricing.model, pricing.training, pricing.runtime
    hardware = pricing.cluster.hardware
    refused = tuple(
        f"plan export refuses this model for {runtime.name}: {rule.reason}: {rule.message(model, training, Shape())}"
        for rule in export_rules_for(runtime)
        if not rule.holds(model, training, Shape())
    )
    if hardware.architecture in BEFORE_FLASH and model.moe and runtime.name == "bridge":
        refused += (f"plan export refuses experts on {hardware.name}: their products in groups need Ampere or newer",)
    warnings: tuple[str, ...] = ()
    if training.dtype == "bf16" != hardware.usual_dtype:
        warnings = (f"{hardware.name} has no bf16: priced at the rate of fp16, which --dtype fp16 asks for",)
    if hardware.architecture in BEFORE_FLASH and not runtime.flash_attention:
        warnings += (f"{hardware.name}: attention keeps its scores, since fused kernels need Ampere or newer",)
    is_packed = training.document_lengths is not None and training.batching == "packed"
    if is_packed and not (runtime.masks_documents or runtime.dynamic_cp):
        warnings += (f"{runtime.name} attends across packed documents: priced as whole sequences ({_across(runtime)})",)
    return refused + warnings


def host_warnings(pricing: Pricing, shape: Shape) -> tuple[str, ...]:
    """A warning where a layout's part on the host does not fit there."""
    return () if fits_host(pricing, shape) else (f"does not fit: {host_shortage(pricing, shape)}",)


_OF_MEGATRON = ("megatron", "bridge", "primus-megatron")


def _across(runtime: RuntimeSpec) -> str:
    """The reason why a trainer's attention leaves documents, and what prices one that does not."""
    if runtime.family in _OF_MEGATRON:
        why = "Transformer Engine takes the causal mask alone, --reset-attention-mask or not: Megatron-LM issue 2357"
    else:
        why = f"no option of {runtime.name} masks them"
    return f"{why}; --assume masks_documents=true prices one that does"


MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "op", "shared_experts")
"""Parts of a layer that can be recomputed by themselves, as Megatron names them; `op` is torchtitan's: all but
attention and every other product."""


def selective_modules(model: ModelSpec, runtime: RuntimeSpec) -> tuple[str, ...]:
    """Modules that free most memory for least time: the s² matrix without flash attention, else elementwise ones."""
    if not runtime.flash_attention or "op" in runtime.selective_default:
        return runtime.selective_default
    # other norms are part of the products behind them (TELayerNormColumnParallelLinear)
    cheap = ["layernorm"] if model.moe is not None or model.mla is not None else ["mlp"]
    if model.moe is not None:
        cheap.append("moe_act")
    if model.mla is not None:
        cheap.append("mla_up_proj")
    return tuple(m for m in cheap if m in runtime.recomputable_modules) or ("core_attn",)
