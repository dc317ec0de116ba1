"""Steps replayed as if one operation, rank or stage were not slow.

Every pipeline is replayed with its own ranks' seconds, and the step ends when the slowest has ended. As it should be is
a rank what the others of its stage are, and a stage what the plan says of its layers times what other stages take of
theirs: stages that hold other layers are never held against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from planner.observe.case import Case
from planner.observe.ideal.grid import grid_of
from planner.observe.ideal.passes import passes_of
from planner.observe.ideal.pipeline import Pipelines, pipelines_of
from planner.observe.ideal.workers import BACKWARD, FORWARD, Place, Workers, median_of_others, middle_of, slowest
from planner.observe.observation import RankPasses, Replayed, WhatIf
from planner.observe.traces.recorded import steady
from planner.shape import FloatArray

LEAST_FRACTION = 0.005
"""A change that wins less of a step is not told."""
TOLD_FRACTION, USELESS_FRACTION = 0.05, 0.25
"""A replay that misses the step by more is said to do so; by more than the second, nothing is made of it."""


@dataclass(frozen=True)
class Ideal:
    """The replay of an observed step, and its changes."""

    workers: Workers
    pipelines: Pipelines
    measured_s: float

    @cached_property
    def rows(self) -> FloatArray:
        """Seconds of each pipeline's stages as they were seen; shape (pipelines, stages, 2)."""
        return with_exchanges(self.workers.passes_s, self.workers.exchanges_s)

    @cached_property
    def ends_s(self) -> FloatArray:
        """The end of each pipeline."""
        return self.pipelines.ends_s(self.rows)

    @cached_property
    def step_s(self) -> float:
        """The step replayed as it was seen."""
        return self.end_s(self.ends_s)

    def end_s(self, ends_s: FloatArray) -> float:
        """The step whose pipelines end then."""
        return float(ends_s.max()) + self.pipelines.behind_s

    def of(self, rows: FloatArray) -> float:
        """The step whose pipelines' stages take `rows`."""
        return self.end_s(self.pipelines.ends_s(rows))

    @cached_property
    def even_s(self) -> FloatArray:
        """Passes as they should be: the plan's × what the middle stage takes of them, or else the stage's middle.

        None is longer than it was seen.
        """
        workers = self.workers
        middle_s = workers.seen_s
        if workers.planned_s is not None:
            middle_s = workers.planned_s * middle_of(middle_s / workers.planned_s)
        return np.fmin(workers.passes_s, middle_s)

    @cached_property
    def even_exchanges_s(self) -> FloatArray:
        """Exchanges inside of passes as the plan has them, where they are known apart."""
        planned_s = self.workers.planned_exchanges_s
        if planned_s is None or self.workers.holds_exchanges:
            return self.workers.exchanges_s
        return np.minimum(self.workers.exchanges_s, planned_s)


def what_ifs(case: Case) -> tuple[WhatIf, ...]:
    """The replays, the most winning first; nothing where no rank's own seconds are known."""
    return idealised(case)[1]


def idealised(case: Case) -> tuple[Replayed | None, tuple[WhatIf, ...]]:
    """The step replayed as it was seen, and with one thing idealised; nothing where the files do not say enough."""
    ideal = _ideal_of(case)
    if ideal is None:
        return None, ()
    off = ideal.step_s / ideal.measured_s - 1
    notes = [*ideal.workers.notes, *ideal.pipelines.notes]
    if abs(off) > TOLD_FRACTION:
        less = "less" if off < 0 else "more"
        notes.append(f"the replay gives {abs(off):.0%} {less} than was measured: what it misses is not in the passes")
    useless = abs(off) > USELESS_FRACTION
    if useless:
        notes.append("that is too far off to say what one thing alone would win")
    even_s = ideal.of(with_exchanges(ideal.even_s, ideal.even_exchanges_s))
    told = Replayed(step_s=ideal.step_s, measured_s=ideal.measured_s, even_s=even_s, notes=tuple(notes))
    return told, () if useless else _ranked(ideal)


def _ideal_of(case: Case) -> Ideal | None:
    passes, grid = passes_of(case), grid_of(case)
    measured_s = _measured_s(case)
    workers = Workers.of(passes, grid, case.candidate) if measured_s else None
    if workers is None or measured_s is None:
        return None
    counts = [one.num_microbatches for one in passes if one.num_microbatches]
    num_microbatches = round(median(counts)) if counts else None
    pipelines = pipelines_of(case, grid, workers.passes_s.shape[1], num_microbatches)
    return None if pipelines is None else Ideal(workers, pipelines, measured_s)


def _measured_s(case: Case) -> float | None:
    """The step of the files that the passes are of."""
    traces = case.recorded.traces if case.recorded else None
    walls = [step.wall_s for step in steady(traces.ranks) if step.number is not None and step.phases] if traces else []
    return float(np.median(walls)) if walls else case.observation.step_s


def _ranked(ideal: Ideal) -> tuple[WhatIf, ...]:
    """All changes; of those that win equally much, ranks come first: they say most."""
    all_of_them = [*_ranks(ideal), *_stages(ideal), *_operations(ideal)]
    found = sorted(all_of_them, key=lambda one: -round(one.recoverable_s / ideal.step_s, 6))
    return tuple(one for one in found if one.recoverable_s > LEAST_FRACTION * ideal.step_s)


def _what_if(ideal: Ideal, kind: str, name: str, step_s: float) -> WhatIf:
    return WhatIf.model_validate(
        {"kind": kind, "name": name, "step_s": step_s, "recoverable_s": max(ideal.step_s - step_s, 0.0)}
    )


def _operations(ideal: Ideal) -> Iterator[WhatIf]:
    workers = ideal.workers
    for name, which in (("forward", FORWARD), ("backward", BACKWARD)):
        passes_s = workers.passes_s.copy()
        passes_s[..., which] = ideal.even_s[..., which]
        yield _what_if(ideal, "operation", name, ideal.of(with_exchanges(passes_s, workers.exchanges_s)))
    if np.any(ideal.even_exchanges_s < workers.exchanges_s):
        step_s = ideal.of(with_exchanges(workers.passes_s, ideal.even_exchanges_s))
        yield _what_if(ideal, "operation", "exchanges inside of passes", step_s)
    transfers_s = ideal.pipelines.transfers_s
    if len(transfers_s) > 1 and transfers_s.max() > np.median(transfers_s):
        even = ideal.pipelines.with_transfers(np.minimum(transfers_s, np.median(transfers_s)))
        yield _what_if(ideal, "operation", "transfers", ideal.end_s(even.ends_s(ideal.rows)))


def _stages(ideal: Ideal) -> Iterator[WhatIf]:
    """Each stage that was seen, as the plan has it × what the other stages take of theirs."""
    workers = ideal.workers
    seen_s, planned_s = workers.seen_s, workers.planned_s
    known = np.flatnonzero(~np.isnan(seen_s).any(axis=1))
    if planned_s is None or len(known) < 2:
        return
    for stage in known.tolist():
        others = known[known != stage]
        ratio = np.median(seen_s[others] / planned_s[others], axis=0)
        passes_s = workers.passes_s.copy()
        passes_s[:, stage] = np.minimum(passes_s[:, stage], planned_s[stage] * ratio)
        step_s = ideal.of(with_exchanges(passes_s, workers.exchanges_s))
        yield _what_if(ideal, "stage", f"stage {stage}", step_s)


def _ranks(ideal: Ideal) -> Iterator[WhatIf]:
    """Each rank of the slowest pipeline as the others of its stage; one of another pipeline wins nothing alone."""
    last = int(np.argmax(ideal.ends_s))
    changes = [change for change in _faster_ranks(ideal.workers) if change[0][0] == last]
    if not changes:
        return
    own_s, exchanges_s = ideal.workers.passes_s[last], ideal.workers.exchanges_s[last]
    rows = np.repeat(own_s[None], len(changes), axis=0)
    for row, ((_, stage), _, seconds) in zip(rows, changes, strict=True):
        row[stage] = np.minimum(row[stage], seconds)
    others = np.delete(ideal.ends_s, last)
    for (_, name, _), end_s in zip(changes, ideal.pipelines.ends_s(with_exchanges(rows, exchanges_s)), strict=True):
        yield _what_if(ideal, "rank", name, ideal.end_s(np.append(others, end_s)))


def _faster_ranks(workers: Workers) -> Iterator[tuple[Place, str, tuple[float, float]]]:
    """(place, rank, the seconds of its place were it as the others of its stage).

    Where passes hold exchanges, the ranks of a place wait for each other in them, and are one.
    """
    for (pipeline, stage), own in workers.ranks.items():
        elsewhere = [one for (p, s), ranks in workers.ranks.items() if s == stage and p != pipeline for one in ranks]
        units = [own] if workers.holds_exchanges else [(one,) for one in own]
        for unit in units:
            rest = tuple(one for one in own if one not in unit)
            if not (others := [*elsewhere, *rest]):
                continue
            middle, slow = median_of_others(others), slowest(unit)
            as_others = [min(mine, theirs) for mine, theirs in zip(slow, middle, strict=True)]
            left = slowest(rest) if rest else (0.0, 0.0)
            yield (pipeline, stage), _name(unit), (max(as_others[0], left[0]), max(as_others[1], left[1]))


def _name(unit: tuple[RankPasses, ...]) -> str:
    numbers = sorted(one.rank for one in unit if one.rank is not None)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}, which share passes"


def with_exchanges(passes_s: FloatArray, exchanges_s: FloatArray) -> FloatArray:
    """Passes with the exchanges inside of them, which a forward and a backward have as they have computing."""
    total_s = passes_s.sum(axis=-1)
    longer: FloatArray = passes_s * np.where(total_s > 0, 1 + exchanges_s / total_s, 1.0)[..., None]
    return longer
