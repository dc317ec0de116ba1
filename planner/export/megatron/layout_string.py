"""Megatron's --pipeline-model-parallel-layout: virtual stages as one short string."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from planner.export.common.stages import VirtualStage


def layout_string(stages: Iterable[VirtualStage], num_mtp: int = 0) -> str:
    """E embedding, t decoder layer, m MTP block, L loss, | between virtual stages, and x*n, (…)*n for repetition.

    `Et|(tt|)*62tL` is 64 stages: one layer in the first and the last, two in each between.
    """
    return fold([_symbols(stage, num_mtp) for stage in stages])


def fold(stages: list[str]) -> str:
    """Join the stages by |, runs of equal ones as (stage|)*n; the last has no | behind it."""
    *inner, last = stages
    parts = []
    for symbols, group in groupby(inner):
        times = len(list(group))
        stage = f"{symbols}|"
        # Megatron unrolls one level of parentheses, then x*n of one symbol
        parts.append(stage if times == 1 else f"|*{times}" if not symbols else f"({stage})*{times}")
    return "".join(parts) + last


def _symbols(stage: VirtualStage, num_mtp: int) -> str:
    text = "E" if stage.embedding else ""
    text += _repeat("t", stage.num_layers)
    text += _repeat("m", num_mtp) if stage.mtp else ""
    return text + ("L" if stage.head else "")


def _repeat(symbol: str, times: int) -> str:
    return symbol * times if times < 3 else f"{symbol}*{times}"
