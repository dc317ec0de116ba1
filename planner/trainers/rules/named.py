"""Sets of rules by the names that a trainer's file gives under `rules` and `export_rules`."""

from __future__ import annotations

from collections.abc import Callable

from planner.trainers.rules.common import BF16_ONLY, Rule
from planner.trainers.rules.huggingface import (
    DEEPSPEED_MODEL_RULES,
    DEEPSPEED_RULES,
    HF_MODEL_RULES,
    HF_RULES,
    TORCHTUNE_MODEL_RULES,
    TORCHTUNE_RULES,
)
from planner.trainers.rules.megatron import megatron_rules
from planner.trainers.rules.megatron_model import BRIDGE_MODEL_RULES, MEGATRON_MODEL_RULES
from planner.trainers.rules.torch import AUTOMODEL_RULES, TORCH_EAGER_RULES, TORCH_MODEL_RULES
from planner.trainers.rules.torchtitan import TORCHTITAN_MODEL_RULES, TORCHTITAN_RULES
from planner.trainers.spec import RuntimeSpec

RULES: dict[str, Callable[[RuntimeSpec], tuple[Rule, ...]]] = {
    "megatron": megatron_rules,
    "torchtitan": lambda runtime: TORCHTITAN_RULES,
    "torch-eager": lambda runtime: TORCH_EAGER_RULES,
    "automodel": lambda runtime: AUTOMODEL_RULES,
    "deepspeed": lambda runtime: DEEPSPEED_RULES,
    "torchtune": lambda runtime: TORCHTUNE_RULES,
    "hf": lambda runtime: HF_RULES,
}
"""Rules that layouts obey, by the name of their set; some depend on the runtime's switches."""

EXPORT_RULES: dict[str, tuple[Rule, ...]] = {
    "megatron": MEGATRON_MODEL_RULES,
    "bridge": BRIDGE_MODEL_RULES,
    "torchtitan": TORCHTITAN_MODEL_RULES,
    "torch-eager": TORCH_MODEL_RULES,
    "deepspeed": DEEPSPEED_MODEL_RULES,
    "hf": HF_MODEL_RULES,
    "torchtune": TORCHTUNE_MODEL_RULES,
    "bf16": (BF16_ONLY,),
}
"""Rules that an export sets to models and dtypes, whatever the layout. What breaks one is priced all the same, with a
warning."""
