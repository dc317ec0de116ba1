"""Which rules a trainer's layouts obey."""

from __future__ import annotations

import numpy as np

from planner.trainers.rules.common import Rule
from planner.trainers.rules.megatron import MEGATRON_CP_RULES, MEGATRON_RULES
from planner.trainers.rules.torch import TORCH_EAGER_RULES
from planner.trainers.rules.torchtitan import TORCHTITAN_RULES
from planner.trainers.spec import RuntimeSpec


def rules_for(runtime: RuntimeSpec) -> tuple[Rule, ...]:
    """The hard constraints of the trainer that a runtime describes."""
    known, trainer = _known_to(runtime), runtime.family
    if trainer == "torchtitan":
        return known + TORCHTITAN_RULES
    if trainer in ("megatron", "megatron-deepspeed", "nanotron"):
        return known + MEGATRON_RULES + MEGATRON_CP_RULES[runtime.cp_comm_type]
    return known + (TORCH_EAGER_RULES if trainer == "torch-eager" else ())


def _known_to(runtime: RuntimeSpec) -> tuple[Rule, ...]:
    """What the trainer of a generation knows at all."""
    return (
        Rule(
            "model_parallel_not_expressible",
            lambda m, t, s: (s.tp * s.cp * s.pp * s.ep == 1) | runtime.has_model_parallel,
            lambda m, t, s: f"tp {s.tp}, cp {s.cp}, pp {s.pp}, ep {s.ep}: {runtime.name} shards weights, no more",
        ),
        Rule(
            "cp_not_expressible",
            lambda m, t, s: (s.cp == 1) | runtime.has_context_parallel,
            lambda m, t, s: f"cp {s.cp}: {runtime.name} knows no context parallelism",
        ),
        Rule(
            "zero_stage_not_expressible",
            lambda m, t, s: np.isin(s.zero_stage, runtime.zero_stages),
            lambda m, t, s: f"zero_stage {s.zero_stage}: {runtime.name} has {', '.join(map(str, runtime.zero_stages))}",
        ),
    )
