"""NeMo's progress lines, its DLLogger file, and MLPerf's log, whose Llama and GPT runs are NeMo's.

NeMo 1 and 2; MLPerf training 3.0 to 5.1 (mlcommons/training_results_v*).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from planner.errors import SpecError
from planner.observe.logs.grammar import Grammar, line_row, number, text_of, whole
from planner.observe.record import RunRecord
from planner.specs.reading import parse_json
from planner.specs.units import GIB, is_count

_TIMES = ("train_step_time", "train_step_timing in s", "train_step_timing")
_MEMORY = {
    "memory_allocated": "allocated_bytes", "peak_memory_usage": "max_allocated_bytes",
    "max_memory_allocated": "max_allocated_bytes", "max_memory_reserved": "max_reserved_bytes",
}  # fmt: skip
"""Words of NeMo 2's progress, in bytes."""
_LAST = re.compile(r"\bepoch 0, iteration \d{1,12}/(\d{1,12})\b")
"""The last step of the first epoch, which mostly is the last of the run."""
_MOST_ARGUMENTS = 2_000


def _object(text: str) -> dict[str, Any]:
    try:
        data = parse_json(text, "", keeps_last=True)
    except SpecError:
        return {}
    return data if isinstance(data, dict) else {}


def _value(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else number(str(value))


def _mllog(record: RunRecord, match: re.Match[str]) -> None:
    data = _object(match[1])
    key, value, metadata = data.get("key"), data.get("value"), data.get("metadata")
    at_s, metadata = _value(data.get("time_ms")) / 1e3, metadata if isinstance(metadata, dict) else {}
    if not isinstance(key, str) or not math.isfinite(at_s):
        record.note("some lines of MLPerf's log are cut off and were left out")
        return
    if key == "init_start":
        record.facts["num_gpus"] = int(record.facts.get("num_gpus", 0)) + 1
        record.time(at_s)
    elif key in ("eval_start", "run_start", "block_start"):
        record.state[key] = str(at_s)
        record.state["block"] = str(metadata.get("epoch_count", record.state.get("block", "")))
        if key == "eval_start":
            # all of 3.1 to 5.1 count here what was trained until then; at a block's ends they count different things
            trained = _value(metadata.get("samples_count", metadata.get("epoch_num")))
            record.state["trained"] = f"{record.state.get('trained', '')} {trained:.0f}"
    elif key == "block_stop" and "block_start" in record.state:
        record.activity("block", float(record.state.pop("block_start")), at_s)
    elif key == "eval_stop" and "eval_start" in record.state:
        record.activity("evaluation", float(record.state.pop("eval_start")), at_s)
        record.mark("evaluation")
    elif key == "run_stop" and "run_start" in record.state:
        record.activity("run", float(record.state["run_start"]), at_s)
    elif key in _MLPERF_FACTS:
        name, convert = _MLPERF_FACTS[key]
        fact = convert(str(value))
        if fact:
            record.facts[name] = fact
    elif key == "tracked_stats" and isinstance(value, dict):
        _tracked(record, value, metadata, at_s)


_MLPERF_FACTS: dict[str, Any] = {
    "global_batch_size": ("global_batch_size", whole),
    "max_sequence_length": ("seq_length", whole),
    "lora_rank": ("lora_rank", whole),
    "submission_benchmark": ("model", text_of),
    "submission_platform": ("hardware", text_of),
}


def _tracked(record: RunRecord, value: dict[str, Any], metadata: dict[str, Any], at_s: float) -> None:
    """A step's seconds, or the mean of a block of steps, which is no step: counted, it makes totals 2 to 3% too high.

    A block says its throughput (5.0), or only the samples and no step (5.1). `step` counts tokens in 4.1, samples in
    5.0 and steps in 5.1, which has `samples_count` beside.
    """
    if (name := next((name for name in value if name.startswith("validation_step_tim")), None)) is not None:
        # some runs print no eval_start
        record.state.setdefault("eval_start", str(at_s - _value(value[name])))
    if "max_memory_usage" in value:
        record.bytes_of(None, max_allocated_bytes=_value(value["max_memory_usage"]) * GIB)
    name = next((name for name in _TIMES if name in value), None)
    step = metadata.get("step")
    if name is None or step is None:
        return
    counted = _value(step)
    if "throughput" in value:
        if math.isfinite(counted) and counted > 0 and len(record.means) < _MOST_ARGUMENTS:
            record.means.append((counted, _value(value[name]), at_s))
        return
    if "samples_count" in metadata:
        counted += 1  # the first step is 0
    elif (batch := int(record.facts.get("global_batch_size", 0))) > 0:
        per_step = batch * (int(record.facts.get("seq_length", 1)) if name == _TIMES[1] else 1)
        counted /= per_step
    if math.isfinite(counted):
        record.step(round(counted), _value(value[name]), end_s=at_s, covers=1 if not record.numbers else 0)


def _finish_mlperf(record: RunRecord) -> None:
    if not record.numbers:
        _means_as_steps(record)
    if not record.numbers:
        _blocks_as_steps(record)
    if record.facts.get("num_gpus", 0) in (0, 1):
        record.facts.pop("num_gpus", None)
    record.facts.pop("trainer", None)


def _means_as_steps(record: RunRecord) -> None:
    """Take the recorded means of stretches of steps, in place of steps, where it is known how many each is of."""
    ends = _in_steps(record, [counted for counted, _, _ in record.means])
    before = 0
    for number_, (_, seconds, at_s) in zip(ends, record.means, strict=False):
        if number_ > before:
            record.step(number_, seconds, end_s=at_s, covers=number_ - before)
        before = number_
    if record.numbers:
        record.note("no step is recorded: seconds are the means that the log has of stretches of steps")


def _blocks_as_steps(record: RunRecord) -> None:
    """Take the means of the stretches between evaluations, whose tokens or samples are stated, in place of steps."""
    stretches = _stretches(record)
    ends = _ends_of_stretches(record, len(stretches))
    if not ends:
        return
    record.note("no step is recorded: seconds are means of the blocks between evaluations")
    for before, number_, (begin, end) in zip((0, *ends), ends, stretches, strict=False):
        if number_ > before:
            record.step(number_, (end - begin) / (number_ - before), end_s=end, covers=number_ - before)


def _stretches(record: RunRecord) -> list[tuple[float, float]]:
    """Begin and end of what was trained without a break: blocks, cut at the evaluations that are inside of them."""
    evaluations = sorted((begin, end) for kind, begin, end in record.activities if kind == "evaluation")
    found = []
    for kind, begin, end in record.activities:
        if kind != "block":
            continue
        inside = [(start, stop) for start, stop in evaluations if begin < start and stop <= end]
        if not inside:
            found.append((begin, end))
        for start, stop in inside:  # what follows the last one is no whole stretch
            found.append((begin, start))
            begin = stop
    return sorted(found)


def _ends_of_stretches(record: RunRecord, count: int) -> list[int]:
    """The last step of each stretch; none where that is not stated."""
    batch = int(record.facts.get("global_batch_size", 0))
    per_step, tokens = batch * int(record.facts.get("seq_length", 0)), number(record.state.get("block"))
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


MLPERF = Grammar(
    "mlperf",
    "nemo",
    (line_row("record", ":::MLLOG", r":::MLLOG (\{.*)", _mllog),),
    rank=-1,
    finish=_finish_mlperf,
)


def _dllogger(record: RunRecord, match: re.Match[str]) -> None:
    line = _object(match[1])
    data, step = line.get("data"), line.get("step")
    if not isinstance(data, dict):
        return
    at_s = _value(line.get("timestamp"))
    if step == "PARAMETER":
        for name, value in list(data.items())[:_MOST_ARGUMENTS]:
            if name.startswith("cfg/"):
                record.argument(name.removeprefix("cfg/"), json.dumps(value)[:4000])
        record.time(at_s)
        record.restart()
        return
    if not isinstance(step, int) or _TIMES[1] not in data:
        return
    # the printed value is the mean of up to five last steps; the clock of the lines says each one
    seconds, last = _value(data[_TIMES[1]]), record.ends[-1] if record.ends else math.nan
    if record.numbers and step == record.numbers[-1] + 1 and at_s > last:
        seconds = at_s - last
        record.note("train_step_timing is a mean over the last steps: seconds are from the times of the lines")
    record.step(step, seconds, end_s=at_s, covers=1)


def _finish_dllogger(record: RunRecord) -> None:
    for name, fact in (("global_batch_size", "global_batch_size"), ("encoder_seq_length", "seq_length")):
        value = whole(record.arguments.get(name))
        if value:
            record.facts[fact] = value


DLLOGGER = Grammar(
    "dllogger", "nemo", (line_row("record", "DLLL {", r"DLLL (\{.*)", _dllogger),), rank=-1, finish=_finish_dllogger
)


def _progress(record: RunRecord, match: re.Match[str]) -> None:
    text = match.string
    step = re.search(r"global_step[:=] ?([\d.]{1,20})", text)
    batch = re.search(r"global_batch_size[:=] ?(\d{1,12})", text)
    flops = re.search(r"TFLOPS_per_GPU[:=] ?([\d.]{1,20})", text)
    count = (record.numbers[-1] if record.numbers else -1) + 1
    if record.step(int(number(step[1])) if step else count, number(match[1])):
        if (last := _LAST.search(text)) is not None:
            record.facts["num_steps_asked"] = int(last[1])
        record.prints("tflops", number(flops[1]) if flops else None)
        for words, size in re.findall(r"\b([a-z_]{1,30})[:=] ?(\d{5,15})\b", text):
            if words in _MEMORY:
                record.bytes_of(None, **{_MEMORY[words]: number(size)})
        if batch and int(batch[1]) > 0:
            record.facts["global_batch_size"] = int(batch[1])


NEMO = Grammar(
    "nemo",
    "nemo",
    (line_row("step", "train_step_timing in s", r"train_step_timing in s[:=] ?([\d.eE+-]{1,30})", _progress),),
)
