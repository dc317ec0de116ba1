"""The formats of logs: the table `log_formats.yaml`, and what its rows do that a pattern and a unit do not say.

torchtitan (2024's `wps` to 2026) says tokens per second of a device since the last line, and has milliseconds. A bar of
tqdm has whole seconds since its begin, and a rate of its last steps with three digits: a stretch of bars is known by
the rate where it is short, and by the clock where it is long. Of several bars in a log the training's is the one whose
steps the trainer announces, else the one that runs longest.
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, cast

from planner.observe import trainer_lines
from planner.observe.observation import FailedAllocation, HungCollective
from planner.observe.record import (
    MOST_ERRORS,
    UNITS,
    FoundLine,
    RunRecord,
    Take,
    number,
    whole,
)
from planner.specs.base import Fields, Said, Texts, grouped


def out_of_memory(record: RunRecord, line: FoundLine) -> None:
    """`CUDA out of memory. Tried to allocate 2.00 GiB. … 70.1 GiB is allocated by PyTorch, and 5.3 GiB …`"""
    record.counts["num_ooms"] += 1
    found = {name: round(value) for name, value in line.numbers.items() if math.isfinite(value)}
    if (reserved := found.pop("reserved", None)) is not None and "allocated_bytes" in found:
        found.setdefault("unused_bytes", max(0, reserved - found["allocated_bytes"]))
    if len(record.failed_allocations) < MOST_ERRORS and "requested_bytes" in found:
        record.failed_allocations.append(FailedAllocation.model_validate({"rank": line.rank, **found}))


def hung(record: RunRecord, line: FoundLine) -> None:
    """`[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, …) ran for …`;
    ranks that print `detected by watchdog at work: 1580` or `watchdog got stuck for 480 seconds` say no kind."""
    found = {name: value for name, value in line.numbers.items() if math.isfinite(value)}
    kind = re.search(r"OpType=(\w{1,60})", line.match.string)
    one = HungCollective.model_validate({"sequence": 0, "collective": kind[1].lower() if kind else "", **found})
    known = {(each.rank, each.sequence) for each in record.hung_collectives}
    if len(known) < MOST_ERRORS and (one.rank, one.sequence) not in known:
        record.hung_collectives.append(one)


def not_a_number(record: RunRecord, line: FoundLine) -> None:
    """A line whose loss or norm of gradients is no number; the step is the one that the lines before it have."""
    step = record.numbers[-1] if record.numbers else int(record.means[-1][0]) if record.means else 0
    count, first, _ = record.not_numbers or (0, step, step)
    record.not_numbers = (count + 1, first, step)


def micro_steps(record: RunRecord, line: FoundLine) -> None:
    """A line of a micro-batch, of which a step has as many as the line's own counts or the configuration say.

    LitGPT's last one of a step has the optimizer's in it, which the others have not.
    """
    micro, step = line.numbers["micro"], line.numbers.get("step")
    count = max(1.0, micro / step if step else number(record.state.get("micro_batches", "1")))
    if count > 1:
        record.note(f"its lines time micro-batches: a step is {count:g} of them")
    last, other = line.numbers["s"], number(record.state.get("micro_ms", "")) / 1000
    others = (count - 1) * (other if other > 0 else last)
    _take_step(record, line, step=micro // count, s=last + others, micro=math.nan)


def _suffixed(text: str) -> tuple[float, float]:
    """`1.2K` as 1200, and half a unit of its last digit: 50."""
    digits = text.rstrip("KMGBT")
    size = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}.get(text[len(digits) :], 1.0)
    return number(digits) * size, 0.5 * 10.0 ** -len(digits.partition(".")[2]) * size


def verl(record: RunRecord, line: FoundLine) -> None:
    """`step:1 - … timing_s/gen:698.88 - timing_s/step:1268.49 - perf/throughput:524.5`: minutes, without a warm-up."""
    record.state["first is alike"] = "yes"
    tokens, seconds = (line.numbers.get(name, math.nan) for name in ("tokens_of_step", "s"))
    _take_step(record, line, tokens_per_s=tokens / seconds if seconds > 0 else math.nan, tokens_of_step=math.nan)


def finish_maxtext(record: RunRecord) -> None:
    """Leave out the first steps, of which some return before they have run, and others wait for them."""
    usual = median(record.seconds) if len(record.seconds) > 2 else 0.0
    early = [row for row, seconds in enumerate(record.seconds) if seconds < 0.5 * usual]
    if early and early[-1] <= len(record.seconds) // 2:
        record.only_from(early[-1] + 1)
        record.note(f"{early[-1] + 1} first steps were dispatched without waiting for them, and are left out")


def deepspeed(record: RunRecord, line: FoundLine) -> None:
    """`0/40, RunningAvgSamplesPerSec=…, CurrSamplesPerSec=…`: samples of the whole job in a second.

    Before 0.7.7 the count is one of micro-batches, since then `global_step` is one of steps.
    """
    found = dict(line.numbers)
    count = int(line.match[1] or line.match[2])
    accumulated = whole(record.state.get("accumulated")) if line.match[1] else 1
    step = count // (accumulated or 1)
    at_s = record.moment(line.match.string)
    running = found.pop("running", None)
    current = found.pop("current", None)
    record.bytes_of(None, step, **found)
    record.prints("samples_per_s", running if current is None else current)
    batch = record.facts.get("global_batch_size")
    if current and batch:
        record.step(step, int(batch) / current, end_s=at_s, rank=line.rank)
    elif record.clocked_step(count / (accumulated or 1), at_s, rank=line.rank):
        record.note("the batch is not stated: seconds of steps are from the times of the lines")
        if accumulated is None:
            record.note("its lines count micro-batches: a step is taken to be one, as no line says how many it has")


def finish_breakdown(record: RunRecord) -> None:
    """Take steps from the timers of wall_clock_breakdown where no other line has their seconds."""
    for parts in (("fwd", "bwd", "step"), ("forward", "backward", "step")):
        if not record.numbers and record.timers.keys() >= {*parts}:
            record.note("seconds of steps are its timers' of passes and optimizer: what is between them is not counted")
            record.state["weak"] = "yes"  # beside another trainer's own seconds
            for row, each in enumerate(zip(*(record.timers[name][0] for name in parts), strict=False), 1):
                record.step(row, sum(each))


def titan_step(record: RunRecord, line: FoundLine) -> None:
    """A line of a step: tokens/s of a device since the last line, from whose time the seconds follow."""
    found = dict(line.numbers)
    step = int(line.match[1])
    at_s = line.at_s
    tokens_per_s = found.get("tokens_per_s_per_gpu", math.nan)
    record.bytes_of(line.rank, step, max_reserved_bytes=found.pop("max_reserved_bytes", None))
    before = record.anchor
    said_s = float(record.state["tokens"]) / tokens_per_s if tokens_per_s and "tokens" in record.state else math.nan
    if step > 1 and before[0] == 0:
        # the line of its first step, which torchtitan prints, is not here: tokens/s are of the steps behind that one
        record.anchor = (step, at_s)
        record.take(found)
    elif record.clocked_step(step, at_s, said_s, line.rank) or math.isnan(before[1]):
        record.take(found)
        # the clock of the lines has milliseconds: a short step's seconds come from tokens/s once both are known
        if record.numbers:
            record.state.setdefault("tokens", str(record.seconds[-1] * tokens_per_s))
    record.time(at_s)


def titan_begin(record: RunRecord, line: FoundLine) -> None:
    """`Training starts at step 1, with local batch size 1, global batch size 8, sequence length 8192, …`."""
    record.restart()
    record.anchor = (int(line.match[1]) - 1, line.at_s)
    record.time(line.at_s)
    record.take(line.numbers)
    sizes = (str(record.facts.get(name, "")) for name in ("global_batch_size", "seq_length"))
    record.starts_with(" ".join((record.state.get("grid", ""), *sizes)))


def titan_validated(record: RunRecord, line: FoundLine) -> None:
    """The end of an evaluation, from which the next line's tokens and seconds are counted."""
    step = int(line.match[1])
    if record.numbers and step == record.numbers[-1]:
        record.activity("evaluation", record.ends[-1], line.at_s)
    record.mark("evaluation")
    record.anchor = (step, line.at_s)


def titan_grid(record: RunRecord, line: FoundLine) -> None:
    """`pp=2, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=2`, of which experts take none of their own; or `[2, 4, 2]`."""
    sizes = record.state["grid"] = line.match[1]
    without_experts = re.sub(r"\be\w+=\d+", "", sizes)
    record.facts["num_gpus"] = math.prod(map(int, re.findall(r"(?:(?<!e)\b(?!e)\w+=)?(\d{1,7})", without_experts)))


def finish_titan(record: RunRecord) -> None:
    """The one line of an excerpt: its tokens of a device and step are those of its local batch, or of its GPUs."""
    step, at_s = record.anchor
    tokens_per_s = record.middle("tokens_per_s_per_gpu")
    length, gpus, batch = (int(record.facts.get(name, 0)) for name in ("seq_length", "num_gpus", "global_batch_size"))
    sequences = batch / gpus if batch and gpus else record.middle("local_batch")
    if record.numbers or not (sequences and length and tokens_per_s and step > 1):
        return
    if not gpus:
        record.note("seconds are of one local batch on a device: the GPUs of the job are not stated")
    record.note("the log is an excerpt without the line of its first step: seconds are from tokens per second")
    record.step(int(step), sequences * length / tokens_per_s, end_s=at_s, covers=int(step) - 1)


LEAST_S, SHORT_S, SURE_S = 10.0, 5.0, 50.0
"""Seconds of a stretch of a bar, of one whose rate its clock confirms to the second, and of one whose step the clock
says to 2%, where the bar's own rate says it else."""
_MOST_BARS = 200_000
_NAMED = re.compile(r"[A-Za-z][\w -]{2,60}:?\s*$")
"""A description before a bar, of files that are loaded or sequences that are mapped."""
_TRAINS = re.compile(
    r"(?!.*(?:val|eval|test|sanity))\s*(?:(\d{1,9})\|\d{1,12}\|Loss: "
    r"|.{0,60}\bepoch[ :=\[#]{0,3}(\d{1,6})(?![\d.])[^{}]{0,200}$"
    r"|(?:train(?:ing)?(?: progress)?|steps?|iter(?:ation)?s?):)",
    re.IGNORECASE,
)
"""Descriptions of bars that train: torchtune's and others of an epoch, ms-swift's."""


def _progress(record: RunRecord, step: float, elapsed_s: float, total: float, step_s: float = math.nan) -> None:
    """Keep a step, the seconds until it, the last step, and what the line itself says of a step's seconds."""
    if len(record.means) < _MOST_BARS:
        record.means.append((step, elapsed_s, total, step_s))


def _clock_s(text: str) -> float:
    """`1:02:03`, `12:34`, `4 days, 7:19:52` or `2h 5m 59s` in seconds."""
    parts = re.findall(r"(\d{1,4})(?: ?([dhms])|(?=:|$))", text)
    units = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(int(value) * units.get(unit, 60.0**place) for place, (value, unit) in enumerate(reversed(parts)))


def bar(record: RunRecord, line: FoundLine) -> None:
    """` 45%|████▌     | 450/1000 [12:34<15:21,  1.68s/it]`, or several; bars of one number of steps are one."""
    text, end = line.match.string, 0
    if named := [trainer for word, trainer in trainer_lines.TABLE["bars"].items() if word in text]:
        record.facts["trainer"] = named[0]
    for found in line.match.re.finditer(text):
        before, end = text[end : found.start()], found.end()
        trains = _TRAINS.match(before)
        if trains is None and "consumed_samples=" not in text and _NAMED.search(before):
            continue
        each = number(found["rate"])
        step_s = each if found["unit"] == "s/it" else 1 / each if each > 0 else math.nan
        at, total = (_suffixed(found[name].upper())[0] for name in ("at", "total"))
        if epoch := trains and (trains[1] or trains[2]):
            at += total * max(0, int(epoch) - int(record.state.setdefault("epoch", epoch)))
            if trains and trains[2]:
                record.note("its bars are of epochs: a step is taken to be one of their counts")
        _progress(record, at, _clock_s(found["elapsed"]), total, step_s)


def counted(record: RunRecord, line: FoundLine) -> None:
    """modded-nanogpt's `step:10/1390 train_time:1425ms step_avg:142.50ms`, whose time leaves evaluations out."""
    step, total, elapsed_ms = map(float, line.match.groups())
    _progress(record, step, elapsed_ms / 1e3, total, math.inf)  # of milliseconds


def elapsed(record: RunRecord, line: FoundLine) -> None:
    """A step, the last one, and the time since the begin, several on a line: ms-swift's lines, LLaMA-Factory's file."""
    for step, total, elapsed in line.match.re.findall(line.match.string):
        _progress(record, float(step), _clock_s(elapsed), float(total) + 0.5)


def clocked(record: RunRecord, line: FoundLine) -> None:
    """A line of a step without its seconds: its clock says them, one of whole seconds over `LEAST_S` of them."""
    numbers = dict(line.numbers)
    step, at_s = numbers.pop("step"), record.moment(line.match.string)
    if at_s % 1 or not 0 <= at_s - record.anchor[1] < LEAST_S:
        record.clocked_step(step, at_s, rank=line.rank)
        record.note("seconds of steps are from the times of the lines")
    record.take(numbers)


def finish_bars(record: RunRecord) -> None:
    if record.means:
        _take_longest(record)
    if not record.numbers:
        _take_summary(record)


def _take_longest(record: RunRecord) -> None:
    """Take the steps of the bar of the asked number of steps, else of the one that runs longest."""
    bars = grouped((total, (step, elapsed_s, rate)) for step, elapsed_s, total, rate in record.means)
    asked = record.facts.get("num_steps_asked")
    longest = max(bars, key=lambda total: (total == asked, max(at for _, at, _ in bars[total])))
    each = _unsmoothed(bars[longest])
    stretches = each or [*_of_bars(bars[longest], longest)]
    if not stretches:
        return
    if stretches[-1][0] <= longest:  # else it is that of an epoch
        record.facts.setdefault("num_steps_asked", int(longest))
    for step, seconds, covers, at_s in stretches:
        record.step(step, seconds, covers=covers, end_s=at_s)
    record.marks = {bisect(record.numbers, record.means[at - 1][0]): kinds for at, kinds in record.marks.items()}
    if each:
        record.note("seconds are those of which a progress bar shows the smoothed rate")
    elif not any(math.isinf(rate) for _, _, rate in bars[longest]):
        record.note("seconds are of stretches of a clock with whole seconds, or of a progress bar's own rate")


SMOOTHING = 0.3
"""Weight of the newest update in the rate that a bar shows (tqdm 4.67, std.py: smoothing)."""
SETTLED = 15
"""Steps after which less than 1% of what a bar shows is left of the first one."""


Stretch = tuple[int, float, int, float]
"""Last step, seconds of a step, number of steps and end of a stretch of a bar."""


def _unsmoothed(bars: list[tuple[float, float, float]]) -> list[Stretch]:
    """As `_of_bars`, for less than `SURE_S` of a bar that shows every step, from the first on or late in a run.

    What it says at step n is (Σ w · (1 − w)^(n − i) · seconds_i) / (1 − (1 − w)^n), which gives back the seconds. None
    where their sum is not the clock's.
    """
    shown, kept = dict[int, tuple[float, float]](), 1 - SMOOTHING
    for step, at_s, rate in bars:
        shown.setdefault(int(step), (at_s, rate))  # the end of a bar shows the mean of all steps
    first, begun_s, mean_s = min(shown), 0.0, 0.0
    if list(shown) != list(range(first, first + len(shown))) or 1 < first <= SETTLED:
        return []
    if first > 1:
        begun_s, mean_s = shown.pop(first)
    found = list[Stretch]()
    for step, (at_s, rate) in shown.items():
        before_s, mean_s = mean_s, rate * (1 - kept**step)
        found.append((step, (mean_s - kept * before_s) / SMOOTHING, 1, at_s))
    took_s, told_s = found[-1][-1] - begun_s if found else 0.0, sum(one[1] for one in found)
    is_told = len(found) >= LEAST_STEPS and took_s < SURE_S and all(one[1] > 0 for one in found)
    return found if is_told and abs(told_s - took_s) < 1 + 0.05 * took_s else []


def _of_bars(bars: list[tuple[float, float, float]], total: float) -> Iterator[Stretch]:
    """The stretches of a bar; one whose clock falls back, or of another epoch, begins anew, and what is behind the one
    before is another rank's, or printed again."""
    (first, first_s, rate), rates, begun_s = bars[0], list[float](), 0.0
    alone = first > 1 and first_s >= SURE_S and all((step - first) % total == 0 for step, _, _ in bars)
    if alone and abs(first_s / first - rate) < 0.1 * rate:
        yield int(first), first_s / first, int(first), first_s  # the whole bar is one stretch, and its own rate agrees
    for step, at_s, rate in bars[1:]:
        rates.append(rate)
        if at_s < 0.5 * first_s or (step - 1) // total > max(0, first - 1) // total:
            begun_s = math.nan  # when it was begun anew is not known
            (first, first_s), rates = (step, at_s), []
        elif step > first and at_s - first_s >= SHORT_S:
            count, took_s = int(step - first), at_s - first_s
            said_s = median([each for each in rates if math.isfinite(each)] or [math.nan])
            agrees = abs(took_s - count * said_s) <= 1  # else the rate still lags behind its clock
            least_s = SURE_S if math.isnan(said_s) and math.inf not in rates else SHORT_S if agrees else LEAST_S
            if took_s < least_s:
                continue
            yield int(step), said_s if took_s < SURE_S and agrees else took_s / count, count, begun_s + at_s
            (first, first_s), rates = (step, at_s), []


LEAST_STEPS = 5
"""Fewest steps of a run whose mean is that of a step: of fewer, the start is a large part."""


def _take_summary(record: RunRecord) -> None:
    """The mean of a whole run (`'train_runtime': 512.3`, or `0:36:58.55`), by its steps where they are known, else by a
    rate whose digits say it to 1%."""
    text, runtime = record.state.get("per_s", ""), record.state.get("runtime", "")
    runtime_s = _clock_s(runtime.partition(".")[0]) if ":" in runtime else number(runtime)
    per_s = number(text)
    steps = int(record.facts.get("num_steps_asked", 0))
    half_unit = 0.5 * 10.0 ** -len(text.partition(".")[2])
    if not steps and per_s > 0 and half_unit < 0.01 * per_s and runtime_s > 0:
        steps = round(runtime_s * per_s)
    disagree = per_s > 0 and abs(steps / runtime_s - per_s) > 0.1 * per_s + half_unit if runtime_s > 0 else True
    if steps >= LEAST_STEPS and not disagree:
        record.step(steps, runtime_s / steps, covers=steps)
        record.note("the step is the mean of the whole run, its start and its evaluations among it")


def _function(name: str) -> Any:
    """The function that a row names, here or among those of Megatron's and MLPerf's lines."""
    return globals().get(name) or getattr(trainer_lines, name)


def _compiled(text: str) -> re.Pattern[str]:
    for short, pattern in trainer_lines.TABLE["short"].items():
        text = text.replace(short, pattern)
    return re.compile(text)


@dataclass(frozen=True, slots=True)
class LineRow:
    """One kind of line: text that every such line holds, a pattern, and what is done with it."""

    holds: str
    pattern: re.Pattern[str]
    take: Take
    beside: tuple[tuple[str, re.Pattern[str], str], ...]
    """Quantities that stand beside it, with their units."""

    @classmethod
    def of(cls, holds: str, pattern: str, beside: Said | None = None, trainer: str = "",
           **way: Any) -> LineRow:  # fmt: skip
        """A row of the table."""
        told = {name: (said, "") if isinstance(said, str) else said for name, said in (beside or {}).items()}
        compiled = _compiled(pattern)
        take = _taker({*compiled.groupindex, *told}, **way)
        rows = tuple((name, _compiled(text), unit) for name, (text, unit) in told.items())
        return cls(holds, compiled, partial(_as_trainer, trainer, take) if trainer else take, rows)

    def found(self, match: re.Match[str], rank: int | None) -> FoundLine:
        """The line that the pattern was found in."""
        numbers = {name: number(text) for name, text in match.groupdict().items()}
        for name, pattern, unit in self.beside:
            if (hit := pattern.search(match.string)) is not None:
                text = hit[hit.lastindex or 0]
                if unit.startswith("short"):
                    value, half_unit = _suffixed(text)
                    numbers |= {"precision_fraction": half_unit / value} if name == "s" and value else {}
                    numbers[name] = value * UNITS[unit.removeprefix("short").strip()]
                else:
                    size = UNITS.get(text.rpartition(" ")[2] if unit == "size" else unit)
                    numbers[name] = number(text) * size if size else _clock_s(text)
        return FoundLine(match, numbers, rank)


def _taker(names: set[str], take: str = "", mark: str = "", fact: str = "", keep: str = "", counts: str = "",
           timers: Texts = (), note: str = "") -> Take:  # fmt: skip
    """The function of a row: the one of these words that it has says it, else its numbers do."""
    if timers:
        return partial(_timers, re.compile(timers[0]), UNITS[timers[1]], note)
    if mark:
        return lambda record, line: record.mark(mark, number(line.match[1]) if line.match.re.groups else math.nan)
    if counts:  # a number is a rank's own count since the begin
        return partial(_count, counts)
    if fact:
        return lambda record, line: record.fact(fact, line.match[1])
    if keep:
        return lambda record, line: record.state.update({keep: " ".join(filter(None, line.match.groups()))})
    if take:
        return cast(Take, _function(take))
    return _take_step if names & {"s", "per_s"} else lambda record, line: record.take(line.numbers)


def _timers(each: re.Pattern[str], size: float, note: str, record: RunRecord, line: FoundLine) -> None:
    """Timers by name, of a line that has several."""
    for found in each.findall(line.match.string):
        trainer_lines.timed(record, size, *found)
    if note:
        record.note(note)


def _count(name: str, record: RunRecord, line: FoundLine) -> None:
    """`9 CUDA memory allocation retries.`, counted from the begin by each rank; without a number, one more."""
    counted = record.counts[name]
    record.counts[name] = max(counted, int(number(line.match[1]))) if line.match.re.groups else counted + 1


def _as_trainer(trainer: str, take: Take, record: RunRecord, line: FoundLine) -> None:
    record.facts["trainer"] = trainer
    take(record, line)


def _take_step(record: RunRecord, line: FoundLine, **changed: float) -> None:
    numbers = {**line.numbers, **changed}
    data_s = numbers.pop("data", None)
    seconds = numbers.pop("s", math.nan) + (data_s or 0.0)
    if (per_s := numbers.pop("per_s", 0.0)) > 0:
        seconds = 1 / per_s
    if (interval_s := numbers.pop("interval_s", 0.0)) > 0:  # known to more digits than the rate
        seconds = interval_s / max(1, round(interval_s * per_s))
    counted = float(record.numbers[-1] + 1 if record.numbers else 1)
    step = numbers.pop("step", number(record.state["step"]) if "step" in record.state else counted)
    consumed = numbers.pop("consumed", math.nan)
    if math.isfinite(step) and record.step(int(step), seconds, end_s=record.moment(line.before), rank=line.rank):
        record.take(numbers, line.rank)
        if consumed > 0:  # by as many steps and the one that is numbered 0
            record.facts.setdefault("global_batch_size", round(consumed / (step + 1)))
    if data_s is not None:
        record.timer("data_loading", data_s)


@dataclass(frozen=True, slots=True)
class Grammar:
    """The lines of one trainer."""

    name: str
    trainer: str
    rows: tuple[LineRow, ...]
    rank: int = 0
    """The grammar with the lowest counts if several read equally many steps of a file."""
    finish: Callable[[RunRecord], None] = lambda record: None

    @classmethod
    def of(cls, rows: list[Fields], finish: str = "", note: str = "", **names: Any) -> Grammar:
        """A format of the table."""
        way = _function(finish) if finish else lambda record: record.note(note) if note else None
        return cls(**names, rows=tuple(LineRow.of(**row) for row in rows), finish=way)


GRAMMARS = tuple(Grammar.of(**row) for row in trainer_lines.TABLE["formats"])
"""Every format of lines."""
COMMON_ROWS = tuple(LineRow.of(**row) for row in trainer_lines.TABLE["common"])
"""Lines that torch prints in every trainer's log."""
LOOKS_LIKE: list[tuple[str, str, str]] = trainer_lines.TABLE["looks_like"]
"""Other files that people have: a pattern of a line, what such a file is, and what is missing or to do."""

COLUMNS: Fields = trainer_lines.TABLE["columns"]
"""Columns of tables of steps: patterns of their names, and the sizes of units that end them."""


def trainer_of(grammar: str) -> str:
    """The trainer whose lines a format has; empty for a table."""
    return next((known.trainer for known in GRAMMARS if known.name == grammar), "")
