"""Pieces of a simulated step: something that a GPU does, and the place of a rank that does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from planner.layout.candidate import Candidate


class Piece(NamedTuple):
    """Something that a GPU does, in seconds from the step's begin."""

    start_s: float
    length_s: float
    family: str
    """A family of kernels, or `comm`."""
    group: str = ""
    collective: str = ""
    num_bytes: float = 0.0
    late: bool = False
    """True if the GPU waited for its launch."""
    phase: str = ""
    """`F3`, `B3`: the pass that launched it."""


@dataclass(frozen=True)
class Place:
    """A rank's place in the grid, in Megatron's order: tp, cp, dp, pp."""

    rank: int
    tp: int
    cp: int
    dp: int
    stage: int

    @classmethod
    def of(cls, candidate: Candidate, rank: int) -> Place:
        shape = candidate.shape
        tp, cp, dp = int(shape.tp), int(shape.cp), int(shape.dp)
        return cls(rank, rank % tp, rank // tp % cp, rank // (tp * cp) % dp, rank // (tp * cp * dp))


def computed_s(candidate: Candidate, stage: int, kind: str) -> float:
    """Computing seconds of a pass of one micro-batch."""
    cost = candidate.costs[stage]
    return float(
        {
            "F": cost.forward_s, "I": cost.input_grad_s, "W": cost.weight_grad_s,
            "B": cost.input_grad_s + cost.weight_grad_s,
        }[kind]
    )  # fmt: skip


def whole_s(candidate: Candidate, stage: int, kind: str) -> float:
    durations = candidate.durations
    backward_s = durations.input_grad_s[stage] + durations.weight_grad_s[stage]
    return float(durations.forward_s[stage] if kind == "F" else backward_s)
