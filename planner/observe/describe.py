"""An observation of what a record holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from planner.observe.facts import facts_of
from planner.observe.measured import (
    JobFacts,
    Link,
    MemorySeries,
    Outlier,
    RankMemory,
    RankSpread,
    Restart,
    Source,
    StepSeries,
)
from planner.observe.observation import Observation
from planner.observe.record import Back, Record
from planner.observe.steady import Steady, steady
from planner.observe.timers import breakdown_of, data_s, timers_of
from planner.observe.wall import restart_gap_s, wall_of
from planner.specs.units import is_count

MOST_SHOWN = 4_000
"""The most rows of steps in an answer; of more, every n-th."""
INTERVALS = {
    "manual_gc_interval": "garbage collection",
    "save_interval": "checkpoints",
    "eval_interval": "evaluation",
    "tensorboard_log_interval": "logging",
}
"""Arguments of Megatron-LM that say how often something happens."""
COUNTS = ("num_alloc_retries", "num_ooms", "num_skipped_steps", "num_nan_steps")
SERIES: dict[str, tuple[str, bool]] = {
    "allocated_bytes": ("allocated", False),
    "max_allocated_bytes": ("allocated", True),
    "max_reserved_bytes": ("reserved", True),
    "device_bytes": ("device", False),
}
"""The kind of each series of memory, and whether it is of peaks."""


def described(record: Record, trainer: str, sources: tuple[Source, ...]) -> Observation:
    """The observation of a record, whose statistics are robust."""
    _complete_first_row(record)
    facts = facts_of(record, trainer)
    common: dict[str, Any] = {
        "sources": sources,
        "facts": facts,
        "timers": tuple(timers_of(record)),
        "memory": tuple(_memory(record)),
        "memory_series": tuple(memory_series(record)),
        "links": tuple(_links(record)),
        "rank_spreads": tuple(_spreads(record)),
        "data_s": data_s(record),
        "watts_per_gpu": _printed(record, "watts_per_gpu"),
        "clock_mhz": _printed(record, "clock_mhz"),
        **{name: record.counts[name] for name in COUNTS if name in record.counts},
        "printed_tflops_per_gpu": _printed(record, "tflops"),
        "printed_mfu": None if (mfu := _printed(record, "mfu_percent")) is None else mfu / 100,
        **_peak(record),
    }
    notes = list(record.notes)
    if (theory := _printed(record, "theoretical_bytes")) is not None:
        notes.append(f"the trainer's own estimate of the first rank's memory is {theory / 2**30:.1f} GiB")
    if record.duplicates:
        notes.append(f"{record.duplicates:,} lines of steps were printed by several ranks, or again")
    if not record.numbers:
        return Observation(**common, notes=(*notes, "no line of a step was found"))
    precision = _printed(record, "precision_fraction") or 0.0
    found = _statistics(record, precision)
    tokens_per_s, asks = _tokens_per_s(record, facts, found.step_s)
    if max(record.covers) > 1:
        notes.append(f"a line is the mean of up to {max(record.covers):,} steps: single slow ones do not show")
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


def _complete_first_row(record: Record) -> None:
    """The first row covers as many steps as the others do where its number is a multiple of that."""
    if len(record.covers) > 1 and record.covers[0] == 1:
        usual = int(median(record.covers[1:]))
        if usual > 1 and record.numbers[0] % usual == 0:
            record.covers[0] = usual


def _statistics(record: Record, precision_fraction: float) -> Steady:
    starts = (0, *(back.row for back in record.backs))
    return steady(
        np.asarray(record.numbers, dtype=np.int64),
        np.asarray(record.seconds, dtype=np.float64),
        np.asarray(record.covers, dtype=np.float64),
        starts,
        record.marks,
        precision_fraction,
    )


def _explained(outlier: Outlier, arguments: dict[str, str]) -> Outlier:
    """The outlier with what the trainer's arguments say happens as often."""
    for name, what in INTERVALS.items():
        every = arguments.get(name, "")
        if outlier.period_steps and not outlier.likely and is_count(every) and int(every) == outlier.period_steps:
            return outlier.model_copy(update={"likely": f"{what}, by its {name}"})
    return outlier


def _tokens_per_s(record: Record, facts: JobFacts, step_s: float) -> tuple[float | None, tuple[str, ...]]:
    """Tokens per second of the whole job, and the options that would say it."""
    if facts.global_batch_size and facts.seq_length:
        return facts.global_batch_size * facts.seq_length / step_s, ()
    per_gpu = _printed(record, "tokens_per_s_per_gpu")
    if per_gpu is not None:
        return (per_gpu * facts.num_gpus, ()) if facts.num_gpus else (None, ("--gpus N",))
    if (tokens := _printed(record, "tokens_per_s")) is not None:
        return tokens, ()
    samples = _printed(record, "samples_per_s")
    if samples is not None and facts.seq_length:
        return samples * facts.seq_length, ()
    missing = [("--global-batch-size N", facts.global_batch_size or samples), ("--seq-length N", facts.seq_length)]
    return None, tuple(option for option, value in missing if not value)


def _printed(record: Record, name: str) -> float | None:
    """The median of what the trainer prints under a name; None where it does not."""
    values = record.printed.get(name)
    return float(np.median(np.frombuffer(values, dtype=float))) if values else None


def _series(record: Record) -> StepSeries:
    stride = math.ceil(len(record.numbers) / MOST_SHOWN)
    ends = np.frombuffer(record.ends, dtype=float)[::stride]
    timed = bool(len(ends)) and bool(np.isfinite(ends).all())
    return StepSeries(
        steps=tuple(record.numbers[::stride]),
        seconds=tuple(record.seconds[::stride]),
        end_s=tuple((ends - record.first_s).tolist()) if timed else (),
        stride=stride,
    )


def _memory(record: Record) -> Iterator[RankMemory]:
    for rank, kinds in sorted(record.memory.items(), key=lambda pair: -1 if pair[0] is None else pair[0]):
        yield RankMemory(rank=rank, **kinds)


def _spreads(record: Record) -> Iterator[RankSpread]:
    for name, spread in record.spreads.items():
        if spread.lows:
            (low_rank, low_times), (high_rank, high_times) = (
                Counter(ranks).most_common(1)[0] for ranks in (spread.low_ranks, spread.high_ranks)
            )
            yield RankSpread(
                name=name,  # type: ignore[arg-type]
                low=median(spread.lows),
                low_rank=low_rank,
                low_share=low_times / len(spread.lows),
                high=median(spread.highs),
                high_rank=high_rank,
                high_share=high_times / len(spread.highs),
                num_values=len(spread.lows),
                per_rank=spread.ranks,
            )


def memory_series(record: Record) -> Iterator[MemorySeries]:
    """For each kind of memory its bytes over the steps, on the rank that has most at the end."""
    for name, (kind, is_peak) in SERIES.items():
        of_kind = {rank: series for (rank, known), series in record.memory_series.items() if known == name}
        if of_kind:
            rank = max(of_kind, key=lambda rank: (of_kind[rank].values[-1], -(rank or 0)))
            steps, values = of_kind[rank].steps, of_kind[rank].values
            yield MemorySeries(
                kind=kind,  # type: ignore[arg-type]
                is_peak=is_peak,
                rank=rank,
                steps=tuple(steps),
                num_bytes=tuple(map(round, values)),
            )


def _peak(record: Record) -> dict[str, Any]:
    for kind, name in (
        ("max_allocated_bytes", "allocated"),
        ("max_reserved_bytes", "reserved"),
        ("device_bytes", "device"),
    ):
        values = [kinds[kind] for kinds in record.memory.values() if kind in kinds]
        if values:
            return {"peak_memory_bytes": max(values), "peak_memory_kind": name}
    return {}


def _links(record: Record) -> Iterator[Link]:
    for op, values in record.links.items():
        size, seconds, rate = (median(column) for column in zip(*values, strict=True))
        yield Link(op=op, message_bytes=size, seconds=seconds, bus_bytes_per_s=rate, num_values=len(values))


def _restart(record: Record, back: Back) -> Restart:
    first, end = back.lost_rows
    covers = record.covers[first:end]
    return Restart(
        from_step=back.from_step,
        to_step=record.numbers[back.row],
        lost_steps=sum(covers),
        lost_s=sum(s * n for s, n in zip(record.seconds[first:end], covers, strict=True)),
        down_s=restart_gap_s(record, back.row),
    )
