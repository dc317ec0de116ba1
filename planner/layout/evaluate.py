"""Prices one given layout, which is the answer of `plan evaluate`."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from planner.answer import Layout, Plan, PricedLayout
from planner.errors import SpecError
from planner.layout.assemble import assemble
from planner.layout.assumptions import told_assumptions
from planner.layout.candidate import Candidate
from planner.layout.given import given_layout
from planner.layout.price import price_layout
from planner.layout.recipe import settled
from planner.layout.risk import headroom_bytes
from planner.layout.unsaid import with_unsaid
from planner.physics.host_memory import fits_host, host_shortage
from planner.physics.pricing import Pricing
from planner.schedule.orders import SCHEDULES
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.problems import nearest
from planner.specs.registry import model_of
from planner.specs.training import Dtype, Parallelism, SearchLimits, TrainingSpec
from planner.trainers.generations import described
from planner.trainers.load import has_dtype, load_runtime, since_of
from planner.trainers.rules.recipe import export_rules_for
from planner.trainers.spec import RuntimeSpec


def evaluate(
    model: ModelSpec | str,
    cluster: ClusterSpec,
    training: TrainingSpec,
    parallelism: Parallelism | Layout | PricedLayout,
    *,
    runtime: RuntimeSpec | str = "megatron",
    says_switches: bool | None = None,
) -> Plan:
    """Price one given layout, whether it fits or not: a stated one, that of a plan, or `plan.best` with its layers.

    A runtime by name stands for a run that says no switches, as in `plan evaluate`: it has the likely ones, and the
    step's interval covers their other likely values. The switches of a RuntimeSpec are what runs, unless
    `says_switches` is false. Raises SpecError when the layout contradicts the model, the batch or the number of GPUs.
    """
    model = model_of(model)
    says_switches = not isinstance(runtime, str) if says_switches is None else says_switches
    if isinstance(runtime, str):
        runtime, _ = described(load_runtime(runtime), cluster.hardware, model, {})
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
    says_switches: bool = True,
) -> PricedLayout:
    """The priced layout of `evaluate` without the report around it, for use on many runs."""
    return priced_as_given(model, cluster, training, parallelism, runtime, says_switches)[1]


def priced_as_given(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    parallelism: Parallelism,
    runtime: RuntimeSpec,
    says_switches: bool = True,
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
    priced = priced if says_switches else with_unsaid(candidate, priced)
    warnings = given.warnings + export_warnings(pricing) + host_warnings(pricing, given.shape)
    return candidate, priced.model_copy(update={"warnings": warnings})


def runtime_of(runtime: RuntimeSpec | str) -> RuntimeSpec:
    return load_runtime(runtime) if isinstance(runtime, str) else runtime


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
        known = [name for name in hardware.peak_tflops if name in get_args(Dtype)]
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
    pricing = Pricing(
        model=model,
        training=training,
        cluster=cluster,
        runtime=runtime,
        selective_modules=modules or selective_modules(model, runtime),
    )
    return pricing if limits is None else replace(pricing, headroom_bytes=headroom_bytes(pricing, limits))


def export_warnings(pricing: Pricing) -> tuple[str, ...]:
    """Warnings about `plan export`, the trainer or the GPU, for a plan of this model in this dtype."""
    model, training, runtime = pricing.model, pricing.training, pricing.runtime
    hardware = pricing.cluster.hardware
    warnings: tuple[str, ...] = ()
    if training.dtype == "bf16" and "bf16" not in hardware.peak_tflops:
        warnings = (f"{hardware.name} has no bf16: priced at the rate of fp16, which --dtype fp16 asks for",)
    is_packed = training.document_lengths is not None and training.batching == "packed"
    if is_packed and not runtime.masks_documents:
        warnings += (f"{runtime.name} attends across packed documents: priced as whole sequences ({_across(runtime)})",)
    return warnings + tuple(
        f"plan export refuses this model for {runtime.name}: {rule.reason}: {rule.message(model, training, Shape())}"
        for rule in export_rules_for(runtime)
        if not rule.holds(model, training, Shape())
    )


def host_warnings(pricing: Pricing, shape: Shape) -> tuple[str, ...]:
    """A warning where a layout's part on the host does not fit there."""
    return () if fits_host(pricing, shape) else (f"does not fit: {host_shortage(pricing, shape)}",)


def _across(runtime: RuntimeSpec) -> str:
    """The reason why a trainer's attention leaves documents, and what prices one that does not."""
    if runtime.family in ("megatron", "bridge", "primus-megatron"):
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
