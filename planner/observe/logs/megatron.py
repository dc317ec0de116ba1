"""Megatron-LM and its kin: Megatron-Bridge, Primus, GPT-NeoX, Megatron-DeepSpeed, which print its line of an iteration.

As of Megatron core 0.19 (megatron/training/training.py, timers.py, utils.py; megatron/core/utils.py) and older forms
since 2021, of which `--log-straggler` printed milliwatts under a W.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.observe.logs.grammar import MOST, Grammar, fact, fields, line_row, mark, moment, number, whole
from planner.observe.record import MOST_RANKS, RunRecord, SpreadOverRanks
from planner.specs.units import GB, GIB, MIB

_STRAGGLER_UNITS = {"ms": 1e-3, "us": 1e-6, "s": 1.0, "%": 1e-2}
STRAGGLER_NAMES = {
    "Rtt": "round_trip_s", "Pwr": "power_w", "Tmp": "temperature_c", "Utl": "utilization_fraction",
    "Clk": "clock_mhz", "DRtt": "data_s", "Etpt": "tflops",
}  # fmt: skip
"""The words of the line, and what they measure."""
_STRAGGLER_TIMERS = {"round_trip_s": "straggler-round-trip", "data_s": "straggler-get-batch"}
_VALUE = re.compile(r"\b(Mn|Mx)(D?Rtt|Pwr|Tmp|Utl|Clk|Etpt)/Rnk: *([\d.]{1,30}) ?([A-Za-z%]{1,4})/(\d{1,7})")
_LISTED = re.compile(r"([\d.]{1,30}) ?(?:TF)?/(\d{1,7})")
_MOST_WATTS = 1e4
"""No GPU takes more: such a number is in milliwatts, as NVML has it."""


def _straggler(record: RunRecord, match: re.Match[str]) -> None:
    """`MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | …`: least and most, each with its rank."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for side, word, text, unit, rank in _VALUE.findall(match.string):
        value, name = number(text) * _STRAGGLER_UNITS.get(unit, 1.0), STRAGGLER_NAMES[word]
        if name == "power_w" and value > _MOST_WATTS:
            value /= 1e3
        found.setdefault(name, {})[side] = (value, int(rank))
    for name, sides in found.items():
        if len(sides) < 2:
            continue
        record.spread(name, sides["Mn"], sides["Mx"])
        if name in _STRAGGLER_TIMERS:
            record.timer(_STRAGGLER_TIMERS[name], sides["Mn"][0], sides["Mx"][0])
            for value, rank in sides.values():
                record.rank_timer(_STRAGGLER_TIMERS[name], rank, value)


def _listed(record: RunRecord, match: re.Match[str]) -> None:
    """`Bottom 4 Ranks with lowest Etpt(TF): 296.02/0, 296.17/2, …`."""
    ranks = record.spreads.setdefault("tflops", SpreadOverRanks()).ranks
    for value, rank in _LISTED.findall(match[1]):
        if len(ranks) < MOST_RANKS:
            ranks[int(rank)] = number(value)


_STRAGGLER_ROWS = (
    line_row("straggler", "/Rnk", r"M[nx](?:Rtt|Etpt)/Rnk", _straggler),
    line_row("ranks by throughput", "Etpt(TF)", r"Ranks with (?:lowest|highest) +Etpt\(TF\):(.{0,4000})", _listed),
)


_NAME = r"([A-Za-z][\w/-]{0,80})"
_MS = 1e-3


@dataclass(frozen=True, slots=True)
class LineField:
    """A field of the line of an iteration that holds the step's seconds or a speed."""

    name: str
    means: str
    unit: float = 1.0
    trainer: str = ""
    """The trainer that alone prints the field; empty where several do."""


FIELDS = (
    LineField("elapsed time per iteration (ms)", "seconds", _MS),
    LineField("elapsed time per iteration (s)", "seconds", 1.0, "megatron-deepspeed"),
    LineField("throughput per GPU (TFLOP/s/GPU)", "tflops"),
    LineField("throughput (TFLOP/s/GPU)", "tflops"),
    LineField("compute per GPU (TFLOP/s/GPU)", "tflops", 1.0, "primus"),
    LineField("TFLOPs", "tflops"),
    LineField("tokens per GPU (tokens/s/GPU)", "tokens_per_s_per_gpu", 1.0, "primus"),
    LineField("tokens-per-second-per-gpu", "tokens_per_s_per_gpu"),
    LineField("global batch size", "batch"),
    LineField("samples per second", "samples_per_s"),
    LineField("samples/sec", "samples_per_s", 1.0, "gpt-neox"),
    LineField("power per GPU (W/GPU)", "watts_per_gpu"),
)
"""Fields that the line may hold; the names are the trainers' own."""
COUNTED = {"number of skipped iterations": "num_skipped_steps", "number of nan iterations": "num_nan_steps"}
"""Fields that count steps of the interval."""
MEMORY = {
    "allocated": "allocated_bytes",
    "max allocated": "max_allocated_bytes",
    "max reserved": "max_reserved_bytes",
    "total device memory used": "device_bytes",
    "mem-allocated-gigabytes": "allocated_bytes",
    "mem-max-allocated-gigabytes": "max_allocated_bytes",
    "mem-max-reserved-gigabytes": "max_reserved_bytes",
}
"""Words of the memory lines, and what they count."""
_DEVICE_MEMORY = re.compile(r"(?:rocm|hip|cuda) mem usage/free/total/usage_ratio\S*: *([\d.]+) ?Gi?B")
_RANKS = re.compile(r"\[rank-\d{1,7}/(\d{1,7})\]")
_MEMORY = re.compile(r"\[Rank (\d{1,7})\] (?:\(after (\d{1,15}) iter)?[^|\[]{0,60}memory \(MB\)[^|\[]{0,20}\|([^\[]*)")
_PROGRESS = re.compile(r"Iteration: *(\d+)")


def _iteration(record: RunRecord, match: re.Match[str]) -> None:
    found = fields(match[3])
    begin = match.string[: match.start()]
    before = fields(begin) if "|" in begin else {}
    values: dict[str, float] = {}
    for known in FIELDS:
        text = found.get(known.name, before.get(known.name))
        if text is None:
            continue
        values.setdefault(known.means, number(text) * known.unit)
        if known.trainer:
            record.facts["trainer"] = known.trainer
        if known.means == "seconds" and "/" in text:  # Primus: now/average
            record.facts["trainer"] = "primus"
    if "seconds" not in values:
        return
    covers = whole(record.arguments.get("log_interval")) if not record.numbers else 0
    at_s = moment(begin)
    if not record.step(int(match[1]), values["seconds"], end_s=at_s, covers=covers or 0, rank=_rank(record)):
        return
    record.facts["num_steps_asked"] = int(match[2])
    batch = values.get("batch", 0.0)
    if 0 < batch < MOST:
        if record.facts.get("global_batch_size", int(batch)) != int(batch) and len(record.numbers) > 1:
            record.state["batch"] = "grows"
        record.facts["global_batch_size"] = int(batch)
    for name in ("tflops", "tokens_per_s_per_gpu", "samples_per_s", "watts_per_gpu"):
        record.prints(name, values.get(name))
    for name, counted in COUNTED.items():
        record.counts[counted] += whole(found.get(name)) or 0
    if "memory(GiB)" in found:  # ms-swift's: max_memory_reserved (swift/megatron/trainers)
        record.bytes_of(None, max_reserved_bytes=number(found["memory(GiB)"]) * GIB)
    if (used := _DEVICE_MEMORY.search(match[3])) is not None:
        record.bytes_of(None, device_bytes=number(used[1]) * GIB)  # a GB of Primus is a GiB: an MI300X has 191.98
    if (ranks := _RANKS.search(begin)) is not None:
        record.facts["num_gpus"] = int(ranks[1])
    _memory_of(record, None, found, GB)


def _rank(record: RunRecord) -> int | None:
    rank = record.state.get("rank")
    return None if rank is None else int(rank)


def _memory(record: RunRecord, match: re.Match[str]) -> None:
    """A rank's memory; ranks that print at once leave several on a line."""
    for rank, step, text in _MEMORY.findall(match.string):
        _memory_of(record, int(rank), fields(text), MIB, whole(step))


def _memory_of(record: RunRecord, rank: int | None, found: dict[str, str], unit: int, step: int | None = None) -> None:
    kinds = {kind: number(found[name]) * unit for name, kind in MEMORY.items() if name in found}
    record.bytes_of(rank, step, **kinds)


def _old_timers(record: RunRecord, match: re.Match[str]) -> None:
    for name, value in fields(match[1]).items():
        seconds = number(value) * _MS
        if not seconds >= 0:
            continue
        record.timer(name, seconds, seconds)
        _outside(record, name, seconds)


def _minmax(record: RunRecord, match: re.Match[str]) -> None:
    low, high = number(match[2]) * _MS, number(match[3]) * _MS
    record.timer(match[1], low, high)
    _outside(record, match[1], high)


def _outside(record: RunRecord, name: str, seconds: float) -> None:
    """Timers of what happens between iterations, which say how long the gap before the next one was."""
    kind = {"save-checkpoint": "checkpoint", "evaluate": "evaluation", "eval-time": "evaluation"}.get(name)
    if kind is not None:
        record.mark(kind, seconds)


def _maximum(record: RunRecord, match: re.Match[str]) -> None:
    seconds = number(match[2]) * _MS
    if record.state.get("dump"):
        record.argument(match[1], match[2])
    elif record.state.get("timers"):
        record.timer(match[1], seconds, seconds)
        _outside(record, match[1], seconds)


def _timers_begin(record: RunRecord, match: re.Match[str]) -> None:
    record.state["timers"] = match[1] or "all"


def _timer_of_ranks(record: RunRecord, match: re.Match[str]) -> None:
    record.state["timer"] = match[1]


def _timer_of_rank(record: RunRecord, match: re.Match[str]) -> None:
    name = record.state.get("timer")
    if name is not None:
        record.rank_timer(name, int(match[1]), number(match[2]) * _MS)


def _dump_begins(record: RunRecord, match: re.Match[str]) -> None:
    record.state["dump"] = "yes"
    record.restart()


_LAYOUT = (
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "virtual_pipeline_model_parallel_size", "micro_batch_size", "global_batch_size",
    "seq_length", "num_layers", "hidden_size",
)  # fmt: skip
"""Arguments that make another job of a run."""


def _dump_ends(record: RunRecord, match: re.Match[str]) -> None:
    record.state.pop("dump", None)
    record.starts_with(" ".join(record.arguments.get(name, "") for name in _LAYOUT))


def _argument(record: RunRecord, match: re.Match[str]) -> None:
    if record.state.get("dump"):
        record.argument(match[1], match[2].strip())
    else:
        value = re.fullmatch(r"\d+\.\d+", match[2].strip())
        if value is not None and record.state.get("timers"):
            record.timer(match[1], float(value[0]) * _MS, float(value[0]) * _MS)
            _outside(record, match[1], float(value[0]) * _MS)


def _datetime(record: RunRecord, match: re.Match[str]) -> None:
    record.time(moment(match[1]))


def _sizes(record: RunRecord, match: re.Match[str]) -> None:
    for name, size in re.findall(r"([\w-]+?)[- ]size: (\d{1,9})", match.string):
        record.argument({"world": "world_size"}.get(name, f"{name.replace('-', '_')}_size"), size)


def _theoretical(record: RunRecord, match: re.Match[str]) -> None:
    record.prints("theoretical_bytes", number(match[1]) * MIB)


def _bridge_step(record: RunRecord, match: re.Match[str]) -> None:
    record.facts["trainer"] = "megatron-bridge"
    record.prints("bridge_step_s", number(match[1]))
    record.prints("tflops", number(match[2]))


def _progress(record: RunRecord, match: re.Match[str]) -> None:
    """`--log-progress`: the mean step between two checkpoints, whatever else took part of that time."""
    at_s, number_of_gpus = moment(match[1]), whole(match[2])
    if number_of_gpus:
        record.facts["num_gpus"] = number_of_gpus
    iteration = _PROGRESS.search(match[3])
    if iteration is None:
        record.restart()
        record.state.pop("saved", None)
        record.time(at_s)
        return
    saved, step = record.state.get("saved"), int(iteration[1])
    record.note("seconds of steps are means between two checkpoints, and hold the checkpoints and evaluations, too")
    record.prints("tflops", number(match[3].partition("Job throughput: ")[2]))
    if saved is not None:
        last, last_s = saved.split()
        if step > int(last) and at_s > float(last_s):
            covers = step - int(last)
            record.step(step, (at_s - float(last_s)) / covers, end_s=at_s, covers=covers)
        elif step == int(last):
            return
    record.state["saved"] = f"{step} {at_s}"


ROWS = (
    line_row("iteration", "iteration", r"iteration\s+(\d{1,15})\s*/\s*(\d{1,15})\s*\|(.*)", _iteration),
    line_row("memory", "memory (MB)", r"\[Rank \d", _memory),
    line_row("timers on one line", "time (ms) |", r"^\s*(?:\[.{0,40}\] )?time \(ms\) \|(.*)", _old_timers),
    line_row("timers begin", "across ranks (ms)", r"\((min), max\) time|(max) time|times across", _timers_begin),
    line_row("timer, least and most", ": (", rf"^\s*{_NAME} \.*: \((\d[\d.]{{0,20}}), (\d[\d.]{{0,20}})\)", _minmax),
    line_row("timer of ranks", ":", rf"^  {_NAME}:\s*$", _timer_of_ranks),
    line_row("timer of a rank", "rank", r"^\s+rank +(\d{1,7}): (\d[\d.]{0,20})\s*$", _timer_of_rank),
    line_row("arguments begin", "- arguments -", r"-{5,} arguments -{5,}", _dump_begins),
    line_row("arguments end", "- end of ", r"-{5,} end of arguments -{5,}", _dump_ends),
    line_row("argument or greatest timer", " ..", r"^\s+([A-Za-z][\w/-]{0,80}) \.{2,60}:? (.{0,4000})$", _argument),
    line_row("moment", "datetime: ", r"datetime: (\d{4}-.{10,40})", _datetime),
    line_row("grid", "using world size", r"using world size: (\d+)", _sizes),
    line_row("theory of memory", "Theoretical memory", r"total\s*=\s*([\d.]+) MB", _theoretical),
    *_STRAGGLER_ROWS,
    line_row("checkpoint saved", "saving checkpoint", r"saving checkpoint at iteration", mark("checkpoint")),
    line_row("checkpoint saved", "saved checkpoint", r"successfully saved checkpoint", mark("checkpoint")),
    line_row("evaluation", "validation loss at", r"validation loss at iteration", mark("evaluation")),
    line_row("step of Bridge", "Step Time : ", r"Step Time : ([\d.]+) ?s GPU utilization: ([\d.]+)", _bridge_step),
    line_row(
        "progress", "Job ID: ",
        r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\s+Job ID: .{0,80}?# GPUs: (\d{1,7})\s+(.*)", _progress,
    ),
    line_row(
        "batch", "train_batch_size", r":print\] +train_batch_size \.{2,80} (\d{1,9})\s*$", fact("global_batch_size")
    ),
    line_row(
        "parameters", "total number of parameters", r"total number of parameters:? *(\d+)", fact("num_parameters")
    ),
)  # fmt: skip


def _finish(record: RunRecord) -> None:
    size = whole(record.arguments.get("world_size"))
    if size:
        record.facts["num_gpus"] = size
    for name in ("seq_length", "global_batch_size"):
        value = whole(record.arguments.get(name))
        if value:
            record.facts.setdefault(name, value)


MEGATRON = Grammar("megatron", "megatron", ROWS, finish=_finish)


def _numberless(record: RunRecord, match: re.Match[str]) -> None:
    record.step((record.numbers[-1] if record.numbers else 0) + 1, number(match[1]))
    record.prints("tflops", number(match[2]))


BRIDGE = Grammar(
    "megatron-bridge",
    "megatron-bridge",
    (line_row("step", "Step Time : ", r"Step Time : ([\d.]+) ?s GPU utilization: ([\d.]+)", _numberless),),
    rank=1,
    finish=lambda record: record.note("the lines have no step numbers: they are counted as they come"),
)
"""The output of rank 0 alone, which has no line of an iteration."""
