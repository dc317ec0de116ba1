"""Objectives: the loss of a step, as how many sequences an example has and which forwards run without a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from planner.specs.base import Spec

ObjectiveName = Literal["lm", "dpo", "kto", "orpo"]
Reference = Literal["model", "adapters", "precomputed"]


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective."""

    says: str
    num_sequences: int = 1
    """Sequences of an example: an answer that is preferred and one that is not are two."""
    policy_forwards: int = 0
    """Forwards of the trained model without a gradient, beside the one with it, for each sequence."""
    reference_forwards: int = 0
    """Forwards of the reference model for each sequence."""
    source: str = ""


OBJECTIVES: dict[str, Objective] = {
    "lm": Objective("the next token of each sequence", source="transformers.Trainer, trl.SFTTrainer"),
    "dpo": Objective(
        "an answer that is preferred over another, each beside a reference model's",
        num_sequences=2, reference_forwards=1,
        source="Rafailov et al. 2023; trl.DPOTrainer, which concatenates both answers of a pair",
    ),
    "kto": Objective(
        "an answer that is wanted or not, beside a reference model's, and one of another prompt beside both",
        policy_forwards=1, reference_forwards=2,
        source="Ethayarajh et al. 2024; trl.KTOTrainer (calculate_kl)",
    ),
    "orpo": Objective(
        "an answer that is preferred over another by the odds of both, without a reference model",
        num_sequences=2, source="Hong et al. 2024; trl.ORPOTrainer",
    ),
}  # fmt: skip
"""All objectives, by name."""


class ObjectiveSpec(Spec):
    """The objective of a training."""

    name: ObjectiveName = "lm"
    """The loss: of the next token (lm), of pairs of answers (dpo, orpo), of single ones (kto)."""
    reference: Reference = Field(default="model")
    """The reference model of dpo and kto: a second copy of the weights, the weights without their adapters, or
    log-probabilities that were computed before the training."""

    @property
    def row(self) -> Objective:
        """The facts of the objective."""
        return OBJECTIVES[self.name]

    @property
    def has_pairs(self) -> bool:
        """True where an example is two sequences, which a micro-batch holds together."""
        return self.row.num_sequences == 2

    @property
    def plain_forwards(self) -> int:
        """Forwards without a gradient for each sequence of a step."""
        return self.row.policy_forwards + (self.reference != "precomputed") * self.row.reference_forwards

    @property
    def copies_weights(self) -> bool:
        """True where a second copy of the weights stands beside those that are trained."""
        return self.row.reference_forwards > 0 and self.reference == "model"
