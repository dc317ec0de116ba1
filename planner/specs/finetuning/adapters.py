"""Adapters: what is trained where the weights of a model stay as they are (LoRA, QLoRA)."""

from __future__ import annotations

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
"""Names that stand for several modules. Routed experts are in none of them: peft's `all-linear` leaves them out too,
whose weights are one tensor for all experts and no `nn.Linear`."""
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
    def modules(self) -> frozenset[str]:
        """The names of all targets, groups resolved."""
        return frozenset(name for target in self.targets for name in GROUPS.get(target, (target,)))
