"""nanotron's line of an iteration, whose numbers have three digits and a suffix, so that a step is known to 0.5%."""

from __future__ import annotations

import re

from planner.observe.logs.grammar import MOST, Grammar, fields, mark, moment, row, suffixed
from planner.observe.record import Record

_TIMES = ("elapsed_time_per_iteration_ms", "time_per_iteration_ms")


def _iteration(record: Record, match: re.Match[str]) -> None:
    found = fields(match[3])
    text = next((found[name] for name in _TIMES if name in found), None)
    if text is None:
        return
    milliseconds, half_unit = suffixed(text)
    at_s = moment(match.string[: match.start()])
    if not record.step(int(match[1]), milliseconds / 1e3, end_s=at_s, covers=0):
        return
    record.facts["num_steps_asked"] = int(match[2])
    record.prints("precision_fraction", half_unit / milliseconds)
    for name, ours in (("tokens_per_sec", "tokens_per_s"), ("model_tflops_per_gpu", "tflops")):
        record.prints(ours, suffixed(found[name])[0] if name in found else None)
    batch = suffixed(found.get("global_batch_size", ""))[0]
    if 1 <= batch < MOST:
        record.facts["global_batch_size"] = int(batch)
    peak = suffixed(found.get("cuda_max_memory_reserved", ""))[0]
    used = suffixed(found.get("cuda_memory_allocated", ""))[0]
    record.bytes_of(None, max_reserved_bytes=peak, allocated_bytes=used)


NANOTRON = Grammar(
    "nanotron",
    "nanotron",
    (
        row(
            "iteration", "time_per_iteration_ms", r"iteration: (\d{1,15}) / (\d{1,15}) \| (.*time_per_iteration_ms.*)",
            _iteration,
        ),
        row("checkpoint", "Saving checkpoint", r"Saving checkpoint at", mark("checkpoint")),
        row("checkpoint", "Saving weights", r"Saving weights", mark("checkpoint")),
    ),
)  # fmt: skip
"""As of 2024 to 2026 (src/nanotron/trainer.py, logging.py)."""
