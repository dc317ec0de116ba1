"""An observation of what a record holds: steps, timers, memory, and the wall time divided.

Every row of steps ends at its line's time and began as many seconds earlier as it covers. What lies between two rows is
what the log says happened there, and idle where it says nothing; what two records both claim is counted as overlap.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median, mode

import numpy as np

from planner.observe.observation import (
    JobFacts,
    MemorySeries,
    Observation,
    ObservedMemory,
    Outlier,
    RankSpread,
    Restart,
    SourceFile,
    StepSeries,
    Timer,
    Wall,
)
from planner.observe.record import MOST, FallBack, RunRecord
from planner.observe.steady import steady
from planner.observe.trainer_lines import TABLE, facts_of
from planner.specs.base import Fields, Named, Texts
from planner.specs.expressions import texts_of
from planner.specs.reading import shipped_table
from planner.specs.units import is_count

_MOST_OVER_FRACTION = 0.03
"""Terms may add up to this much more than a step, and are then scaled: the most of each is of another rank."""
_PARTS_OF_FORWARD_BACKWARD = ("forward_s", "backward_s")


def breakdown_of(record: RunRecord, step_s: float) -> dict[str, float]:
    """The seconds of a step by its timers, and what they leave."""
    found = {}
    for term, names in TABLE["timer_terms"].items():
        if highs := next(filter(None, (_highs(record, name) for name in names)), None):
            found[term] = median(highs)
    if "forward_backward_s" in found:
        for part in _PARTS_OF_FORWARD_BACKWARD:
            found.pop(part, None)
    for inner, (term, outer) in TABLE["timers_inside"].items():
        if (
            inner in record.timers
            and not record.timers.keys() & set(TABLE["timers_beside"])
            and found.get(outer, 0.0) > found.get(term, 0.0)
        ):
            found[outer] -= found.get(term, 0.0)
    total = sum(found.values())
    if step_s < total <= step_s * (1 + _MOST_OVER_FRACTION):
        found = {term: seconds * step_s / total for term, seconds in found.items()}
        total = step_s
    # timers inside each other, or of micro-batches, are no parts of a step
    return {**found, "unattributed_s": step_s - total} if total <= step_s else {"unattributed_s": step_s}


def _highs(record: RunRecord, name: str) -> Sequence[float]:
    """The most that a timer shows over the ranks, in seconds, for each time it was printed; nothing if it never ran."""
    highs = record.timers.get(name, ((), ()))[1]
    return highs if any(highs) else ()


def timers_of(record: RunRecord) -> Iterator[Timer]:
    for name, (lows, highs) in record.timers.items():
        if len(lows) and name not in TABLE["timers_of_set_up"]:
            yield Timer(name=name, min_s=median(lows), max_s=median(highs), num_values=len(lows))


def data_s(record: RunRecord) -> float | None:
    """Mean seconds in a step of waiting for a batch, on the rank that waits longest, behind the first row of steps."""
    known = (_highs(record, name)[record.early[name] * (len(record.numbers) > 1) :] for name in TABLE["data_timers"])
    values = next(filter(None, known), None)
    return math.fsum(values) / len(values) if values else None


_WALL_KINDS = ("evaluation", "checkpoint")
_COARSE_S, _FINE_S = 1.0, 0.002
"""Times of whole seconds are cut, not rounded, so that two of them are off by up to one."""


def wall_of(record: RunRecord) -> Wall | None:
    """The wall time, divided; None where the lines have no times."""
    ends = np.frombuffer(record.ends, dtype=float)
    if not len(ends) or not np.isfinite(ends).all():
        return None
    lengths = np.frombuffer(record.seconds, dtype=float) * np.asarray(record.covers, dtype=float)
    slack_s = _COARSE_S if np.all(ends == np.floor(ends)) else _FINE_S
    first_s = min(record.first_s, float((ends - lengths)[0]))
    items = dict.fromkeys(("steps", "down", "idle", "overlap", *_WALL_KINDS), 0.0)
    restarts = {back.row for back in record.backs}
    timed = [(begin, end - begin, -1, kind) for kind, begin, end in record.activities if kind in _WALL_KINDS]
    rows = [(end - length, length, row, "steps") for row, (end, length) in enumerate(zip(ends, lengths, strict=True))]
    has_times = {kind for _, _, _, kind in timed}
    cursor = rows[0][0]
    startup_s = cursor - first_s
    for begin, length, row, kind in sorted([*rows, *timed]):
        if row == 0 and not items["steps"]:
            cursor = begin
        items[kind] += length
        gap = begin - cursor
        if abs(gap) <= slack_s:
            cursor += length
            continue
        if gap > 0:
            _share(items, gap, record, row, row in restarts, has_times)
        else:
            items["overlap"] += cursor + length - max(cursor, begin + length)
        cursor = max(cursor, begin + length)
    last_s = max(record.last_s, cursor)
    items["idle"] += last_s - cursor
    return Wall(
        wall_s=last_s - first_s,
        startup_s=startup_s,
        **{f"{name}_s": value for name, value in items.items()},
    )


def _share(items: dict[str, float], gap: float, record: RunRecord, row: int, restarts: bool, timed: set[str]) -> None:
    """Give a gap to what happened in it: as much as each is said to have taken, all of it to one that says nothing."""
    if restarts:
        items["down"] += gap
        return
    for kind, said_s in sorted(record.marks.get(row, {}).items(), reverse=True):
        if kind in _WALL_KINDS and kind not in timed:
            taken = min(gap, said_s)  # all of it where that is no number
            items[kind] += taken
            gap -= taken
    items["idle"] += gap


MOST_SHOWN = 4_000
"""The most rows of steps in an answer; of more, every n-th."""
LEAST_OF_RUN = 5
"""Fewest lines that tell a run from another, or one of two kinds of steps."""
MOST_APART = 0.1
"""Share by which what one log says of its step in two ways may differ."""
LEAST_APART, LEAST_OF_WHOLE_S = 5, 20.0
"""Fewest lines whose times say a step; times of whole seconds say one of fewer only in their sum."""
COUNTS = ("num_alloc_retries", "num_ooms", "num_host_ooms")


def _beside_steps(record: RunRecord) -> Fields:
    """The fields of an observation that need no step."""
    return {
        "timers": tuple(timers_of(record)),
        "memory": tuple(
            ObservedMemory(rank=rank, **kinds)
            for rank, kinds in sorted(record.memory.items(), key=lambda pair: -1 if pair[0] is None else pair[0])
        ),
        "memory_series": tuple(memory_series(record)),
        "failed_allocations": tuple(record.failed_allocations),
        "hung_collectives": tuple(record.hung_collectives),
        "not_numbers": record.not_numbers,
        "rank_spreads": tuple(_spreads(record)),
        "data_s": data_s(record),
        "watts_per_gpu": record.middle("watts_per_gpu"),
        "clock_mhz": record.middle("clock_mhz"),
        **{name: record.counts[name] for name in COUNTS if name in record.counts},
        "printed_tflops_per_gpu": record.middle("tflops"),
        "printed_mfu": None if (mfu := record.middle("mfu_percent")) is None else mfu / 100,
        **_peak(record),
    }


SAID = {"gpus": "num_gpus", "seq_length": "seq_length", "global_batch_size": "global_batch_size"}
"""Options that say what a log may leave out, and the facts that they are."""


def described(record: RunRecord, trainer: str, sources: tuple[SourceFile, ...], said: Fields) -> Observation:
    """The observation of a record, whose statistics are robust; `said` options tell tokens where no line does."""
    _fit_covers(record)
    gpus = (record.middle("tokens_per_s") or math.nan) / (record.middle("tokens_per_s_per_gpu") or math.nan)
    if 0.5 < gpus < MOST and abs(gpus - round(gpus)) < 0.01 * gpus:
        record.facts.setdefault("num_gpus", round(gpus))
    facts = facts_of(record, trainer)
    _last_run(record)
    notes = list(record.notes)
    if not record.numbers:
        notes += texts_of(
            shipped_table("observe/gap.yaml")["no_steps"], {"speed": record.middle("tokens_per_s_per_gpu")}
        )
        return Observation(sources=sources, facts=facts, **_beside_steps(record), notes=tuple(notes))
    precision = record.middle("precision_fraction") or 0.0
    found = steady(
        np.asarray(record.numbers, dtype=np.int64), np.asarray(record.seconds, dtype=np.float64),
        np.asarray(record.covers, dtype=np.float64), (0, *(back.row for back in record.backs)),
        {row: set(kinds) for row, kinds in record.marks.items()}, precision,
    )  # fmt: skip
    record.steady = (~found.warmup).tolist()
    common = {"sources": sources, "facts": facts, **_beside_steps(record)}
    told = facts.model_copy(update={fact: getattr(facts, fact) or said.get(name) for name, fact in SAID.items()})
    tokens_per_s, asks = _tokens_per_s(record, told, found.step_s)
    notes += texts_of(shipped_table("observe/gap.yaml")["notes"], {"record": record})
    refused = _refusal(record, facts, found.step_s)
    if refused:
        return Observation(**common, num_steps=sum(record.covers), series=_series(record), notes=(refused, *notes))
    return Observation(
        **common,
        step_s=found.step_s,
        step_s_spread=(found.low_s, found.high_s),
        step_s_precision_fraction=precision,
        num_steps=sum(record.covers),
        num_warmup_steps=int(np.asarray(record.covers)[found.warmup].sum()),
        warmup_extra_s=found.warmup_extra_s,
        drift_fraction=found.drift_fraction,
        tokens_per_s=tokens_per_s,
        breakdown=breakdown_of(record, found.step_s),
        series=_series(record),
        outliers=tuple(_explained(outlier, record.arguments) for outlier in found.outliers),
        restarts=tuple(_restart(record, back) for back in record.backs),
        wall=wall_of(record),
        notes=tuple(notes),
        asks=asks,
    )


def _last_run(record: RunRecord) -> None:
    """Keep what follows the last start with another step: two runs have no common median."""
    bounds = (0, *(back.row for back in record.backs), len(record.numbers))
    parts = [record.seconds[begin:end] for begin, end in pairwise(bounds)]
    for before, later, start in reversed(list(zip(parts, parts[1:], bounds[1:], strict=False))):
        low, high = sorted(median(part[len(part) // 2 :]) for part in (before, later))
        if min(len(before), len(later)) >= LEAST_OF_RUN and high > (1 + MOST_APART) * low:
            record.only_from(start)
            record.note(f"{start:,} lines of steps before the last start are of a run with another step: left out")
            return


def _refusal(record: RunRecord, facts: JobFacts, step_s: float) -> str:
    """The reason why no step can be said; empty where there is none."""
    seconds = np.frombuffer(record.seconds, dtype=float)
    low, high = seconds[seconds < step_s], seconds[seconds > step_s]
    names = {
        "record": record, "seconds": record.seconds, "step_s": step_s, "pairwise": pairwise,
        "LEAST_OF_RUN": LEAST_OF_RUN, "MOST_APART": MOST_APART,
        "near": np.count_nonzero(np.abs(seconds / step_s - 1) < 0.03),
        "low_s": float(np.median(low)) if len(low) else 0.0, "high_s": float(np.median(high)) if len(high) else 0.0,
        # a thousandfold of it is a trainer's slip of units
        "others": [
            one
            for one in _otherwise(record, facts, step_s)
            if all(abs(one[0] / step_s / times - 1) > MOST_APART for times in (1, 1000))
        ],
    }  # fmt: skip
    rows = shipped_table("observe/gap.yaml")["refusals"]
    return next(iter(texts_of(rows, names)), "")


def _otherwise(record: RunRecord, facts: JobFacts, step_s: float) -> Iterator[tuple[float, str]]:
    """The step by the wall clock of the lines, and by the tokens or samples per second of the same log."""
    if ratio := _wall_ratio(record):
        yield step_s * ratio, "by the times of its lines"
    batch = None if record.state.get("batch") == "grows" else facts.global_batch_size
    if batch and facts.seq_length and (speed := _speed(record, facts)):
        yield batch * facts.seq_length / speed, "by its tokens per second"
    if batch and (samples := record.middle("samples_per_s")):
        yield batch / samples, "by its samples per second"


def _wall_ratio(record: RunRecord) -> float | None:
    """Seconds between lines of steps over those that the lines say, where nothing else is said to lie between them."""
    ends, seconds = (np.frombuffer(values, dtype=float) for values in (record.ends, record.seconds))
    # lines may be left out: between two are as many steps as their numbers say
    lengths = (seconds * np.maximum(record.covers, np.diff(record.numbers, prepend=record.numbers[0])))[1:]
    apart = np.diff(ends)
    for kind, begin, end in record.activities:
        row = int(np.searchsorted(ends, end))
        if kind in _WALL_KINDS and 0 < row < len(ends):
            apart[row - 1] -= end - begin
    is_plain = np.isfinite(apart) & (apart >= 0)
    for row in (*record.marks, *(back.row for back in record.backs)):
        if 0 < row < len(ends):
            is_plain[row - 1] = False
    lengths = lengths[is_plain]
    apart = apart[is_plain]
    if len(apart) < LEAST_APART or len(apart) < len(ends) // 2:
        return None
    unbroken = apart <= 2 * lengths + 2  # a pause that nobody names is no step
    is_whole = np.all(ends == np.floor(ends)) and float(np.median(apart)) < LEAST_OF_WHOLE_S
    if not is_whole or 2 * np.count_nonzero(unbroken) < len(apart):
        return float(np.median(apart / lengths))
    total_s = float(lengths[unbroken].sum())
    cut = len(ends) - np.count_nonzero(unbroken)
    ratio = float(apart[unbroken].sum()) / total_s
    return ratio if abs(ratio - 1) > cut / total_s else None  # each stretch is known to a second


def _fit_covers(record: RunRecord) -> None:
    """Lines come at multiples of one interval: a greater distance is an excerpt's, and the first line has no less."""
    gaps = [later - before for before, later in pairwise(record.numbers) if later > before]
    if not (gaps and record.counts_covers):
        return
    usual = mode(gaps)
    if 2 * sum(each % usual == 0 for each in record.numbers) <= len(record.numbers):
        usual = math.gcd(*record.numbers)
    record.covers = array("l", (min(each, usual) for each in record.covers))
    if record.covers[0] == 1 and record.numbers[0] % usual == 0:
        record.covers[0] = usual


def _explained(outlier: Outlier, arguments: Named) -> Outlier:
    """The outlier with what the trainer's arguments say happens as often."""
    for name, what in TABLE["intervals"].items():
        every = arguments.get(name, "")
        if outlier.period_steps and not outlier.likely and is_count(every) and int(every) == outlier.period_steps:
            return outlier.model_copy(update={"likely": f"{what}, by its {name}"})
    return outlier


def _speed(record: RunRecord, facts: JobFacts) -> float | None:
    """Tokens per second of the whole job, as its trainer prints them."""
    per_gpu = record.middle("tokens_per_s_per_gpu")
    return per_gpu * facts.num_gpus if per_gpu and facts.num_gpus else record.middle("tokens_per_s")


def _tokens_per_s(record: RunRecord, facts: JobFacts, step_s: float) -> tuple[float | None, Texts]:
    """Tokens per second of the whole job, and the options that would say it."""
    batch = facts.global_batch_size or (record.middle("samples_per_s") or 0.0) * step_s
    if batch and facts.seq_length:
        return batch * facts.seq_length / step_s, ()
    speed = _speed(record, facts)
    if speed or record.middle("tokens_per_s_per_gpu"):
        return speed, () if speed else ("--gpus N",)
    missing = [("--global-batch-size N", batch), ("--seq-length N", facts.seq_length)]
    return None, tuple(option for option, value in missing if not value)


def _series(record: RunRecord) -> StepSeries:
    stride = math.ceil(len(record.numbers) / MOST_SHOWN)
    ends = np.frombuffer(record.ends, dtype=float)[::stride]
    timed = bool(len(ends)) and bool(np.isfinite(ends).all())
    return StepSeries(
        steps=tuple(record.numbers[::stride]),
        seconds=tuple(record.seconds[::stride]),
        end_s=tuple((ends - record.first_s).tolist()) if timed else (),
        stride=stride,
    )


def _spreads(record: RunRecord) -> Iterator[RankSpread]:
    for name, rows in record.spreads.items():
        (low_rank, low_times), (high_rank, high_times) = (
            Counter(row[side][1] for row in rows).most_common(1)[0] for side in (0, 1)
        )
        yield RankSpread(
            name=name,  # type: ignore[arg-type]
            low=median(low for (low, _), _ in rows), low_rank=low_rank, low_share=low_times / len(rows),
            high=median(high for _, (high, _) in rows), high_rank=high_rank, high_share=high_times / len(rows),
            num_values=len(rows),
        )  # fmt: skip


def memory_series(record: RunRecord) -> Iterator[MemorySeries]:
    """For each kind of memory its bytes over the steps, on the rank that has most at the end."""
    for name in TABLE["memory_kinds"].values():
        of_kind = {rank: series for (rank, known), series in record.memory_series.items() if known == name}
        if of_kind:
            rank = max(of_kind, key=lambda rank: (of_kind[rank][-1][1], -(rank or 0)))
            steps, values = zip(*of_kind[rank], strict=True)
            yield MemorySeries(
                kind=name.removesuffix("_bytes"),
                rank=rank,
                steps=steps,
                num_bytes=tuple(map(round, values)),
            )


def _peak(record: RunRecord) -> Fields:
    for kind, name in TABLE["peaks"].items():
        values = [kinds[kind] for kinds in record.memory.values() if kind in kinds]
        if values:
            return {"peak_memory_bytes": max(values), "peak_memory_kind": name}
    return {}


def _restart(record: RunRecord, back: FallBack) -> Restart:
    first, end = back.lost_rows
    covers = record.covers[first:end]
    down_s = record.ends[back.row] - record.seconds[back.row] * record.covers[back.row] - record.ends[back.row - 1]
    return Restart(
        from_step=back.from_step,
        to_step=record.numbers[back.row],
        lost_steps=sum(covers),
        lost_s=sum(s * n for s, n in zip(record.seconds[first:end], covers, strict=True)),
        down_s=max(0.0, down_s) if math.isfinite(down_s) else None,
    )
