"""What a trainer of today cannot be told at all, whatever the layout: it is priced all the same, with a warning."""

from __future__ import annotations

from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.trainers.rules.common import BF16_ONLY, Rule
from planner.trainers.rules.megatron_model import MEGATRON_MODEL_RULES
from planner.trainers.rules.torchtitan_model import TORCHTITAN_MODEL_RULES

EXPORTED: dict[str, tuple[Rule, ...]] = {
    "megatron": MEGATRON_MODEL_RULES,
    "torchtitan": (*TORCHTITAN_MODEL_RULES, BF16_ONLY),
    "torch-eager": (BF16_ONLY,),
}
"""By runtime: what its export refuses of models and dtypes."""


def export_warnings(pricing: Pricing) -> tuple[str, ...]:
    """What `plan export`, the trainer or the GPU will say of a plan for this model in this dtype."""
    model, training, name = pricing.model, pricing.training, pricing.runtime.name
    hardware = pricing.cluster.hardware
    warnings: tuple[str, ...] = ()
    if training.dtype == "bf16" and "bf16" not in hardware.peak_tflops:
        warnings = (f"{hardware.name} has no bf16: priced at the rate of fp16, which --dtype fp16 asks for",)
    return warnings + tuple(
        f"plan export refuses this model for {name}: {rule.reason}: {rule.message(model, training, Shape())}"
        for rule in EXPORTED.get(name, ())
        if not rule.holds(model, training, Shape())
    )
