"""The bytes that the next integer program of a node leaves free, if the last one's split exceeds the exact memory."""

from __future__ import annotations

from collections.abc import Sequence

from planner.specs.units import GIB

LEAST_SHORT_BYTES = 0.25 * GIB
"""Bytes left free beyond those that the last program saw left, so that few programs are enough."""


def shorter(short_bytes: Sequence[float], excess: Sequence[float], free_bytes: Sequence[float]) -> list[float]:
    """Bytes that the program must leave free on each rank.

    The last program saw `free_bytes` left on each rank, but its split exceeds the exact memory by `excess`. A rank that
    exceeds it must leave so much more free that it cannot hold the same layers again.
    """
    known = short_bytes or [0.0] * len(excess)
    return [
        short + (free + LEAST_SHORT_BYTES) * (more > 0)
        for short, more, free in zip(known, excess, free_bytes, strict=True)
    ]
