"""Sets of rules by the names that a trainer's file gives, and the rules of Hugging Face's trainers and torchtune's.

They are of shapes, and of exports, for what models and files cannot say. DeepSpeed shards over all replicas; ranks of
torchtune always shard.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.specs.training import GROUPS
from planner.trainers.rules.common import BF16_ONLY, HEADS, UNWRITTEN_RULES, WHOLE_MODEL_RULES, Rule, model_rule
from planner.trainers.rules.megatron import (
    BRIDGE_MODEL_RULES,
    MEGATRON_MODEL_RULES,
    PRIMUS_CORE,
    megatron_model_rules,
    megatron_rules,
)
from planner.trainers.rules.torch import (
    AUTOMODEL_RULES,
    TORCH_EAGER_RULES,
    TORCH_MODEL_RULES,
    TORCHTITAN_MODEL_RULES,
    TORCHTITAN_RULES,
)
from planner.trainers.spec import RuntimeSpec

HF_MODEL_RULES: tuple[Rule, ...] = (
    *(rule for rule in UNWRITTEN_RULES if rule.reason == "vision"),
    model_rule(
        "mtp",
        lambda model: bool(model.num_nextn_predict_layers),
        lambda model: "transformers' models train no multi-token prediction (num_nextn_predict_layers)",
    ),
    Rule(
        "objective",
        lambda model, training, shape: training.objective.name in ("lm", "dpo"),
        lambda model, training, shape: f"{training.objective.name}: TRL's SFTTrainer and DPOTrainer are written",
    ),
    Rule(
        "objective.reference",
        lambda model, training, shape: (
            training.objective.name != "dpo" or training.adapters is None or training.objective.reference != "model"
        ),
        lambda model, training, shape: (
            "beside adapters DPOTrainer's reference is the model without them (reference adapters), or precomputed"
        ),
    ),
    Rule(
        "adapters.targets",
        lambda model, training, shape: (
            training.adapters is None or model.gated_mlp or training.adapters.targets == ("all-linear",)
        ),
        lambda model, training, shape: (
            "modules of a model without gated MLPs have other names in transformers than "
            f"{', '.join(GROUPS['all-linear'])}: --lora-targets all-linear finds them"
        ),
    ),
)
"""Rules of models and trainings that hold for all layouts."""

HF_RULES: tuple[Rule, ...] = (
    Rule(
        "packed_weights_not_sharded",
        # bitsandbytes' Int8Params have no storage of another dtype, as Params4bit do (bnb_4bit_quant_storage)
        lambda model, training, shape: (
            (np.asarray(shape.zero_stage) < 3) | (training.adapters is None or training.adapters.base_bits != 8)
        ),
        lambda model, training, shape: (
            "weights of 8 bits are not sharded by FSDP or ZeRO-3: bitsandbytes shards those of 4 bits "
            "(bnb_4bit_quant_storage), and each GPU holds those of 8 bits whole"
        ),
    ),
)


DEEPSPEED_MODEL_RULES: tuple[Rule, ...] = (
    *UNWRITTEN_RULES,
    *WHOLE_MODEL_RULES,
    model_rule("moe", lambda model: model.moe is not None, lambda model: "only dense models are exported"),
    model_rule(
        "attention_chunk_size",
        lambda model: bool(model.attention_chunk_size),
        lambda model: "attention in chunks is not exported",
    ),
    model_rule(
        "mtp",
        lambda model: bool(model.num_nextn_predict_layers),
        lambda model: "multi-token prediction has no place in a list of layers",
    ),
)
DEEPSPEED_RULES: tuple[Rule, ...] = (
    HEADS,
    Rule(
        "vpp",
        lambda model, training, shape: shape.vpp == 1,
        lambda model, training, shape: f"one stage per rank, vpp is {shape.vpp}",
    ),
    Rule(
        "shard_size",
        lambda model, training, shape: (shape.zero_stage == 0) | (shape.shard_size == shape.dp),
        lambda model, training, shape: f"it shards over all {shape.dp} replicas, not {shape.shard_size}",
    ),
)


TORCHTUNE_RULES: tuple[Rule, ...] = (
    Rule(
        "zero_stage",
        lambda model, training, shape: (shape.dp == 1) | (shape.zero_stage >= 2),
        lambda model, training, shape: f"several ranks shard weights there (2, 3), not ZeRO-{shape.zero_stage}",
    ),
)
"""Rules of layouts."""

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
    "primus-megatron": megatron_model_rules(PRIMUS_CORE),
    "torchtitan": TORCHTITAN_MODEL_RULES,
    "torch-eager": TORCH_MODEL_RULES,
    "deepspeed": DEEPSPEED_MODEL_RULES,
    "hf": HF_MODEL_RULES,
    "bf16": (BF16_ONLY,),
}
"""Rules that an export sets to models and dtypes, whatever the layout. What breaks one is priced all the same, with a
warning."""
