"""DeepSpeed's throughput timer, its wall_clock_breakdown and its communication logger, before and after 0.7.7."""

from __future__ import annotations

import math
import re

from planner.observe.logs.grammar import Grammar, LineRow, fact, line_row, mark, moment, number, whole
from planner.observe.record import RunRecord
from planner.specs.units import GB, GIB, KIB, MIB

_CURRENT = re.compile(r"CurrSamplesPerSec=([\d.eE+-]{1,30})")
_RUNNING = re.compile(r"SamplesPerSec=([\d.eE+-]{1,30})")
_ALLOCATED = re.compile(r"MaxMemAllocated=([\d.]{1,12}) ?GB")
_NOW = re.compile(r"\bMemAllocated=([\d.]{1,12}) ?GB")
_UNITS = {"B": 1, "KB": KIB, "MB": MIB, "GB": GIB}
_BITS_PER_BYTE = 8


def _throughput(record: RunRecord, match: re.Match[str]) -> None:
    """`0/40, RunningAvgSamplesPerSec=…, CurrSamplesPerSec=…`: samples of the whole job in a second."""
    step, at_s, text = int(match[1] or match[2]), moment(match.string), match.string
    for pattern, kind in ((_ALLOCATED, "max_allocated_bytes"), (_NOW, "allocated_bytes")):
        if (memory := pattern.search(text)) is not None:
            record.bytes_of(None, step, **{kind: number(memory[1]) * GIB})
    speed = _CURRENT.search(text)
    samples_per_s = number(speed[1]) if speed else math.nan
    running = _RUNNING.search(text)
    record.prints("samples_per_s", samples_per_s if speed else number(running[1]) if running else None)
    batch, last = record.facts.get("global_batch_size"), record.state.get("last")
    rank = record.state.get("rank")
    taken = {"end_s": at_s, "rank": None if rank is None else int(rank)}
    if speed is not None and batch:
        record.step(step, int(batch) / samples_per_s if samples_per_s > 0 else math.nan, **taken)  # type: ignore[arg-type]
    elif last is not None and at_s > float(last.split()[1]) and step > int(last.split()[0]):
        first, first_s = last.split()
        covers = step - int(first)
        record.note("the batch is not stated: seconds of steps are from the times of the lines")
        record.step(step, (at_s - float(first_s)) / covers, covers=covers, **taken)  # type: ignore[arg-type]
    if math.isfinite(at_s):
        record.state["last"] = f"{step} {at_s}"


def _breakdown(record: RunRecord, match: re.Match[str]) -> None:
    for name, value in re.findall(r"([A-Za-z_0-9]{1,60}): ([\d.]{1,20})", match[1]):
        seconds = number(value) / 1e3
        record.timer(name, seconds, seconds)
    record.note("wall_clock_breakdown synchronises the GPUs: steps are slower than without it")


def _collective(record: RunRecord, match: re.Match[str]) -> None:
    """`comm op: all_reduce | time (ms): 1.2 | msg size: 3 MB | algbw (Gbps): … | busbw (Gbps): …`, in gigabits."""
    seconds, size, unit = number(match[2]) / 1e3, number(match[3]), _UNITS.get(match[4], 1)
    rate = number(match[5]) * GB / _BITS_PER_BYTE
    values = record.links.setdefault(match[1], [])
    if seconds > 0 and size > 0 and rate > 0 and len(values) < 10_000 and len(record.links) < 100:
        values.append((size * unit, seconds, rate))


def _configured(record: RunRecord, match: re.Match[str]) -> None:
    record.argument(match[1], match[2].strip())
    value = whole(match[2])
    if match[1] == "train_batch_size" and value:
        record.facts["global_batch_size"] = value
    if match[1] == "world_size" and value:
        record.facts["num_gpus"] = value


def _memory(record: RunRecord, match: re.Match[str]) -> None:
    """`MA 1.75 GB         Max_MA 2.6 GB         CA 3.1 GB         Max_CA 3 GB`, in gigabytes of 1024³ bytes.

    What was reserved at most is rounded to a whole one; what is reserved now is not, and hardly ever shrinks.
    """
    record.bytes_of(
        None,
        allocated_bytes=number(match[1]) * GIB,
        max_allocated_bytes=number(match[2]) * GIB,
        max_reserved_bytes=number(match[3]) * GIB,
    )


ROWS: tuple[LineRow, ...] = (
    line_row(
        "memory", "Max_MA",
        r"\bMA ([\d.]{1,12}) GB\s+Max_MA ([\d.]{1,12}) GB\s+CA ([\d.]{1,12}) GB\s+Max_CA", _memory,
    ),
    line_row(
        "throughput", "SamplesPerSec=",
        r"(?:\b\d{1,9}/(\d{1,12})|global_step=(\d{1,12})),? .{0,40}?SamplesPerSec=", _throughput,
    ),
    line_row("breakdown", "time (ms) |", r"time \(ms\) \| (\w+: .*)", _breakdown),
    line_row(
        "collective", "comm op:",
        r"comm op: (\w{1,60}) \| time \(ms\): ([\d.]{1,20}) \| msg size: ([\d.]{1,20}) (\w?B) \|"
        r".{0,80}busbw \(Gbps\): ([\d.]{1,20})", _collective,
    ),
    line_row("configuration", ":print]", r":print\] +(\w{1,80}) \.{2,80} (.{0,2000})$", _configured),
    line_row("version", "DeepSpeed info", r"DeepSpeed info: version=([\w.+]{1,40})", fact("trainer_version", str)),
    line_row("world", "dp_world_size", r"world_size=(\d{1,7})", fact("num_gpus")),
    line_row("checkpoint", "Saving model checkpoint", r"Saving model checkpoint", mark("checkpoint")),
)  # fmt: skip
DEEPSPEED = Grammar("deepspeed", "deepspeed", ROWS, rank=1)
