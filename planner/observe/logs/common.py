"""Lines that PyTorch prints into the log of any trainer: memory that ran out, or nearly."""

from __future__ import annotations

import re

from planner.observe.logs.grammar import number, row
from planner.observe.record import Record


def _retried(record: Record, match: re.Match[str]) -> None:
    """torchtitan's `9 CUDA memory allocation retries.`, counted from the begin by each rank."""
    _at_least(record, "num_alloc_retries", match[1])


def _out_of_memory(record: Record, match: re.Match[str]) -> None:
    """torchtitan's `2 CUDA OOM errors thrown.`, counted from the begin by each rank."""
    _at_least(record, "num_ooms", match[1])


def _at_least(record: Record, name: str, text: str) -> None:
    record.counts[name] = max(record.counts[name], int(number(text)))


def _failed(record: Record, match: re.Match[str]) -> None:
    """PyTorch 2.13's warning of one attempt that the allocator may repeat."""
    record.counts["num_alloc_retries"] += 1


def _thrown(record: Record, match: re.Match[str]) -> None:
    record.counts["num_ooms"] += 1


ROWS = (
    row("retries", "memory allocation retries", r"\b(\d{1,12}) [A-Z]+ memory allocation retries", _retried),
    row("out of memory", "OOM errors thrown", r"\b(\d{1,12}) [A-Z]+ OOM errors thrown", _out_of_memory),
    row("retry", "allocation failed with OOM", r"memory allocation failed with OOM on device", _failed),
    row("out of memory", "out of memory. Tried", r"Error: (?:CUDA|HIP|XPU) out of memory\. Tried to allocate", _thrown),
)
"""As of torchtitan 2026 (torchtitan/components/metrics.py) and PyTorch 2.13 (c10/cuda/CUDACachingAllocator.cpp)."""
