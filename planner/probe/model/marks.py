"""Marks on parameters: how each is cut out of the whole model's, and over which ranks its gradient is summed."""

from __future__ import annotations

from torch import Tensor


def mark_shard(parameter: Tensor | None, dim: int, sections: tuple[tuple[int, int], ...]) -> None:
    """Note how a parameter is cut out of the whole one: each section along `dim` of (whole, local) width by itself."""
    if parameter is not None:
        parameter.shard = (dim, sections)  # type: ignore[attr-defined]


def mark_partial(parameter: Tensor | None, always: bool = False) -> None:
    """Note that tensor-parallel ranks each see a part of what the parameter acts on, so that its gradient is their sum:
    a shard of the sequence under sequence parallelism, or (`always`) some of the heads."""
    if parameter is not None:
        parameter.partial = "always" if always else "sequence"  # type: ignore[attr-defined]


def mark_replica(parameter: Tensor, name: str) -> None:
    """Note that other ranks (or chunks) hold the same parameter of the model under this name and must keep it equal."""
    parameter.replica = name  # type: ignore[attr-defined]
