"""The formats of logs: a table of the lines that each trainer prints, with the words that every such line holds.

A row that has a step and its seconds in one line is data alone (`step_row`): a pattern with the groups `step`, `last`
and one of `s`, `ms` and `per_s`, and patterns of what stands beside them. Other rows have a function.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from statistics import median

from planner.observe.observation import FailedAllocation, HungCollective
from planner.observe.record import MOST_ERRORS, RunRecord
from planner.specs.units import GIB

Take = Callable[[RunRecord, re.Match[str]], None]
_ISO = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_AMERICAN = re.compile(r"(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)")
_FLOAT = re.compile(r"[-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?")
N = r"([\d.,eE+-]{1,30})"
"""A number in a pattern."""
MOST = 2**53
"""More of anything is no count: the first whole number that a float cannot tell from the next."""
FACTS = ("num_gpus", "global_batch_size", "seq_length", "num_steps_asked", "num_parameters")
"""Numbers of a line that are facts of the job."""


@dataclass(frozen=True, slots=True)
class LineRow:
    """One kind of line."""

    needle: str
    """Text that every such line holds, for a search that is cheap."""
    pattern: re.Pattern[str]
    """Searched for in the line, after colours and the launcher's words were taken off."""
    take: Take


@dataclass(frozen=True, slots=True)
class Grammar:
    """The lines of one trainer."""

    name: str
    trainer: str
    rows: tuple[LineRow, ...]
    rank: int = 0
    """The grammar with the lowest counts if several read equally many steps of a file."""
    finish: Callable[[RunRecord], None] = field(default=lambda record: None)
    """Works out what only the whole file says."""


def line_row(needle: str, pattern: str, take: Take) -> LineRow:
    """A row with its pattern compiled."""
    return LineRow(needle, re.compile(pattern), take)


def step_row(needle: str, pattern: str, beside: Mapping[str, tuple[str, float]] | None = None) -> LineRow:
    """A row of steps; `beside` are quantities with their patterns and units: facts, bytes, and what is printed."""
    fields = tuple((name, re.compile(text), unit) for name, (text, unit) in (beside or {}).items())
    return line_row(needle, pattern.replace("<N>", N[1:-1]), partial(_take_step, fields))


def _take_step(fields: tuple[tuple[str, re.Pattern[str], float], ...], record: RunRecord, match: re.Match[str]) -> None:
    found, text = match.groupdict(), match.string
    beside = {name: number(hit[1]) * unit for name, pattern, unit in fields if (hit := pattern.search(text))}
    seconds = number(found["s"]) if "s" in found else math.nan
    if "ms" in found:
        seconds = number(found["ms"]) / 1e3
    elif (per_s := number(found.get("per_s"))) > 0:
        seconds = 1 / per_s
    count = float(record.numbers[-1] + 1 if record.numbers else 1)
    step = number(found.get("step") or record.state.get("step")) if "step" in {*found, *record.state} else count
    step = beside.pop("step", step)
    rank = rank_of(record)
    at_s = moment(text[: match.start()])
    if math.isfinite(step) and record.step(int(step), seconds, end_s=at_s, rank=rank):
        if (last := whole(found.get("last"))) is not None:
            record.facts["num_steps_asked"] = last
        take_beside(record, beside, rank)


def take_beside(record: RunRecord, beside: Mapping[str, float], rank: int | None = None) -> None:
    """Take numbers by their names: facts of the job, bytes of a rank, and what the trainer works out itself."""
    for name, value in beside.items():
        if name in FACTS and 1 <= value < MOST:
            record.facts[name] = int(value)
        elif name not in FACTS and not name.endswith("_bytes"):
            record.prints(name, value)
    record.bytes_of(rank, **{name: value for name, value in beside.items() if name.endswith("_bytes")})


def number(text: str | None) -> float:
    """The number at the begin of a text, commas of thousands left out; not a number where there is none."""
    match = _FLOAT.match(text.strip().removeprefix("np.float64(").replace(",", "")) if text else None
    return float(match[0]) if match else math.nan


def suffixed(text: str) -> tuple[float, float]:
    """`1.2K` as 1200, and half a unit of its last digit: 50."""
    match = _FLOAT.match(text.strip())
    if match is None:
        return math.nan, math.nan
    size = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}.get(text.strip()[match.end() :][:1].upper(), 1.0)
    return float(match[0]) * size, 0.5 * 10.0 ** -len(match[0].partition(".")[2]) * size


def whole(text: str | None) -> int | None:
    """The whole number in a text; None where there is none, or one that no file of a trainer has."""
    value = number(text)
    return int(value) if math.isfinite(value) and value == int(value) and 0 <= value < MOST else None


def moment(text: str) -> float:
    """The first date and time in a text as seconds since 1970, taken as UTC; not a number where there is none."""
    parts: list[str]
    if (match := _ISO.search(text)) is not None:
        *parts, fraction = match.groups()
    elif (match := _AMERICAN.search(text)) is not None:
        month, day, year, *clock = match.groups()
        parts, fraction = [year, month, day, *clock], None
    else:
        return math.nan
    try:
        year_, month_, day_, hour, minute, second = map(int, parts)
        at_s = datetime(year_, month_, day_, hour, minute, second, tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return math.nan
    return at_s + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)


def fields(text: str, separator: str = "|") -> dict[str, str]:
    """`a: 1 | b: 2` as a mapping; of equal names the first counts."""
    found: dict[str, str] = {}
    for part in text.split(separator):
        name, colon, value = part.rpartition(": ") if ": " in part else part.rpartition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def rank_of(record: RunRecord) -> int | None:
    """The rank that the launcher names before the line."""
    return None if (rank := record.state.get("rank")) is None else int(rank)


def mark(kind: str) -> Take:
    """A row that only says that something happened between steps, and perhaps its seconds."""
    return lambda record, match: record.mark(kind, number(match[1]) if match.re.groups else math.nan)


def fact(name: str, convert: Callable[[str], str | int | None] = whole) -> Take:
    """A row whose first group is a fact of the job."""

    def take(record: RunRecord, match: re.Match[str]) -> None:
        if value := convert(match[1]):
            record.facts[name] = value

    return take


def kept(name: str) -> Take:
    """A row whose groups the next lines are about."""
    return lambda record, match: record.state.update({name: " ".join(filter(None, match.groups()))})


def text_of(value: str) -> str:
    """A name from a log: printable, and not long."""
    return "".join(letter for letter in value.strip() if letter.isprintable())[:120]


def _at_least(name: str) -> Take:
    """torchtitan's `9 CUDA memory allocation retries.`, counted from the begin by each rank."""
    return lambda record, match: record.counts.update({name: max(0, int(number(match[1])) - record.counts[name])})


_SIZE = r"([\d.]{1,12}) ([KMG]iB)"
_OUT_OF_MEMORY = {
    "allocated": re.compile(rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated"),
    "unused": re.compile(rf"{_SIZE} is reserved by PyTorch but"),
    "reserved": re.compile(rf"{_SIZE} reserved in total"),
    "total": re.compile(rf"total capacity of {_SIZE}|{_SIZE} total capacity"),
}
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _bytes(match: re.Match[str] | None) -> int | None:
    if match is None:
        return None
    amount, unit = (word for word in match.groups() if word)
    return round(number(amount) * _UNITS[unit])


def _oom(record: RunRecord, match: re.Match[str]) -> None:
    """`CUDA out of memory. Tried to allocate 2.00 GiB. … 70.1 GiB is allocated by PyTorch, and 5.3 GiB …`"""
    record.counts["num_ooms"] += 1
    found = {name: _bytes(pattern.search(match.string)) for name, pattern in _OUT_OF_MEMORY.items()}
    unused = found["unused"]
    if unused is None and found["reserved"] is not None and found["allocated"] is not None:
        unused = max(0, found["reserved"] - found["allocated"])
    if len(record.failed_allocations) < MOST_ERRORS:
        record.failed_allocations.append(
            FailedAllocation(
                rank=rank_of(record), requested_bytes=_bytes(match) or 0, allocated_bytes=found["allocated"],
                unused_bytes=unused, total_bytes=found["total"],
            )
        )  # fmt: skip


def _hung(record: RunRecord, match: re.Match[str]) -> None:
    """`[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, …) ran for …`"""
    said = dict(re.findall(r"(\w{1,40})=([\w\[\]]{1,60})", match[2]))
    ran = re.search(r"ran for (\d{1,12}) milliseconds", match.string)
    _add_hung(
        record, int(match[1]), whole(said.get("SeqNum")) or 0, said.get("OpType", "").lower(),
        whole(said.get("NumelIn")), None if ran is None else int(ran[1]) / 1e3,
    )  # fmt: skip


def _hung_work(record: RunRecord, match: re.Match[str]) -> None:
    """`[PG 1 Rank 3] Exception … detected by watchdog at work: 1580, …`, which other ranks print without its kind."""
    rank, sequence = int(match[1]), int(match[2])
    if not any((one.rank, one.sequence) == (rank, sequence) for one in record.hung_collectives):
        _add_hung(record, rank, sequence)


def _add_hung(
    record: RunRecord, rank: int, sequence: int, kind: str = "", size: int | None = None, seconds: float | None = None
) -> None:
    if len(record.hung_collectives) < MOST_ERRORS:
        record.hung_collectives.append(
            HungCollective(rank=rank, sequence=sequence, collective=kind, num_elements=size, seconds=seconds)
        )


COMMON_ROWS = (
    line_row("allocation retries", r"\b(\d{1,12}) [A-Z]+ memory allocation retries", _at_least("num_alloc_retries")),
    line_row("OOM errors thrown", r"\b(\d{1,12}) [A-Z]+ OOM errors thrown", _at_least("num_ooms")),
    line_row("failed with OOM", r"memory allocation failed with OOM on device",
             lambda record, match: record.counts.update({"num_alloc_retries": 1})),
    line_row("out of memory. Tried", rf"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate {_SIZE}", _oom),
    line_row("Watchdog caught", r"Rank (\d{1,7})\] Watchdog caught collective operation timeout: \w+\((.{0,400})",
             _hung),
    line_row("by watchdog at work", r"Rank (\d{1,7})\] Exception.{0,80}by watchdog at work: (\d{1,15})", _hung_work),
)  # fmt: skip
"""As of torchtitan 2026 (torchtitan/components/metrics.py) and PyTorch 1.13 to 2.13 (ProcessGroupNCCL.cpp)."""


def _nanotron(record: RunRecord, match: re.Match[str]) -> None:
    """Numbers with three digits and a suffix, so that a step is known to 0.5%."""
    found = {name: suffixed(value) for name, value in fields(match[3]).items()}
    times = (found[name] for name in ("elapsed_time_per_iteration_ms", "time_per_iteration_ms") if name in found)
    milliseconds, half_unit = next(times, (math.nan, 0.0))
    if not record.step(int(match[1]), milliseconds / 1e3, end_s=moment(match.string[: match.start()])):
        return
    named = {
        "tokens_per_sec": "tokens_per_s", "model_tflops_per_gpu": "tflops", "global_batch_size": "global_batch_size",
        "cuda_max_memory_reserved": "max_reserved_bytes", "cuda_memory_allocated": "allocated_bytes",
    }  # fmt: skip
    beside = {ours: found[name][0] for name, ours in named.items() if name in found}
    take_beside(record, {**beside, "num_steps_asked": number(match[2]), "precision_fraction": half_unit / milliseconds})


def _verl(record: RunRecord, match: re.Match[str]) -> None:
    """`step:1 - … timing_s/gen:698.88 - timing_s/step:1268.49 - perf/throughput:524.5`: minutes, without a warm-up."""
    found = {name: number(value) for name, value in fields(match.string[match.start() :], " - ").items()}
    seconds = found.get("timing_s/step") or found.get("perf/time_per_step") or math.nan
    record.state["first is alike"] = "yes"
    if not record.step(int(match[1]), seconds):
        return
    speed, reserved = found.get("perf/throughput", math.nan), found.get("perf/max_memory_reserved_gb", math.nan)
    allocated = found.get("perf/max_memory_allocated_gb", found.get("actor/perf/max_memory_allocated_gb", math.nan))
    gpus = found.get("perf/total_num_tokens", math.nan) / seconds / speed
    known = gpus > 0.5 and abs(gpus - round(gpus)) < 0.01 * gpus
    memory = {"max_allocated_bytes": allocated * GIB, "max_reserved_bytes": reserved * GIB}
    take_beside(record, {"tokens_per_s_per_gpu": speed, "num_gpus": round(gpus) if known else math.nan, **memory})
    for name, value in found.items():
        if name.startswith("timing_s/") and name.count("/") == 1 and name != "timing_s/step":
            record.timer(name.removeprefix("timing_s/"), value)


def _finish_maxtext(record: RunRecord) -> None:
    """Leave out the first steps, of which some return before they have run, and others wait for them."""
    usual = median(record.seconds) if len(record.seconds) > 2 else 0.0
    early = [row for row, seconds in enumerate(record.seconds) if seconds < 0.5 * usual]
    if early and early[-1] <= len(record.seconds) // 2:
        record.only_from(early[-1] + 1)
        record.note(f"{early[-1] + 1} first steps were dispatched without waiting for them, and are left out")


_SAMPLES = {
    "current": re.compile(r"CurrSamplesPerSec=([\d.eE+-]{1,30})"),
    "running": re.compile(r"SamplesPerSec=([\d.eE+-]{1,30})"),
    "max_allocated_bytes": re.compile(r"MaxMemAllocated=([\d.]{1,12}) ?GB"),
    "allocated_bytes": re.compile(r"\bMemAllocated=([\d.]{1,12}) ?GB"),
}


def _deepspeed(record: RunRecord, match: re.Match[str]) -> None:
    """`0/40, RunningAvgSamplesPerSec=…, CurrSamplesPerSec=…`: samples of the whole job in a second."""
    step, at_s, rank = int(match[1] or match[2]), moment(match.string), rank_of(record)
    found = {name: number(hit[1]) for name, pattern in _SAMPLES.items() if (hit := pattern.search(match.string))}
    record.bytes_of(None, step, **{name: value * GIB for name, value in found.items() if name.endswith("_bytes")})
    record.prints("samples_per_s", found.get("current", found.get("running")))
    batch, last = record.facts.get("global_batch_size"), record.state.get("last")
    if found.get("current", 0.0) > 0 and batch:
        record.step(step, int(batch) / found["current"], end_s=at_s, rank=rank)
    elif "current" not in found and last is not None:
        first, first_s = map(float, last.split())
        if at_s > first_s and step > first:
            record.note("the batch is not stated: seconds of steps are from the times of the lines")
            covers = step - int(first)
            record.step(step, (at_s - first_s) / covers, end_s=at_s, covers=covers, rank=rank)
    if math.isfinite(at_s):
        record.state["last"] = f"{step} {at_s}"


def _breakdown(record: RunRecord, match: re.Match[str]) -> None:
    for name, value in re.findall(r"([A-Za-z_0-9]{1,60}): ([\d.]{1,20})", match[1]):
        record.timer(name, number(value) / 1e3)
    record.note("wall_clock_breakdown synchronises the GPUs: steps are slower than without it")


def _configured(record: RunRecord, match: re.Match[str]) -> None:
    record.argument(match[1], match[2].strip())
    name = {"train_batch_size": "global_batch_size", "world_size": "num_gpus"}.get(match[1])
    if name is not None and (value := whole(match[2])):
        record.facts[name] = value


def _usage(record: RunRecord, match: re.Match[str]) -> None:
    """`MA 1.75 GB         Max_MA 2.6 GB         CA 3.1 GB         Max_CA 3 GB`, in gigabytes of 1024³ bytes.

    What was reserved at most is rounded to a whole one; what is reserved now is not, and hardly ever shrinks.
    """
    kinds = ("allocated_bytes", "max_allocated_bytes", "max_reserved_bytes")
    record.bytes_of(None, **{kind: number(text) * GIB for kind, text in zip(kinds, match.groups(), strict=True)})


_DEEPSPEED_ROWS = (
    line_row("Max_MA", r"\bMA ([\d.]{1,12}) GB\s+Max_MA ([\d.]{1,12}) GB\s+CA ([\d.]{1,12}) GB\s+Max_CA", _usage),
    line_row("SamplesPerSec=", r"(?:\b\d{1,9}/(\d{1,12})|global_step=(\d{1,12})),? .{0,40}?SamplesPerSec=", _deepspeed),
    step_row("iter time (s)", r"steps: (?P<step>\d{1,12}) loss: .{1,40} iter time \(s\): (?P<s><N>)",
             {"samples_per_s": (rf"samples/sec: {N}", 1.0)}),
    line_row("time (ms) |", r"time \(ms\) \| (\w+: .*)", _breakdown),
    line_row(":print]", r":print\] +(\w{1,80}) \.{2,80} (.{0,2000})$", _configured),
    line_row("dp_world_size", r"world_size=(\d{1,7})", fact("num_gpus")),
    line_row("Saving model checkpoint", r"Saving model checkpoint", mark("checkpoint")),
)  # fmt: skip
"""Its throughput timer, its wall_clock_breakdown and its pipeline's lines, before and after 0.7.7."""
_NEMO_BESIDE = {
    "step": (r"global_step[:=] ?([\d.]{1,20})", 1.0),
    "global_batch_size": (r"global_batch_size[:=] ?(\d{1,12})", 1.0),
    "num_steps_asked": (r"\bepoch 0, iteration \d{1,12}/(\d{1,12})\b", 1.0),
    "tflops": (r"TFLOPS_per_GPU[:=] ?([\d.]{1,20})", 1.0),
    "allocated_bytes": (r"\bmemory_allocated[:=] ?(\d{5,15})\b", 1.0),
    "max_allocated_bytes": (r"(?:peak_memory_usage|max_memory_allocated)[:=] ?(\d{5,15})\b", 1.0),
    "max_reserved_bytes": (r"max_memory_reserved[:=] ?(\d{5,15})\b", 1.0),
}
"""Numbers that NeMo's progress says beside a step; the last step of the first epoch is that of the run."""

ONE_LINE_GRAMMARS = (
    Grammar("deepspeed", "deepspeed", _DEEPSPEED_ROWS, rank=1),
    Grammar("nanotron", "nanotron", (
        line_row("time_per_iteration_ms", r"iteration: (\d{1,15}) / (\d{1,15}) \| (.*per_iteration_ms.*)", _nanotron),
        line_row("Saving checkpoint", r"Saving checkpoint at", mark("checkpoint")),
        line_row("Saving weights", r"Saving weights", mark("checkpoint")))),
    Grammar("maxtext", "maxtext", (
        step_row("completed step: ", r"completed step: (?P<step>\d{1,15}), seconds: (?P<s><N>)", {
            "tflops": (rf"TFLOP/s/device: {N}", 1.0), "tokens_per_s_per_gpu": (rf"Tokens/s/device: {N}", 1.0)}),),
        finish=_finish_maxtext),
    Grammar("verl", "verl", (line_row("timing_s/step:", r"\bstep:(\d{1,12}) - ", _verl),)),
    Grammar("nemo", "nemo", (
        step_row("train_step_timing in s", r"train_step_timing in s[:=] ?(?P<s><N>)", _NEMO_BESIDE),)),
    Grammar("nemo-rl", "nemo", (
        line_row("== Step ", r"={3,} Step (\d{1,12})/\d{1,12} ={3,}", kept("step")),
        step_row("Total step time: ", r"Total step time: (?P<s><N>) ?s"))),
    Grammar("nanogpt", "nanogpt", (
        step_row("time ", r"\biter (?P<step>\d{1,12}): loss \S{1,20}, time (?P<ms><N>)ms", {
            "mfu_percent": (rf"mfu {N}%", 1.0)}),)),
    Grammar("llm.c", "llm.c", (
        step_row(" ms |", r"\bstep +(?P<step>\d{1,12})/(?P<last>\d{1,12}) \|.{5,200}?\| (?P<ms><N>) ms \|", {
            "mfu_percent": (rf"\| {N}% \S{{2,6}} MFU", 1.0), "tokens_per_s": (rf"{N} tok/s", 1.0)}),)),
    Grammar("composer", "composer", (
        line_row("[batch=", r"\[batch=(\d{1,12})/\d{1,12}\]", kept("step")),
        step_row("batches_per_sec: ", r"throughput/batches_per_sec: (?P<per_s><N>)"))),
    Grammar("olmo", "olmo", (
        line_row("[step=", r"\[step=(\d{1,12})[/,\]]", kept("step")),
        step_row("throughput/device/", r"/device/(?:batches_per_second|BPS(?: \(actual avg\))?)=(?P<per_s><N>)"))),
    # scripts/new adds a format here
)  # fmt: skip
"""As of DeepSpeed 0.17, nanotron 2024 to 2026 (src/nanotron/trainer.py), MaxText 2026 (metric_logger.py), verl 2025
(verl/trainer/ppo/metric_utils.py), NeMo 1 and 2, NeMo RL 0.4, nanoGPT's train.py, llm.c's train_gpt2.cu, Composer 0.2x,
OLMo and OLMo-core."""
