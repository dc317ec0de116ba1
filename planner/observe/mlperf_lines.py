"""MLPerf training's log (mlcommons/training_results_v3.0 to v5.1), and NeMo's dllogger, whose lines are JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from planner.errors import SpecError
from planner.observe.record import MAX_NAMES, FoundLine, RunRecord, number, text_of, whole
from planner.specs.base import Fields
from planner.specs.reading import parse_json
from planner.specs.units import GIB, is_count

_TIMES = ("train_step_time", "train_step_timing in s", "train_step_timing")
_FACTS: dict[str, tuple[str, Any]] = {
    "global_batch_size": ("global_batch_size", whole), "max_sequence_length": ("seq_length", whole),
    "lora_rank": ("lora_rank", whole), "submission_benchmark": ("model", text_of),
    "submission_platform": ("hardware", text_of),
}  # fmt: skip


def json_object(text: str) -> Fields:
    """The object in a line; empty where there is none."""
    try:
        data = parse_json(text, "", keeps_last=True)
    except SpecError:
        return {}
    return data if isinstance(data, dict) else {}


def _value(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else number(str(value))


def _mllog(record: RunRecord, line: FoundLine) -> None:
    data = json_object(line.match[1])
    key = data.get("key")
    value = data.get("value")
    said = data.get("metadata")
    at_s = _value(data.get("time_ms")) / 1e3
    metadata = said if isinstance(said, dict) else {}
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


def _tracked(record: RunRecord, value: Fields, metadata: Fields, at_s: float) -> None:
    """A step's seconds, or the mean of a block of steps, which is no step: counted, it makes totals 2 to 3% too high.

    A block says its throughput (5.0), or only the samples and no step (5.1). `step` counts tokens in 4.1, samples in
    5.0 and steps in 5.1, which has `samples_count` beside.
    """
    if (name := next((name for name in value if name.startswith("validation_step_tim")), None)) is not None:
        record.state.setdefault("eval", str(at_s - _value(value[name])))  # some runs print no eval_start
    if "max_memory_usage" in value:
        record.bytes_of(None, max_allocated_bytes=_value(value["max_memory_usage"]) * GIB)
    name = next((name for name in value if name in _TIMES), None)
    counted = _value(metadata.get("step"))
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


def _dllogger(record: RunRecord, line: FoundLine) -> None:
    said = json_object(line.match[1])
    data = said.get("data")
    step = said.get("step")
    at_s = _value(said.get("timestamp"))
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
        seconds = _value(data[_TIMES[1]])
        last = record.ends[-1] if record.ends else math.nan
        if record.numbers and step == record.numbers[-1] + 1 and at_s > last:
            seconds = at_s - last
            record.note("train_step_timing is a mean over the last steps: seconds are from the times of the lines")
        record.step(step, seconds, end_s=at_s, covers=1)


def _finish_dllogger(record: RunRecord) -> None:
    for name, field in (("global_batch_size", "global_batch_size"), ("encoder_seq_length", "seq_length")):
        if value := whole(record.arguments.get(name)):
            record.facts[field] = value


TAKES = {"mllog": _mllog, "dllogger": _dllogger}
FINISHES = {"mlperf": _finish_mlperf, "dllogger": _finish_dllogger}
