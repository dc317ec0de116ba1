"""Formats whose lines need their clock or their neighbours: torchtitan, progress bars, ms-swift, Automodel, MLPerf.

torchtitan (2024's `wps` to 2026) says tokens per second of a device since the last line, and has milliseconds. A bar of
tqdm has whole seconds since its begin, and a rate of its last steps with three digits: a stretch of bars is known by
the rate where it is short, and by the clock where it is long. Of several bars in a log the training's is the one whose
steps the trainer announces, else the one that runs longest. MLPerf training is of 3.0 to 5.1
(mlcommons/training_results_v*).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from planner.errors import SpecError
from planner.observe.line_formats import (
    Grammar,
    N,
    fact,
    line_row,
    mark,
    moment,
    number,
    rank_of,
    take_beside,
    text_of,
    whole,
)
from planner.observe.record import MAX_NAMES, RunRecord
from planner.specs.reading import parse_json
from planner.specs.units import GIB, MIB, is_count

_TITAN_BESIDE = {
    "tokens_per_s_per_gpu": re.compile(r"(?:tps|wps): *([\d,.]{1,20})"),
    "tflops": re.compile(r"tflops: *([\d,.]{1,20})"),
    "mfu_percent": re.compile(r"mfu: *([\d.]{1,20})"),
}
_TITAN_MEMORY = re.compile(r"memory: *([\d.]{1,12})GiB\(([\d.]{1,6})%\)")


def _step(record: RunRecord, match: re.Match[str]) -> None:
    """A line of a step: tokens/s of a device since the last line, from whose time the seconds follow."""
    step, at_s, rank = int(match[1]), moment(match.string[: match.start()]), rank_of(record)
    found = {name: number(hit[1]) for name, pattern in _TITAN_BESIDE.items() if (hit := pattern.search(match.string))}
    tokens_per_s = found.get("tokens_per_s_per_gpu", math.nan)
    if (memory := _TITAN_MEMORY.search(match.string)) is not None:
        record.bytes_of(rank, step, max_reserved_bytes=number(memory[1]) * GIB)
    first, first_s = (float(word) for word in record.state.get("begin", "0 nan").split())
    if record.state.pop("head", None) and step > first == 1:
        # the line of its first step, which torchtitan prints, is not here: tokens/s are of the steps behind that one
        record.state |= {"excerpt": f"{step} {tokens_per_s} {at_s}", "begin": f"{step + 1} {at_s}"}
        return
    last_step, last_s = (record.numbers[-1], record.ends[-1]) if record.numbers else (0, math.nan)
    seconds, covers, goes_on = math.nan, 0, "restarted" not in record.state
    if step >= first and at_s > first_s and not (last_s >= first_s and goes_on):
        covers = step - int(first) + 1
        seconds = (at_s - first_s) / covers
    elif step > last_step and at_s > last_s and goes_on:
        seconds = (at_s - last_s) / (step - last_step)
    if not seconds > 0 and "tokens" in record.state:
        seconds = float(record.state["tokens"]) / tokens_per_s
    if not seconds > 0:  # the first line of a log without its head: only its end is known
        record.state.setdefault("begin", f"{step + 1} {at_s}")
        take_beside(record, found)
        record.time(at_s)
        return
    # the clock of the lines has milliseconds: a short step's seconds come from tokens/s once both are known
    record.state.setdefault("tokens", str(seconds * tokens_per_s))
    if record.step(step, seconds, end_s=at_s, covers=covers, rank=rank):
        take_beside(record, found)


def _begin(record: RunRecord, match: re.Match[str]) -> None:
    """`Training starts at step 1, with local batch size 1, global batch size 8, sequence length 8192, …`."""
    at_s = moment(match.string[: match.start()])
    record.restart()
    record.state |= {"begin": f"{int(match[1])} {at_s}", "head": "yes"}
    record.time(at_s)
    _batch(record, match)
    sizes = (str(record.facts.get(name, "")) for name in ("global_batch_size", "seq_length"))
    record.starts_with(" ".join((record.state.get("grid", ""), *sizes)))


def _batch(record: RunRecord, match: re.Match[str]) -> None:
    """`… with local batch size 1, global batch size 8, …, sequence length 8192`."""
    said = {words: hit[1] for words in ("local batch size", "global batch size", "sequence length", "total steps")
            if (hit := re.search(rf"{words} (\d{{1,12}})", match.string))}  # fmt: skip
    record.state["local batch"] = said.get("local batch size", "0")
    named = {
        "global_batch_size": "global batch size",
        "seq_length": "sequence length",
        "num_steps_asked": "total steps",
    }
    take_beside(record, {name: number(said.get(words)) for name, words in named.items()})


def _validated(record: RunRecord, match: re.Match[str]) -> None:
    """The end of an evaluation, from which the next line's tokens and seconds are counted."""
    step, at_s = int(match[1]), moment(match.string[: match.start()])
    if record.numbers and step == record.numbers[-1]:
        record.activity("evaluation", record.ends[-1], at_s)
    record.mark("evaluation")
    record.state["begin"] = f"{step + 1} {at_s}"


def _parameters(record: RunRecord, match: re.Match[str]) -> None:
    take_beside(record, {"num_parameters": number(match[2])})
    record.facts.setdefault("model", text_of(match[1]))


def _grid(record: RunRecord, match: re.Match[str]) -> None:
    """`pp=2, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=2`, of which experts take none of their own; or `[2, 4, 2]`."""
    record.state["grid"] = match[1]
    sizes = [int(size) for size in re.findall(r"(?:(?<!e)\b(?!e)\w+=)?(\d{1,7})", re.sub(r"\be\w+=\d+", "", match[1]))]
    record.facts["num_gpus"] = math.prod(sizes)


_TITAN_ROWS = (
    line_row("step:", r"(?<!validate )step: *(\d{1,15}) +\S*loss\S*: .{0,400}?(?:tps|wps):", _step),
    line_row("Training starts at step", r"Training starts at step (\d{1,15})", _begin),
    line_row("Trainer is initialized", r"initialized with .{0,80}?global batch size", _batch),
    line_row("capacity: ", r"\w+ capacity: (.{1,80}?)(?: *\(\d+\))? with [\d.]+GiB", fact("hardware", text_of)),
    line_row("size: ", r"Model (.{1,60}?) size: ([\d,]{1,20}) total parameters", _parameters),
    line_row("device mesh", r"Building \d+-D device mesh with .{0,80}?, ?\[([\d, ]{1,80})\]", _grid),
    line_row("[GC]", r"\[GC\] .{0,60}?([\d.]{1,10}) seconds", mark("gc")),
    line_row("Finished saving", r"Finished saving the checkpoint.{0,80}?in *([\d.]{1,12}) seconds", mark("checkpoint")),
    line_row("Saving ", r"Saving (?:the|a full) checkpoint", mark("checkpoint")),
    line_row("validate step:", r"validate step: *(\d{1,15}) ", _validated),
    line_row("parallelism: ", r"parallelism: ((?:\w+=\d{1,7}(?:, )?){2,12})", _grid),
    line_row("world size", r"world size:? (\d{1,7})", fact("num_gpus")),
)  # fmt: skip


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


def _finish_titan(record: RunRecord) -> None:
    if not record.numbers and "excerpt" in record.state:
        _take_excerpt(record)


LEAST_S, SHORT_S, SURE_S = 10.0, 5.0, 50.0
"""Seconds of a stretch of a bar, of one whose rate its clock confirms to the second, and of one whose step the clock
says to 2%, where the bar's own rate says it else."""
_MOST_BARS = 200_000
_NAMED = re.compile(r"[A-Za-z][\w -]{2,60}:?\s*$")
"""A description before a bar, of files that are loaded or sequences that are mapped."""
_TRAINS = re.compile(r"^\s*(?:(\d{1,9}\|\d{1,12}\|Loss: )|(?:train|training|steps?):)", re.IGNORECASE)
"""Descriptions of bars that train: torchtune's, ms-swift's."""


def _clock_s(text: str) -> float:
    """`1:02:03`, `12:34` or `2h 5m 59s` in seconds."""
    parts = re.findall(r"(\d{1,4})(?:([dhms])|(?=:|$))", text)
    units = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    if any(unit for _, unit in parts):
        return sum(int(value) * units.get(unit, 0.0) for value, unit in parts)
    return sum(int(value) * 60.0**place for place, (value, _) in enumerate(reversed(parts)))


def _bar(record: RunRecord, match: re.Match[str]) -> None:
    """` 45%|████▌     | 450/1000 [12:34<15:21,  1.68s/it]`; bars of one number of steps are of one bar."""
    before = match.string[: match.start()].rpartition("\x1b[A")[2]
    trains = _TRAINS.match(before)
    if len(record.means) >= _MOST_BARS or (trains is None and _NAMED.search(before)):
        return
    if trains is not None and trains[1]:
        record.facts["trainer"] = "torchtune"
    rate = number(match[4])
    step_s = rate if match[5] == "s/it" else 1 / rate if rate > 0 else math.nan
    record.means.append((float(match[1]), _clock_s(match[3]), float(match[2]), step_s))


def _counted(record: RunRecord, match: re.Match[str]) -> None:
    """modded-nanogpt's `step:10/1390 train_time:1425ms step_avg:142.50ms`, whose time leaves evaluations out."""
    if len(record.means) < _MOST_BARS:
        record.facts["trainer"] = "nanogpt"
        record.means.append((float(match[1]), number(match[3]) / 1e3, float(match[2]), math.inf))  # of milliseconds


def _elapsed(record: RunRecord, match: re.Match[str]) -> None:
    """A step, the last one, and the time since the begin, several on a line: ms-swift's lines, LLaMA-Factory's file."""
    for step, total, elapsed in match.re.findall(match.string):
        if len(record.means) < _MOST_BARS:
            record.means.append((float(step), _clock_s(elapsed), float(total) + 0.5, math.nan))


def _gibibytes(record: RunRecord, match: re.Match[str]) -> None:
    record.bytes_of(None, max_reserved_bytes=number(match[1]) * GIB)


def _liger(record: RunRecord, match: re.Match[str]) -> None:
    """Peaks of memory that callbacks add to a Trainer's line."""
    record.bytes_of(None, **{f"max_{match[1]}_bytes": number(match[2]) * MIB})


def _tune(record: RunRecord, match: re.Match[str]) -> None:
    """torchtune's `Step 10 | loss:1.2 lr:2e-05 tokens_per_second_per_gpu:512.3 peak_memory_reserved:20.1`, in GiB."""
    found = {name: number(value) for name, value in re.findall(r"(\w{1,40}): ?([\d.e+-]{1,20})", match.string)}
    named = {"max_allocated_bytes": "peak_memory_alloc", "max_reserved_bytes": "peak_memory_reserved"}
    memory = {ours: found.get(name, math.nan) * GIB for ours, name in named.items()}
    record.facts["trainer"] = "torchtune"
    take_beside(record, {"tokens_per_s_per_gpu": found.get("tokens_per_second_per_gpu", math.nan), **memory})


def _automodel(record: RunRecord, match: re.Match[str]) -> None:
    """`2026-08-10 15:48:59 | INFO | root | step 13 | … | mem 31.55 GiB | tps 6574.51(821.81/gpu) | …`."""
    at_s, speed, per_gpu = moment(match.string), number(match[3]), number(match[4])
    if math.isfinite(at_s) and len(record.means) < _MOST_BARS:
        record.facts["trainer"] = "automodel"
        record.means.append((float(match[1]), at_s, -1.0, math.nan))
    gpus = round(speed / per_gpu) if per_gpu > 0 else math.nan
    take_beside(record, {"num_gpus": gpus, "max_allocated_bytes": number(match[2]) * GIB})
    record.prints("tokens_per_s", speed)


def _finish_bars(record: RunRecord) -> None:
    bars: dict[float, list[tuple[float, float, float]]] = defaultdict(list)
    for step, elapsed_s, total, rate in record.means:
        bars[total].append((step, elapsed_s, rate))
    asked = float(record.facts.get("num_steps_asked", 0))
    longest = max(bars, key=lambda total: (total == asked, max(at for _, at, _ in bars[total])), default=None)
    if longest is not None:
        for step, seconds, covers, at_s in _of_bars(bars[longest]):
            record.step(step, seconds, covers=covers, end_s=at_s)
    if record.numbers and longest is not None:
        if longest > 0:
            record.facts.setdefault("num_steps_asked", int(longest))
        record.note("seconds are of stretches of a clock with whole seconds, or of a progress bar's own rate")
    else:
        _take_summary(record)


def _of_bars(bars: list[tuple[float, float, float]]) -> Iterator[tuple[int, float, int, float]]:
    """Last step, seconds of a step, number of steps and end of each stretch; a bar that falls back begins anew."""
    (first, first_s, _), rates = bars[0], list[float]()
    if len(bars) == 1 and first > 1 and first_s >= SURE_S and abs(first_s / first / bars[0][2] - 1) < 0.1:
        yield int(first), first_s / first, int(first), first_s  # the whole bar is one stretch, and its own rate agrees
    for step, at_s, rate in bars[1:]:
        rates.append(rate)
        if step < first or at_s < first_s:
            (first, first_s), rates = (step, at_s), []
        elif step > first and at_s - first_s >= SHORT_S:
            count, took_s = int(step - first), at_s - first_s
            by_rate_s = median([each for each in rates if math.isfinite(each)] or [math.nan])
            least_s = LEAST_S if abs(took_s - count * by_rate_s) > 1 else SHORT_S
            if took_s < (SURE_S if math.isnan(by_rate_s) else least_s):
                continue
            yield int(step), by_rate_s if took_s < SURE_S and by_rate_s > 0 else took_s / count, count, at_s
            (first, first_s), rates = (step, at_s), []


LEAST_STEPS = 5
"""Fewest steps of a run whose mean is that of a step: of fewer, the start is a large part."""
_RUNTIME = re.compile(r"train_runtime\W{1,20}?(\d[\d.:]{0,20})")
_PER_S = re.compile(r"train_steps_per_second\W{1,20}?([\d.]{1,20})")


def _summary(record: RunRecord, match: re.Match[str]) -> None:
    """`{'train_runtime': 512.3, …, 'train_steps_per_second': 0.195, …}`, or `train_runtime = 0:36:58.55` in a table."""
    for name, pattern in (("runtime", _RUNTIME), ("per_s", _PER_S)):
        if (hit := pattern.search(match.string)) is not None:
            text = hit[1]
            record.state[name] = str(_clock_s(text.partition(".")[0])) if ":" in text else text


def _take_summary(record: RunRecord) -> None:
    """The mean of a whole run, by its steps where they are known, else by a rate whose digits say it to 1%."""
    runtime_s, text = number(record.state.get("runtime")), record.state.get("per_s", "")
    per_s, steps = number(text), int(record.facts.get("num_steps_asked", 0))
    half_unit = 0.5 * 10.0 ** -len(text.partition(".")[2])
    if not steps and per_s > 0 and half_unit < 0.01 * per_s and runtime_s > 0:
        steps = round(runtime_s * per_s)
    if (
        runtime_s > 0
        and steps >= LEAST_STEPS
        and not (per_s > 0 and abs(steps / runtime_s - per_s) > 0.1 * per_s + half_unit)
    ):
        record.step(steps, runtime_s / steps, covers=steps)
        record.note("the step is the mean of the whole run, its start and its evaluations among it")


CLOCKED_GRAMMARS = (
    Grammar("torchtitan", "torchtitan", _TITAN_ROWS, finish=_finish_titan),
    Grammar(
        "progress bar",
        "hf",
        (
            line_row(
                "%|", r"\d{1,3}%\|[^|]{0,200}\| *(\d{1,12})/(\d{1,12}) \[([\d:]{4,12})<[^,\]]{1,20}, *"
                r"([\d.]{1,12})(s/it|it/s)", _bar,
            ),
            line_row(
                "train_time:", r"step:(\d{1,12})/(\d{1,12}) .{0,80}?train_time:(\d{1,15})ms step_avg", _counted
            ),
            line_row("total_peak_memory", rf"total_peak_memory_(allocated|reserved)_MB': {N}", _liger),
            line_row(
                "global_step/max_steps",
                r"'global_step/max_steps': '(\d{1,12})/(\d{1,12})'.{0,80}?'elapsed_time': '([\ddhms ]{2,20})'",
                _elapsed,
            ),
            line_row("memory(GiB)", r"'memory\(GiB\)': ([\d.]{1,12})", _gibibytes),
            line_row(
                "current_steps",
                r"\"current_steps\": (\d{1,12}), \"total_steps\": (\d{1,12}).{0,400}?"
                r"\"elapsed_time\": \"([\d:]{4,12})\"", _elapsed,
            ),
            line_row(
                "| tps ", rf"\| step (\d{{1,12}}) \| .{{0,200}}\| mem {N} GiB \| tps {N}\({N}/gpu\)", _automodel
            ),
            line_row("tokens_per_second_per_gpu", r"Step \d{1,12} \| loss", _tune),
            line_row("train_runtime", r"train_runtime", _summary),
            line_row("train_steps_per_second", r"train_steps_per_second", _summary),
            line_row("Total optimization steps", r"optimization steps = ([\d,]{1,15})", fact("num_steps_asked")),
            line_row("max_steps", r"\"max_steps\": (\d{1,12})", fact("num_steps_asked")),
            line_row("Total train batch size", r"train batch size .{0,80}= ([\d,]{1,15})", fact("global_batch_size")),
        ),
        rank=2,
        finish=_finish_bars,
    ),
)  # fmt: skip
"""As of torchtitan 2024 to 2026 (torchtitan/components/metrics.py, train.py), transformers 4.30 to 5 (trainer.py), tqdm
4.67, torchtune 0.6 (recipes/full_finetune_distributed.py), ms-swift 4 and NeMo Automodel 2026."""


_TIMES = ("train_step_time", "train_step_timing in s", "train_step_timing")
_FACTS: dict[str, tuple[str, Any]] = {
    "global_batch_size": ("global_batch_size", whole), "max_sequence_length": ("seq_length", whole),
    "lora_rank": ("lora_rank", whole), "submission_benchmark": ("model", text_of),
    "submission_platform": ("hardware", text_of),
}  # fmt: skip


def json_object(text: str) -> dict[str, Any]:
    """The object in a line; empty where there is none."""
    try:
        data = parse_json(text, "", keeps_last=True)
    except SpecError:
        return {}
    return data if isinstance(data, dict) else {}


def _value(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else number(str(value))


def _mllog(record: RunRecord, match: re.Match[str]) -> None:
    data = json_object(match[1])
    key, value, said = data.get("key"), data.get("value"), data.get("metadata")
    at_s, metadata = _value(data.get("time_ms")) / 1e3, said if isinstance(said, dict) else {}
    if not isinstance(key, str) or not math.isfinite(at_s):
        record.note("some lines of MLPerf's log are cut off and were left out")
        return
    kind, _, side = key.rpartition("_")
    if key == "init_start":
        record.facts["num_gpus"] = int(record.facts.get("num_gpus", 0)) + 1
        record.time(at_s)
    elif kind in ("eval", "run", "block") and side == "start":
        record.state[kind] = str(at_s)
        record.state["tokens of a block"] = str(metadata.get("epoch_count", record.state.get("tokens of a block", "")))
        if kind == "eval":
            # all of 3.1 to 5.1 count here what was trained until then; at a block's ends they count different things
            trained = _value(metadata.get("samples_count", metadata.get("epoch_num")))
            record.state["trained"] = f"{record.state.get('trained', '')} {trained:.0f}"
    elif side == "stop" and kind in record.state:
        record.activity({"eval": "evaluation"}.get(kind, kind), float(record.state.pop(kind)), at_s)
        if kind == "eval":
            record.mark("evaluation")
    elif key in _FACTS:
        name, convert = _FACTS[key]
        record.facts |= {name: known} if (known := convert(str(value))) else {}
    elif key == "tracked_stats" and isinstance(value, dict):
        _tracked(record, value, metadata, at_s)


def _tracked(record: RunRecord, value: dict[str, Any], metadata: dict[str, Any], at_s: float) -> None:
    """A step's seconds, or the mean of a block of steps, which is no step: counted, it makes totals 2 to 3% too high.

    A block says its throughput (5.0), or only the samples and no step (5.1). `step` counts tokens in 4.1, samples in
    5.0 and steps in 5.1, which has `samples_count` beside.
    """
    if (name := next((name for name in value if name.startswith("validation_step_tim")), None)) is not None:
        record.state.setdefault("eval", str(at_s - _value(value[name])))  # some runs print no eval_start
    if "max_memory_usage" in value:
        record.bytes_of(None, max_allocated_bytes=_value(value["max_memory_usage"]) * GIB)
    name, counted = next((name for name in value if name in _TIMES), None), _value(metadata.get("step"))
    if name is None or not math.isfinite(counted):
        return
    if "throughput" in value:
        if counted > 0 and len(record.means) < MAX_NAMES:
            record.means.append((counted, _value(value[name]), at_s))
        return
    if "samples_count" in metadata:
        counted += 1  # the first step is 0
    elif (batch := int(record.facts.get("global_batch_size", 0))) > 0:
        counted /= batch * (int(record.facts.get("seq_length", 1)) if name == _TIMES[1] else 1)
    record.step(round(counted), _value(value[name]), end_s=at_s, covers=1 if not record.numbers else 0)


def _finish_mlperf(record: RunRecord) -> None:
    """Take means of stretches where no step is recorded: those that are recorded, or the time between evaluations."""
    if not record.numbers:
        ends = _in_steps(record, [counted for counted, _, _ in record.means])
        before = 0
        for step, (_, seconds, at_s) in zip(ends, record.means, strict=False):
            if step > before:
                record.step(step, seconds, end_s=at_s, covers=step - before)
            before = step
        if record.numbers:
            record.note("no step is recorded: seconds are the means that the log has of stretches of steps")
    if not record.numbers:
        stretches = _stretches(record)
        ends = _ends_of_stretches(record, len(stretches))
        for before, step, (begin, end) in zip((0, *ends), ends, stretches, strict=False):
            if step > before:
                record.step(step, (end - begin) / (step - before), end_s=end, covers=step - before)
        if record.numbers:
            record.note("no step is recorded: seconds are means of the blocks between evaluations")
    if record.facts.get("num_gpus") in (0, 1):
        record.facts.pop("num_gpus")


def _stretches(record: RunRecord) -> list[tuple[float, float]]:
    """Begin and end of what was trained without a break: blocks, cut at the evaluations that are inside of them."""
    evaluations = sorted((begin, end) for kind, begin, end in record.activities if kind == "evaluation")
    found = []
    for begin, end in ((begin, end) for kind, begin, end in record.activities if kind == "block"):
        inside = [(start, stop) for start, stop in evaluations if begin < start and stop <= end]
        for start, stop in inside:  # what follows the last one is no whole stretch
            found.append((begin, start))
            begin = stop
        found += [] if inside else [(begin, end)]
    return sorted(found)


def _ends_of_stretches(record: RunRecord, count: int) -> list[int]:
    """The last step of each stretch; none where that is not stated."""
    per_step = int(record.facts.get("global_batch_size", 0)) * int(record.facts.get("seq_length", 0))
    tokens = number(record.state.get("tokens of a block"))
    if per_step and tokens >= per_step and tokens % per_step == 0:
        return [round(tokens / per_step) * block for block in range(1, count + 1)]
    trained = [float(text) for text in record.state.get("trained", "").split() if is_count(text)]
    return _in_steps(record, trained) if len(trained) == count else []


def _in_steps(record: RunRecord, counts: list[float]) -> list[int]:
    """Counts of tokens, else of samples, as steps; none where they are of no whole steps."""
    batch = int(record.facts.get("global_batch_size", 0))
    for per_step in (batch * int(record.facts.get("seq_length", 0)), batch):
        if per_step and counts and all(count % per_step == 0 for count in counts):
            return [round(count / per_step) for count in counts]
    return []


def _dllogger(record: RunRecord, match: re.Match[str]) -> None:
    line = json_object(match[1])
    data, step, at_s = line.get("data"), line.get("step"), _value(line.get("timestamp"))
    if not isinstance(data, dict):
        return
    if step == "PARAMETER":
        for name, value in list(data.items())[:MAX_NAMES]:
            if name.startswith("cfg/"):
                record.argument(name.removeprefix("cfg/"), json.dumps(value)[:4000])
        record.time(at_s)
        record.restart()
    elif isinstance(step, int) and _TIMES[1] in data:
        # the printed value is the mean of up to five last steps; the clock of the lines says each one
        seconds, last = _value(data[_TIMES[1]]), record.ends[-1] if record.ends else math.nan
        if record.numbers and step == record.numbers[-1] + 1 and at_s > last:
            seconds = at_s - last
            record.note("train_step_timing is a mean over the last steps: seconds are from the times of the lines")
        record.step(step, seconds, end_s=at_s, covers=1)


def _finish_dllogger(record: RunRecord) -> None:
    for name, field in (("global_batch_size", "global_batch_size"), ("encoder_seq_length", "seq_length")):
        if value := whole(record.arguments.get(name)):
            record.facts[field] = value


MLPERF = Grammar("mlperf", "nemo", (line_row(":::MLLOG", r":::MLLOG (\{.*)", _mllog),), rank=-1, finish=_finish_mlperf)
DLLOGGER = Grammar(
    "dllogger", "nemo", (line_row("DLLL {", r"DLLL (\{.*)", _dllogger),), rank=-1, finish=_finish_dllogger
)
