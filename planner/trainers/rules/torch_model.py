"""Rules on models that our own runner does not build, whatever the layout: the export writes it, the probe runs it."""

from __future__ import annotations

from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.rules.common import Rule, first_broken
from planner.trainers.rules.fine_tuning import WHOLE_MODEL_RULES
from planner.trainers.rules.layer_kinds import UNWRITTEN_RULES
from planner.trainers.rules.plain_fields import HEAD_NORMS, PLAIN

TORCH_MODEL_RULES: tuple[Rule, ...] = (
    *UNWRITTEN_RULES,
    *WHOLE_MODEL_RULES,
    PLAIN["pre_norms"],
    PLAIN["parallel_residual"],
    HEAD_NORMS,
    PLAIN["attn_output_gate"],
)


def runner_objection(model: ModelSpec, training: TrainingSpec) -> str | None:
    """The reason why our own runner cannot build the model's layers; None where it can."""
    rule = first_broken(TORCH_MODEL_RULES, model, training, Shape())
    return None if rule is None else f"{rule.reason}: {rule.message(model, training, Shape())}"
