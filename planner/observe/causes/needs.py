"""Measurements that would show a sign, and whether a run's files have them already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.observe.causes.signs.seen import Seen
from planner.observe.remedy.running import states_switches


@dataclass(frozen=True, slots=True)
class Need:
    """One measurement that somebody can make."""

    says: str
    """How to make it."""
    has: Callable[[Seen], bool]
    """True where the files have it: what they do not show then, it does not show."""


def _has_stages(seen: Seen) -> bool:
    size = seen.size("pp")
    return bool(seen.ranks) and (size == 1 or len({rank.stage for rank in seen.ranks}) >= (size or len(seen.ranks)))


def _has_timers(seen: Seen) -> bool:
    return any(timer.name == "forward-compute" for timer in seen.case.observation.timers)


_PROFILE = "torch.profiler for 5 steps with profiler.step()"
PLAN = Need(
    "hold it against its plan: plan observe … --plan plan.json, or --model, --gpus and the layout",
    lambda seen: seen.case.prediction is not None,
)
TRACE = Need(f"a trace of one rank: {_PROFILE}, then plan observe rank0.json.gz", lambda seen: bool(seen.ranks))
STAGE_TRACES = Need(
    f"traces of all ranks of one stage: {_PROFILE} on each, then plan observe rank*.json.gz",
    lambda seen: len(seen.ranks) > 1,
)
ALL_TRACES = Need(f"traces of a rank of every stage: {_PROFILE} on each, then plan observe rank*.json.gz", _has_stages)
TIMERS = Need("timers of all ranks: --timing-log-level 2 --timing-log-option all", _has_timers)
BATCH_TIMER = Need(
    "a timer of batches: --timing-log-level 2, or a record_function around the loader in a trace",
    lambda seen: seen.case.observation.data_s is not None,
)
LOG = Need(
    "a log of a hundred steps with a line for each (--log-interval 1)",
    lambda seen: bool(seen.case.observation.series.steps),
)
MEMORY_LOG = Need(
    "lines of memory: --log-memory-interval 10, or torch.cuda.memory_stats() every few steps",
    lambda seen: bool(seen.case.observation.memory_series),
)
SNAPSHOT = Need(
    "a memory snapshot: torch.cuda.memory._record_memory_history(), then _dump_snapshot(), then plan observe it",
    lambda seen: bool(seen.case.recorded and seen.case.recorded.snapshots),
)
ARGUMENTS = Need(
    "the arguments that the trainer prints at its start, in the same log", lambda seen: states_switches(seen.case)
)
