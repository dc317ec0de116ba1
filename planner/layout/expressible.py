"""Models and dtypes that no option of a trainer of today expresses: they are priced, with a warning."""

from __future__ import annotations

from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.trainers.rules.of_trainer import export_rules_for
from planner.trainers.spec import RuntimeSpec


def export_warnings(pricing: Pricing) -> tuple[str, ...]:
    """Warnings about `plan export`, the trainer or the GPU, for a plan of this model in this dtype."""
    model, training, runtime = pricing.model, pricing.training, pricing.runtime
    hardware = pricing.cluster.hardware
    warnings: tuple[str, ...] = ()
    if training.dtype == "bf16" and "bf16" not in hardware.peak_tflops:
        warnings = (f"{hardware.name} has no bf16: priced at the rate of fp16, which --dtype fp16 asks for",)
    if training.document_lengths is not None and not runtime.masks_documents:
        warnings += (f"{runtime.name} attends across packed documents: priced as whole sequences ({_across(runtime)})",)
    return warnings + tuple(
        f"plan export refuses this model for {runtime.name}: {rule.reason}: {rule.message(model, training, Shape())}"
        for rule in export_rules_for(runtime)
        if not rule.holds(model, training, Shape())
    )


def _across(runtime: RuntimeSpec) -> str:
    """The reason why a trainer's attention leaves documents, and what prices one that does not."""
    if runtime.family in ("megatron", "bridge", "primus-megatron"):
        why = "Transformer Engine takes the causal mask alone, --reset-attention-mask or not: Megatron-LM issue 2357"
    else:
        why = f"no option of {runtime.name} masks them"
    return f"{why}; --assume masks_documents=true prices one that does"
