"""Adapters, which are trained where the weights of a model stay as they are (LoRA, QLoRA), and objectives.

An objective is the loss of a step, as how many sequences an example has and which forwards run without a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from planner.specs.base import Fraction, PositiveInt, Spec

Bits = Literal[4, 8, 16]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
MIXERS = ("in_proj", "out_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
GROUPS = {
    "all-linear": (*ATTENTION, *LATENT, *MIXERS, *MLP),
    "attention": (*ATTENTION, *LATENT),
    "mlp": MLP,
}
"""Names that stand for several modules. Routed experts are in none of them, but for trainers whose `all-linear` and
`mlp` mean them too (`RuntimeSpec.adapts_experts`)."""
TARGETS = (*GROUPS["all-linear"], *EXPERTS, "lm_head")


class AdapterSpec(Spec):
    """Low-rank adapters (Hu et al. 2021): y = x·W + (x·A)·B·scale, where W is frozen and A and B are trained."""

    rank: PositiveInt = Field(default=16, le=2**14)
    """Columns of A and rows of B."""
    targets: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """Products that get an adapter, by peft's names (q_proj, …, down_proj), or all-linear, attention, mlp."""
    base_bits: Bits = 16
    """Bits of a frozen weight of a linear layer (QLoRA: 4). Embedding, head, norms and routers stay in 16."""
    dropout: Fraction = 0.0
    """Share of an adapter's inputs that is dropped."""

    @field_validator("targets", mode="after")
    @classmethod
    def _known(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for name in targets:
            if name not in (*GROUPS, *TARGETS):
                raise ValueError(f"no module is called {name!r}: {', '.join((*GROUPS, *TARGETS))}")
        return targets

    @property
    def adapts_mlps(self) -> bool:
        """True where a group of modules with those of an MLP is a target."""
        return not {"all-linear", "mlp"}.isdisjoint(self.targets)

    @property
    def modules(self) -> frozenset[str]:
        """The names of all targets, groups resolved."""
        return frozenset(name for target in self.targets for name in GROUPS.get(target, (target,)))


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
