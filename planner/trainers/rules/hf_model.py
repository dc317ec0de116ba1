"""Rules of Hugging Face's trainers: of shapes, and of exports, for what their models and files cannot say.

Those of a way to shard stand with its switch.
"""

from __future__ import annotations

import numpy as np

from planner.specs.finetuning import GROUPS
from planner.trainers.rules.common import Rule, model_rule

HF_MODEL_RULES: tuple[Rule, ...] = (
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
"""Rules of models and trainings, whatever the layout is."""

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
