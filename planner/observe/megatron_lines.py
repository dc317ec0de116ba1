"""Megatron-LM and its kin: Megatron-Bridge, Primus, GPT-NeoX, Megatron-DeepSpeed, which print its line of an iteration.

As of Megatron core 0.19 (megatron/training/training.py, timers.py, utils.py; megatron/core/utils.py) and older forms
since 2021, of which `--log-straggler` printed milliwatts under a W.
"""

from __future__ import annotations

import math
import re

from planner.observe.line_formats import (
    Grammar,
    fact,
    fields,
    line_row,
    mark,
    moment,
    number,
    rank_of,
    step_row,
    take_beside,
    whole,
)
from planner.observe.record import RunRecord
from planner.specs.units import GB, GIB, MIB

_MS = 1e-3
LINE_FIELDS = {
    "elapsed time per iteration (ms)": ("seconds", _MS, ""),
    "elapsed time per iteration (s)": ("seconds", 1.0, "megatron-deepspeed"),
    "throughput per GPU (TFLOP/s/GPU)": ("tflops", 1.0, ""),
    "throughput (TFLOP/s/GPU)": ("tflops", 1.0, ""),
    "compute per GPU (TFLOP/s/GPU)": ("tflops", 1.0, "primus"),
    "TFLOPs": ("tflops", 1.0, ""),
    "tokens per GPU (tokens/s/GPU)": ("tokens_per_s_per_gpu", 1.0, "primus"),
    "tokens-per-second-per-gpu": ("tokens_per_s_per_gpu", 1.0, ""),
    "global batch size": ("global_batch_size", 1.0, ""),
    "samples per second": ("samples_per_s", 1.0, ""),
    "samples/sec": ("samples_per_s", 1.0, "gpt-neox"),
    "power per GPU (W/GPU)": ("watts_per_gpu", 1.0, ""),
    "memory(GiB)": ("max_reserved_bytes", GIB, ""),
    "mem-allocated-gigabytes": ("allocated_bytes", GB, ""),
    "mem-max-allocated-gigabytes": ("max_allocated_bytes", GB, ""),
    "mem-max-reserved-gigabytes": ("max_reserved_bytes", GB, ""),
}
"""Fields of the line by the trainers' own names: the quantity, its unit, and the trainer that alone prints it."""
_COUNTED = {"number of skipped iterations": "num_skipped_steps", "number of nan iterations": "num_nan_steps"}
_MEMORY_KINDS = {
    "allocated": "allocated_bytes", "max allocated": "max_allocated_bytes", "max reserved": "max_reserved_bytes",
    "total device memory used": "device_bytes",
}  # fmt: skip
"""Words of the lines of memory, in mebibytes."""
_DEVICE_MEMORY = re.compile(r"(?:rocm|hip|cuda) mem usage/free/total/usage_ratio\S*: *([\d.]+) ?Gi?B")
_RANKS = re.compile(r"\[rank-\d{1,7}/(\d{1,7})\]")
_MEMORY = re.compile(r"\[Rank (\d{1,7})\] (?:\(after (\d{1,15}) iter)?[^|\[]{0,60}memory \(MB\)[^|\[]{0,20}\|([^\[]*)")
_OUTSIDE = {"save-checkpoint": "checkpoint", "evaluate": "evaluation", "eval-time": "evaluation"}
"""Timers of what happens between iterations, which say how long the gap before the next one was."""
_LAYOUT = (
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "virtual_pipeline_model_parallel_size", "micro_batch_size", "global_batch_size",
    "seq_length", "num_layers", "hidden_size",
)  # fmt: skip
"""Arguments that make another job of a run."""


def _iteration(record: RunRecord, match: re.Match[str]) -> None:
    begin = match.string[: match.start()]
    found = (fields(begin) if "|" in begin else {}) | fields(match[3])
    values: dict[str, float] = {}
    for name, (means, unit, trainer) in LINE_FIELDS.items():
        if (text := found.get(name)) is not None:
            values.setdefault(means, number(text) * unit)
            # Primus prints now/average
            trainer = "primus" if means == "seconds" and "/" in text else trainer
            record.facts |= {"trainer": trainer} if trainer else {}
    seconds, rank = values.pop("seconds", math.nan), rank_of(record)
    covers = whole(record.arguments.get("log_interval")) if not record.numbers else 0
    if "elapsed time per iteration" not in match.string or not record.step(
        int(match[1]), seconds, end_s=moment(begin), covers=covers or 0, rank=rank
    ):
        return
    batch = values.get("global_batch_size", 0)
    if record.facts.get("global_batch_size", batch) != batch and batch and len(record.numbers) > 1:
        record.state["batch"] = "grows"
    for name, counted in _COUNTED.items():
        record.counts[counted] += whole(found.get(name)) or 0
    if (used := _DEVICE_MEMORY.search(match[3])) is not None:
        values["device_bytes"] = number(used[1]) * GIB  # a GB of Primus is a GiB: an MI300X has 191.98
    if (ranks := _RANKS.search(begin)) is not None:
        values["num_gpus"] = int(ranks[1])
    take_beside(record, {**values, "num_steps_asked": int(match[2])})


def _memory(record: RunRecord, match: re.Match[str]) -> None:
    """A rank's memory; ranks that print at once leave several on a line."""
    for rank, step, text in _MEMORY.findall(match.string):
        found = fields(text)
        kinds = {kind: number(found[name]) * MIB for name, kind in _MEMORY_KINDS.items() if name in found}
        record.bytes_of(int(rank), whole(step), **kinds)


def _timer(record: RunRecord, name: str, low: str, high: str = "") -> None:
    low_s, high_s = number(low) * _MS, number(high or low) * _MS
    if low_s >= 0:
        record.timer(name, low_s, high_s)
        if name in _OUTSIDE:
            record.mark(_OUTSIDE[name], high_s)


def _timers_on_a_line(record: RunRecord, match: re.Match[str]) -> None:
    for name, value in fields(match[1]).items():
        _timer(record, name, value)


def _dump_begins(record: RunRecord, match: re.Match[str]) -> None:
    record.state["dump"] = "yes"
    record.restart()


def _dump_ends(record: RunRecord, match: re.Match[str]) -> None:
    record.state.pop("dump", None)
    record.starts_with(" ".join(record.arguments.get(name, "") for name in _LAYOUT))


def _argument(record: RunRecord, match: re.Match[str]) -> None:
    """A line of the dump, else a timer whose greatest value alone is printed."""
    if record.state.get("dump"):
        record.argument(match[1], match[2].strip())
    elif record.state.get("timers") and re.fullmatch(r"\d+\.\d+", match[2].strip()):
        _timer(record, match[1], match[2])


def _sizes(record: RunRecord, match: re.Match[str]) -> None:
    for name, size in re.findall(r"([\w-]+?)[- ]size: (\d{1,9})", match.string):
        record.argument({"world": "world_size"}.get(name, f"{name.replace('-', '_')}_size"), size)


def _bridge_step(record: RunRecord, match: re.Match[str]) -> None:
    record.facts["trainer"] = "megatron-bridge"
    record.prints("tflops", number(match[1]))


_STRAGGLER_UNITS = {"ms": 1e-3, "us": 1e-6, "s": 1.0, "%": 1e-2}
STRAGGLER_NAMES = {
    "Rtt": "round_trip_s", "Pwr": "power_w", "Tmp": "temperature_c", "Utl": "utilization_fraction",
    "Clk": "clock_mhz", "DRtt": "data_s", "Etpt": "tflops",
}  # fmt: skip
"""The words of the line, and what they measure."""
_STRAGGLER_TIMERS = {"round_trip_s": "straggler-round-trip", "data_s": "straggler-get-batch"}
_VALUE = re.compile(r"\b(Mn|Mx)(D?Rtt|Pwr|Tmp|Utl|Clk|Etpt)/Rnk: *([\d.]{1,30}) ?([A-Za-z%]{1,4})/(\d{1,7})")
_MOST_WATTS = 1e4
"""No GPU takes more: such a number is in milliwatts, as NVML has it."""


def _straggler(record: RunRecord, match: re.Match[str]) -> None:
    """`MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | …`: least and most, each with its rank."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for side, word, text, unit, rank in _VALUE.findall(match.string):
        value, name = number(text) * _STRAGGLER_UNITS.get(unit, 1.0), STRAGGLER_NAMES[word]
        value /= 1e3 if name == "power_w" and value > _MOST_WATTS else 1.0
        found.setdefault(name, {})[side] = (value, int(rank))
    for name, sides in found.items():
        if len(sides) == 2:
            record.spread(name, sides["Mn"], sides["Mx"])
            if name in _STRAGGLER_TIMERS:
                record.timer(_STRAGGLER_TIMERS[name], sides["Mn"][0], sides["Mx"][0])


_NAME = r"([A-Za-z][\w/-]{0,80})"
_ROWS = (
    line_row("iteration", r"iteration\s+(\d{1,15})\s*/\s*(\d{1,15})\s*\|(.*)", _iteration),
    line_row("memory (MB)", r"\[Rank \d", _memory),
    line_row("time (ms) |", r"^\s*(?:\[.{0,40}\] )?time \(ms\) \|(.*)", _timers_on_a_line),
    line_row("across ranks (ms)", r"\((min), max\) time|(max) time|times across",
             lambda record, match: record.state.update({"timers": match[1] or match[2] or "all"})),
    line_row(": (", rf"^\s*{_NAME} \.*: \((\d[\d.]{{0,20}}), (\d[\d.]{{0,20}})\)",
             lambda record, match: _timer(record, *match.groups())),
    line_row("- arguments -", r"-{5,} arguments -{5,}", _dump_begins),
    line_row("- end of ", r"-{5,} end of arguments -{5,}", _dump_ends),
    line_row(" ..", r"^\s+([A-Za-z][\w/-]{0,80}) \.{2,60}:? (.{0,4000})$", _argument),
    line_row("datetime: ", r"datetime: (\d{4}-.{10,40})", lambda record, match: record.time(moment(match[1]))),
    line_row("using world size", r"using world size: (\d+)", _sizes),
    line_row("/Rnk", r"M[nx](?:Rtt|Etpt)/Rnk", _straggler),
    line_row("saving checkpoint", r"saving checkpoint at iteration", mark("checkpoint")),
    line_row("saved checkpoint", r"successfully saved checkpoint", mark("checkpoint")),
    line_row("validation loss at", r"validation loss at iteration", mark("evaluation")),
    line_row("Step Time : ", r"Step Time : [\d.]+ ?s GPU utilization: ([\d.]+)", _bridge_step),
    line_row("train_batch_size", r":print\] +train_batch_size \.{2,80} (\d{1,9})\s*$", fact("global_batch_size")),
    line_row("total number of parameters", r"total number of parameters:? *(\d+)", fact("num_parameters")),
)  # fmt: skip


def _finish(record: RunRecord) -> None:
    if size := whole(record.arguments.get("world_size")):
        record.facts["num_gpus"] = size
    for name in ("seq_length", "global_batch_size"):
        if value := whole(record.arguments.get(name)):
            record.facts.setdefault(name, value)


MEGATRON = Grammar("megatron", "megatron", _ROWS, finish=_finish)
BRIDGE = Grammar(
    "megatron-bridge",
    "megatron-bridge",
    (
        step_row(
            "Step Time : ", r"Step Time : (?P<s><N>) ?s GPU utilization", {"tflops": (r"utilization: ([\d.]+)", 1.0)}
        ),
    ),
    rank=1,
    finish=lambda record: record.note("the lines have no step numbers: they are counted as they come"),
)
"""The output of rank 0 alone, which has no line of an iteration."""
