"""Rules on what a training trains: targets that train all weights of a model refuse adapters beside frozen ones."""

from __future__ import annotations

from planner.specs.training import TrainingSpec
from planner.trainers.rules.common import Rule


def _adapters(training: TrainingSpec) -> str:
    adapters = training.adapters
    assert adapters is not None
    weights = "" if adapters.base_bits == 16 else f" beside weights of {adapters.base_bits} bits"
    return f"LoRA of rank {adapters.rank}{weights}: what is written trains every weight of the model, in 16 bits"


WHOLE_MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "adapters",
        lambda model, training, shape: training.adapters is None,
        lambda model, training, shape: _adapters(training),
    ),
    Rule(
        "objective",
        lambda model, training, shape: training.objective.name == "lm",
        lambda model, training, shape: f"{training.objective.name}: what is written learns the next token",
    ),
)
"""Rules of exports that have no word for adapters, for weights that stay as they are, and for other losses."""
