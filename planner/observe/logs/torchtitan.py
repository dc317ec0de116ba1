"""torchtitan's lines, as of 2024 (`wps`) to 2026 (torchtitan/components/metrics.py, train.py)."""

from __future__ import annotations

import math
import re
from operator import mul
from statistics import median

from planner.observe.logs.grammar import Grammar, LineRow, fact, line_row, mark, moment, number, text_of, whole
from planner.observe.record import RunRecord
from planner.specs.units import GIB

_CLOCK_S, _SHARP_FRACTION, _LEAST_TO_SHARPEN = 1e-3, 0.002, 5
"""Times are cut to milliseconds, which 0.2% of a step may hide."""
_SPEED = re.compile(r"(?:tps|wps): *([\d,.]{1,20})")
_NAN = re.compile(r"loss: *nan\b")
_MEMORY = re.compile(r"memory: *([\d.]{1,12})GiB\(([\d.]{1,6})%\)")


def _step(record: RunRecord, match: re.Match[str]) -> None:
    """A line of a step: tokens/s of a device since the last line, from whose time the seconds follow."""
    step, at_s, text = int(match[1]), moment(match.string[: match.start()]), match.string
    speed, rank = _SPEED.search(text), record.state.get("rank")
    if speed is None:
        return
    tokens_per_s, last = number(speed[1]), record.ends[-1] if record.ends else math.nan
    last_step, covers = (record.numbers[-1] if record.numbers else 0), 0
    first, first_s = (float(word) for word in record.state.get("begin", "0 nan").split())
    if (memory := _MEMORY.search(text)) is not None:
        record.bytes_of(None if rank is None else int(rank), step, max_reserved_bytes=number(memory[1]) * GIB)
    if "head" in record.state and step > first == 1:
        # the line of its first step, which torchtitan prints, is not here: tokens/s are of the steps behind that one
        record.state["excerpt"] = f"{step} {tokens_per_s} {at_s}"
        record.state["begin"] = f"{step + 1} {at_s}"
        record.state.pop("head")
        return
    record.state.pop("head", None)
    if step >= first and at_s > first_s and not (last >= first_s and "restarted" not in record.state):
        covers = step - int(first) + 1
        seconds = (at_s - first_s) / covers
    elif record.numbers and step > last_step and at_s > last and "restarted" not in record.state:
        seconds = (at_s - last) / (step - last_step)
    else:
        seconds = math.nan
    if not seconds > 0 and "tokens" in record.state:
        seconds = float(record.state["tokens"]) / tokens_per_s
    if not seconds > 0:
        _remember(record, step, at_s, tokens_per_s)
        return
    # the clock of the lines has milliseconds: a short step's seconds come from tokens/s once both are known
    record.state.setdefault("tokens", str(seconds * tokens_per_s))
    if record.step(step, seconds, end_s=at_s, covers=covers, rank=None if rank is None else int(rank)):
        record.prints("tokens_per_s_per_gpu", tokens_per_s)
        record.counts["num_nan_steps"] += _NAN.search(text) is not None
        record.prints("tflops", number(text.partition("tflops: ")[2]))
        record.prints("mfu_percent", number(text.partition("mfu: ")[2]))


def _remember(record: RunRecord, step: int, at_s: float, tokens_per_s: float) -> None:
    """The first line of a log without its head: only its end is known."""
    record.state.setdefault("begin", f"{step + 1} {at_s}")
    record.prints("tokens_per_s_per_gpu", tokens_per_s)
    record.time(at_s)


def _begin(record: RunRecord, match: re.Match[str]) -> None:
    """`Training starts at step 1, with local batch size 1, global batch size 8, sequence length 8192, …`."""
    at_s = moment(match.string[: match.start()])
    record.restart()
    record.state["begin"] = f"{int(match[1])} {at_s}"
    record.state["head"] = "yes"
    record.time(at_s)
    _batch(record, match)
    sizes = (str(record.facts.get(name, "")) for name in ("global_batch_size", "seq_length"))
    record.starts_with(" ".join((record.state.get("grid", ""), *sizes)))


_BATCH = {
    "global batch size": "global_batch_size", "sequence length": "seq_length", "total steps": "num_steps_asked",
}  # fmt: skip


def _batch(record: RunRecord, match: re.Match[str]) -> None:
    """`… with local batch size 1, global batch size 8, …, sequence length 8192`."""
    if (local := re.search(r"local batch size (\d{1,9})", match.string)) is not None:
        record.state["local batch"] = local[1]
    for words, name in _BATCH.items():
        value = re.search(rf"{words} (\d{{1,12}})", match.string)
        if value is not None and int(value[1]) > 0:
            record.facts[name] = int(value[1])


def _validated(record: RunRecord, match: re.Match[str]) -> None:
    """The end of an evaluation, from which the next line's tokens and seconds are counted."""
    step, at_s = int(match[1]), moment(match.string[: match.start()])
    if record.numbers and step == record.numbers[-1]:
        record.activity("evaluation", record.ends[-1], at_s)
    record.mark("evaluation")
    record.state["begin"] = f"{step + 1} {at_s}"


def _gpu(record: RunRecord, match: re.Match[str]) -> None:
    record.facts["hardware"] = text_of(match[1])


def _saved(record: RunRecord, match: re.Match[str]) -> None:
    record.mark("checkpoint", number(match[1]))


def _collected(record: RunRecord, match: re.Match[str]) -> None:
    record.mark("gc", number(match[1]))


def _parameters(record: RunRecord, match: re.Match[str]) -> None:
    if count := whole(match[2]):
        record.facts["num_parameters"] = count
    record.facts.setdefault("model", text_of(match[1]))


def _grid(record: RunRecord, match: re.Match[str]) -> None:
    """`pp=2, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=2`, of which experts take none of their own."""
    sizes = dict(pair.split("=") for pair in match[1].strip(", ").split(", "))
    record.state["grid"] = match[1]
    record.facts["num_gpus"] = math.prod(int(size) for name, size in sizes.items() if not name.startswith("e"))


def _sizes(record: RunRecord, match: re.Match[str]) -> None:
    sizes = [int(size) for size in re.findall(r"\d{1,7}", match[1])]
    record.facts["num_gpus"] = math.prod(sizes)


ROWS: tuple[LineRow, ...] = (
    line_row("step", "step:", r"(?<!validate )step: *(\d{1,15}) +\S*loss\S*: .{0,400}?(?:tps|wps):", _step),
    line_row("begin", "Training starts at step", r"Training starts at step (\d{1,15})", _begin),
    line_row("batch", "Trainer is initialized", r"initialized with .{0,80}?global batch size", _batch),
    line_row("GPU", "capacity: ", r"\w+ capacity: (.{1,80}?)(?: *\(\d+\))? with [\d.]+GiB", _gpu),
    line_row("parameters", "size: ", r"Model (.{1,60}?) size: ([\d,]{1,20}) total parameters", _parameters),
    line_row("mesh", "device mesh", r"Building \d+-D device mesh with .{0,80}?, ?\[([\d, ]{1,80})\]", _sizes),
    line_row("garbage collection", "[GC]", r"\[GC\] .{0,60}?([\d.]{1,10}) seconds", _collected),
    line_row(
        "checkpoint", "Finished saving", r"Finished saving the checkpoint.{0,80}?in *([\d.]{1,12}) seconds", _saved
    ),
    line_row("checkpoint", "Saving ", r"Saving (?:the|a full) checkpoint", mark("checkpoint")),
    line_row("evaluation", "validate step:", r"validate step: *(\d{1,15}) ", _validated),
    line_row("grid", "parallelism: ", r"parallelism: ((?:\w+=\d{1,7}(?:, )?){2,12})", _grid),
    line_row("world", "world size", r"world size:? (\d{1,7})", fact("num_gpus")),
)


def _take_excerpt(record: RunRecord) -> None:
    """The one line of an excerpt: its tokens of a device and step are those of its local batch, or of its GPUs."""
    step, tokens_per_s, at_s = (float(word) for word in record.state["excerpt"].split())
    length, gpus = int(record.facts.get("seq_length", 0)), int(record.facts.get("num_gpus", 0))
    batch = int(record.facts.get("global_batch_size", 0))
    sequences = batch / gpus if batch and gpus else int(record.state.get("local batch", "0"))
    if not (sequences and length and tokens_per_s > 0):
        return
    if not gpus:
        record.note("seconds are of one local batch on a device: the GPUs of the job are not stated")
    record.note("the log is an excerpt without the line of its first step: seconds are from tokens per second")
    record.step(int(step), sequences * length / tokens_per_s, end_s=at_s, covers=int(step) - 1)


def _finish(record: RunRecord) -> None:
    """Sharpen short steps: their tokens are equal, so that tokens/s tell them apart where the clock does not."""
    if not record.numbers and "excerpt" in record.state:
        _take_excerpt(record)
    speeds = record.printed.get("tokens_per_s_per_gpu", ())
    if len(speeds) != len(record.seconds) or len(speeds) < _LEAST_TO_SHARPEN:
        return
    tokens = median(map(mul, record.seconds, speeds))
    usual = median(record.seconds)
    if usual * median(record.covers) >= _CLOCK_S / _SHARP_FRACTION:
        return
    for index, speed in enumerate(speeds):
        if abs(record.seconds[index] * speed / tokens - 1) < 2 * _CLOCK_S / usual:
            record.seconds[index] = tokens / speed


TORCHTITAN = Grammar("torchtitan", "torchtitan", ROWS, finish=_finish)
