"""Rules of torchtune's recipes: ranks always shard, and adapters stand where its builders of models put them."""

from __future__ import annotations

from planner.specs.finetuning import ATTENTION, MLP
from planner.specs.training import TrainingSpec
from planner.trainers.rules.common import Rule, model_rule
from planner.trainers.rules.layer_kinds import UNWRITTEN_RULES

_KNOWN = frozenset((*ATTENTION, *MLP, "lm_head"))


def _expressible_targets(training: TrainingSpec) -> bool:
    """The targets are some of attention's projections, all of the MLP's or none, and perhaps the head."""
    if training.adapters is None or training.adapters.targets == ("all-linear",):
        return True
    modules = training.adapters.modules
    whole = len(modules & frozenset(MLP)) in (0, len(MLP))
    return modules <= _KNOWN | frozenset(_latent()) and whole and bool(modules & frozenset(ATTENTION))


def _latent() -> tuple[str, ...]:
    """Names that a group brings along and that the models here do not have."""
    return ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj", "out_proj")


TORCHTUNE_RULES: tuple[Rule, ...] = (
    Rule(
        "zero_stage",
        lambda model, training, shape: (shape.dp == 1) | (shape.zero_stage >= 2),
        lambda model, training, shape: f"several ranks shard weights there (2, 3), not ZeRO-{shape.zero_stage}",
    ),
)
"""Rules of layouts."""

TORCHTUNE_MODEL_RULES: tuple[Rule, ...] = (
    *UNWRITTEN_RULES,
    Rule(
        "objective",
        lambda model, training, shape: training.objective.name == "lm",
        lambda model, training, shape: (
            f"{training.objective.name}: recipes that learn the next token are written; --to hf has dpo's"
        ),
    ),
    model_rule("moe", lambda model: model.moe is not None, lambda model: "recipes of dense models are written"),
    Rule(
        "adapters.base_bits",
        lambda model, training, shape: training.adapters is None or training.adapters.base_bits != 8,
        lambda model, training, shape: "frozen weights are NF4 there, or of 16 bits: --base-bits 4",
    ),
    Rule(
        "adapters.targets",
        lambda model, training, shape: _expressible_targets(training),
        lambda model, training, shape: (
            "adapters stand beside some of attention's projections, and the whole MLP or none of it: "
            "--lora-targets attention,mlp"
        ),
    ),
)
"""Rules of models and trainings, whatever the layout is."""
