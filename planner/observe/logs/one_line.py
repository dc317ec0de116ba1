"""Trainers that say a step in one line and little else: nanotron, MaxText, verl."""

from __future__ import annotations

import re
from statistics import median

from planner.observe.logs.grammar import MOST, Grammar, fields, line_row, mark, moment, number, suffixed
from planner.observe.record import RunRecord

_NANOTRON_TIMES = ("elapsed_time_per_iteration_ms", "time_per_iteration_ms")


def _iteration(record: RunRecord, match: re.Match[str]) -> None:
    found = fields(match[3])
    text = next((found[name] for name in _NANOTRON_TIMES if name in found), None)
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
        line_row(
            "iteration", "time_per_iteration_ms", r"iteration: (\d{1,15}) / (\d{1,15}) \| (.*time_per_iteration_ms.*)",
            _iteration,
        ),
        line_row("checkpoint", "Saving checkpoint", r"Saving checkpoint at", mark("checkpoint")),
        line_row("checkpoint", "Saving weights", r"Saving weights", mark("checkpoint")),
    ),
)  # fmt: skip
"""As of 2024 to 2026 (src/nanotron/trainer.py, logging.py); numbers have three digits and a suffix, so that a step is
known to 0.5%."""


def _completed(record: RunRecord, match: re.Match[str]) -> None:
    """`completed step: 3, seconds: 11.715, TFLOP/s/device: 193.354, Tokens/s/device: 4195.595, …`."""
    found, seconds = fields(match.string, ","), number(match[2])
    if record.step(int(match[1]), seconds, end_s=moment(match.string[: match.start()])):
        record.prints("tflops", number(found.get("TFLOP/s/device")))
        record.prints("tokens_per_s_per_gpu", number(found.get("Tokens/s/device")))


def _finish_maxtext(record: RunRecord) -> None:
    """Leave out the first steps, of which some return before they have run, and others wait for them."""
    usual = median(record.seconds) if len(record.seconds) > 2 else 0.0
    early = [row for row, seconds in enumerate(record.seconds) if seconds < _RETURNED * usual]
    if early and early[-1] <= len(record.seconds) // 2:
        record.forget(len(record.seconds) - early[-1] - 1)
        record.note(f"{early[-1] + 1} first steps were dispatched without waiting for them, and are left out")


_RETURNED = 0.5
MAXTEXT = Grammar(
    "maxtext",
    "maxtext",
    (line_row("step", "completed step: ", r"completed step: (\d{1,15}), seconds: ([\d.eE+-]{1,30})", _completed),),
    finish=_finish_maxtext,
)
"""As of 2026 (MaxText/metric_logger.py)."""


def _verl(record: RunRecord, match: re.Match[str]) -> None:
    """`step:1 - … timing_s/gen:698.88 - timing_s/step:1268.49 - perf/throughput:524.5`: minutes, without a warm-up."""
    found = fields(match.string[match.start() :], " - ")
    seconds = number(found.get("timing_s/step") or found.get("perf/time_per_step"))
    record.is_first_alike = True
    if not record.step(int(match[1]), seconds):
        return
    record.prints("tokens_per_s_per_gpu", number(found.get("perf/throughput")))
    gpus = number(found.get("perf/total_num_tokens")) / seconds / number(found.get("perf/throughput"))
    if 1 <= round(gpus if gpus == gpus else 0) < MOST and abs(gpus - round(gpus)) < 0.01 * gpus:
        record.facts["num_gpus"] = round(gpus)
    for name, value in found.items():
        if name.startswith("timing_s/") and name.count("/") == 1 and name != "timing_s/step":
            record.timer(name.removeprefix("timing_s/"), number(value), number(value))


VERL = Grammar(
    "verl", "verl", (line_row("step", "timing_s/step:", r"\bstep:(\d{1,12}) - ", _verl),),
)  # fmt: skip
"""As of 2025 (verl/utils/tracking.py, verl/trainer/ppo/metric_utils.py)."""
