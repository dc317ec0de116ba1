"""Marks on parameters: how each is cut out of the whole model's, and over which ranks its gradient is summed."""

from __future__ import annotations

from torch import Tensor


def mark_shard(parameter: Tensor | None, dim: int, sections: tuple[tuple[int, int], ...]) -> None:
    """Mark how a parameter is cut out of the whole one: each section along `dim`, of (whole, local) width, by
    itself."""
    if parameter is not None:
        parameter.shard = (dim, sections)  # type: ignore[attr-defined]


def mark_partial(parameter: Tensor | None, always: bool = False) -> None:
    """Mark a parameter whose gradient is the sum over tensor-parallel ranks, because each of them sees only a part of
    the input: a shard of the sequence under sequence parallelism, or (`always`) some of the heads."""
    if parameter is not None:
        parameter.partial = "always" if always else "sequence"  # type: ignore[attr-defined]


def mark_replica(parameter: Tensor, name: str) -> None:
    """Mark a parameter that other ranks (or chunks) hold too, under this name, and that must stay equal on all of
    them."""
    parameter.replica = name  # type: ignore[attr-defined]
