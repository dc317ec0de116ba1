"""Rules of Hugging Face Trainer, TRL and Accelerate on shapes; those of a way to shard stand with its switch."""

from __future__ import annotations

import numpy as np

from planner.trainers.rules.common import Rule
from planner.trainers.spec import RuntimeSpec


def huggingface_rules(runtime: RuntimeSpec) -> tuple[Rule, ...]:
    """Constraints of Accelerate's plugins under the sharding that the runtime has."""
    return (
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
