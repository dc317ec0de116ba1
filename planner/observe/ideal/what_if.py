"""Steps replayed as if one operation, rank or stage were not slow.

Every pipeline is replayed with its own ranks' seconds, and the step ends when the slowest has ended; of traces every
step by itself. As it should be is
a rank what the others of its stage are, and a stage what the plan, or the earlier run, says of its layers times what
other stages take of theirs: stages that hold other layers are never held against each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from planner.observe.case import Case
from planner.observe.ideal.grid import grid_of
from planner.observe.ideal.passes import MOST_STEPS, passes_by_step
from planner.observe.ideal.pipeline import Pipelines, pipelines_of
from planner.observe.ideal.workers import BACKWARD, FORWARD, Workers, middle_of, seconds_of, spans
from planner.observe.measured import RankPasses
from planner.observe.observation import Replayed, WhatIf
from planner.observe.traces.recorded import steady
from planner.shape import FloatArray

LEAST_FRACTION = 0.005
"""A change that wins less of a step is not told, nor one that wins less than the replay misses of the step."""
TOLD_FRACTION = 0.05
"""A replay that misses the step by more is said to do so."""


@dataclass(frozen=True)
class Ideal:
    """The replay of one observed step, and its changes."""

    workers: Workers
    pipelines: Pipelines

    @cached_property
    def rows(self) -> FloatArray:
        """Seconds of each pipeline's stages as they were seen; shape (pipelines, stages, 2)."""
        return with_exchanges(self.workers.passes_s, self.workers.exchanges_s)

    @cached_property
    def ends_s(self) -> FloatArray:
        """The end of each pipeline."""
        return self.pipelines.ends_s(self.rows, self.workers.sizes)

    @cached_property
    def step_s(self) -> float:
        """The step replayed as it was seen."""
        return self.end_s(self.ends_s)

    def end_s(self, ends_s: FloatArray) -> float:
        """The step whose pipelines end then."""
        return float(ends_s.max()) + self.pipelines.behind_s

    def of(self, passes_s: FloatArray, exchanges_s: FloatArray | None = None) -> float:
        """The step with other passes, or with other exchanges inside of them."""
        rows = with_exchanges(passes_s, self.workers.exchanges_s if exchanges_s is None else exchanges_s)
        return self.end_s(self.pipelines.ends_s(rows, self.workers.sizes))

    @cached_property
    def even_s(self) -> FloatArray:
        """Passes as they should be: the plan's × what the middle stage takes of them, or else the stage's middle.

        None is longer than it was seen.
        """
        workers = self.workers
        middle_s = workers.seen_s
        if workers.reference is not None:
            should_s = workers.reference.passes_s
            middle_s = should_s * middle_of(middle_s / should_s)
        return np.fmin(workers.passes_s, middle_s)

    @cached_property
    def even_exchanges_s(self) -> FloatArray:
        """Exchanges inside of passes as the plan has them, where they are known apart."""
        should = self.workers.reference
        if should is None or self.workers.holds_exchanges:
            return self.workers.exchanges_s
        return np.minimum(self.workers.exchanges_s, should.exchanges_s)

    @cached_property
    def all_even_s(self) -> float:
        """The step if all passes, exchanges and micro-batches were as they should be."""
        rows = with_exchanges(self.even_s, self.even_exchanges_s)
        return self.end_s(self.pipelines.ends_s(rows))


def what_ifs(case: Case) -> tuple[WhatIf, ...]:
    """The replays, the most winning first; nothing where no rank's own seconds are known."""
    return idealised(case)[1]


def idealised(case: Case) -> tuple[Replayed | None, tuple[WhatIf, ...]]:
    """The step replayed as it was seen, and with one thing idealised; nothing where the files do not say enough."""
    steps, measured_s = steps_of(case), _measured_s(case)
    if not steps or not measured_s:
        return None, ()
    step_s, even_s = (median(getattr(one, name) for one in steps) for name in ("step_s", "all_even_s"))
    off = step_s / measured_s - 1
    notes = [*steps[0].workers.notes, *steps[0].pipelines.notes]
    if abs(off) > TOLD_FRACTION:
        less = "less" if off < 0 else "more"
        notes.append(f"the replay gives {abs(off):.0%} {less} than was measured: what it misses is not in the passes")
        notes.append("changes that would win less than it misses are not told")
    known = steps[0].workers.has_peers
    if not known:
        notes.append("no rank has a peer: the plan, or a trace of another rank of its stage, would say what is slow")
    told = Replayed(step_s=step_s, measured_s=measured_s, even_s=even_s if known else None, notes=tuple(notes))
    return told, _ranked(steps, step_s, max(LEAST_FRACTION, abs(off)))


def steps_of(case: Case, most: int = MOST_STEPS) -> list[Ideal]:
    """The replay of each step that was seen, of `most` if there are more; none where the files do not say enough."""
    grid, found = grid_of(case), []
    pipelines = None
    for passes in passes_by_step(case, most):
        workers = Workers.of(passes, grid, case)
        if workers is not None and pipelines is None:
            counts = [one.num_microbatches for one in passes if one.num_microbatches]
            num_microbatches = round(median(counts)) if counts else None
            pipelines = pipelines_of(case, grid, workers.passes_s.shape[1], num_microbatches)
        if workers is None or pipelines is None:
            return []
        found.append(Ideal(workers, pipelines))
    return found


def _measured_s(case: Case) -> float | None:
    """The step of the files that the passes are of."""
    traces = case.recorded.traces if case.recorded else None
    walls = [step.wall_s for step in steady(traces.ranks) if step.number is not None and step.phases] if traces else []
    return float(np.median(walls)) if walls else case.observation.step_s


def _ranked(steps: Sequence[Ideal], step_s: float, least_fraction: float) -> tuple[WhatIf, ...]:
    """Changes with what they win of a step, on average; of equal wins ranks come first."""
    won: dict[tuple[str, str], float] = defaultdict(float)
    loads = _loads(steps)
    for one, load in zip(steps, loads, strict=True):
        for kind, name, changed_s in (*_ranks(one, load), *_stages(one), *_operations(one, load)):
            won[kind, name] += max(one.step_s - changed_s, 0.0) / len(steps)
    found = sorted(won.items(), key=lambda item: -round(item[1] / step_s, 6))
    return tuple(
        WhatIf.model_validate({"kind": kind, "name": name, "step_s": step_s - win_s, "recoverable_s": win_s})
        for (kind, name), win_s in found
        if win_s > least_fraction * step_s
    )


def _loads(steps: Sequence[Ideal]) -> list[FloatArray]:
    """The part of each pipeline's passes that changes from step to step, as its batches do and a slow rank does not.

    A pipeline's load in a step is its passes over those of all pipelines, over the same in its middle step; 1 where
    micro-batches are alike.
    """
    if not any(any(one.workers.sizes) for one in steps):
        return [np.ones(len(one.rows)) for one in steps]
    share = np.array([(one.rows / one.rows.mean(axis=0)).mean(axis=(1, 2)) for one in steps])
    return list(share / np.median(share, axis=0))


Change = tuple[str, str, float]
"""(kind, name, seconds of the step with it)."""


def _operations(ideal: Ideal, load: FloatArray) -> Iterator[Change]:
    workers = ideal.workers
    for name, which in (("forward", FORWARD), ("backward", BACKWARD)):
        passes_s = workers.passes_s.copy()
        passes_s[..., which] = ideal.even_s[..., which]
        yield "operation", name, ideal.of(passes_s)
    if np.any(ideal.even_exchanges_s < workers.exchanges_s):
        yield "operation", "exchanges inside of passes", ideal.of(workers.passes_s, ideal.even_exchanges_s)
    if any(workers.sizes):
        yield (
            "operation",
            "micro-batches of equal length",
            ideal.end_s(ideal.pipelines.ends_s(ideal.rows / load[:, None, None])),
        )
    transfers_s = ideal.pipelines.transfers_s
    if len(transfers_s) > 1 and transfers_s.max() > np.median(transfers_s):
        even = ideal.pipelines.with_transfers(np.minimum(transfers_s, np.median(transfers_s)))
        yield "operation", "transfers", ideal.end_s(even.ends_s(ideal.rows, workers.sizes))


def _stages(ideal: Ideal) -> Iterator[Change]:
    """Each stage that was seen, as the plan or the earlier run has it × what the other stages take of theirs.

    Without either nobody knows what a stage holds; then all stages as long as the middle of them.
    """
    workers = ideal.workers
    seen_s, should = workers.seen_s, workers.reference
    known = np.flatnonzero(~np.isnan(seen_s).any(axis=1))
    if should is None and 1 < len(known) == len(seen_s):
        yield "stage", "stages of equal length", ideal.of(workers.passes_s * (seen_s.mean(axis=0) / seen_s))
    if should is None or len(known) < 2:
        return
    for stage in known.tolist():
        others = known[known != stage]
        ratio = np.median(seen_s[others] / should.passes_s[others], axis=0)
        passes_s = workers.passes_s.copy()
        passes_s[:, stage] = np.minimum(passes_s[:, stage], should.passes_s[stage] * ratio)
        yield "stage", f"stage {stage}", ideal.of(passes_s)


def _ranks(ideal: Ideal, load: FloatArray) -> Iterator[Change]:
    """Each rank of the slowest pipeline as the others of its stage; one of another pipeline wins nothing alone."""
    last = int(np.argmax(ideal.ends_s))
    changes = list(_faster_ranks(ideal.workers, last, load))
    if not changes:
        return
    own_s, exchanges_s = ideal.workers.passes_s[last], ideal.workers.exchanges_s[last]
    rows = np.repeat(own_s[None], len(changes), axis=0)
    for row, (stage, _, seconds) in zip(rows, changes, strict=True):
        row[stage] = np.minimum(row[stage], seconds)
    others, sizes = np.delete(ideal.ends_s, last), [ideal.workers.sizes[last]] * len(rows)
    ends_s = ideal.pipelines.ends_s(with_exchanges(rows, exchanges_s), sizes)
    for (_, name, _), end_s in zip(changes, ends_s, strict=True):
        yield "rank", name, ideal.end_s(np.append(others, end_s))


def _faster_ranks(workers: Workers, pipeline: int, load: FloatArray) -> Iterator[tuple[int, str, tuple[float, float]]]:
    """(stage, rank, the seconds of its stage were it as the others) of one pipeline's ranks.

    Where passes hold exchanges, the ranks of a place wait for each other in them, and are one. Ranks of other pipelines
    are taken as if they had the batches of this one.
    """
    for (own_pipeline, stage), own in workers.ranks.items():
        if own_pipeline != pipeline:
            continue
        elsewhere = [
            load[pipeline] / load[other] * seconds_of(one)
            for (other, s), ranks in workers.ranks.items() if s == stage and other != pipeline for one in ranks
        ]  # fmt: skip
        for unit in [own] if workers.holds_exchanges else [(one,) for one in own]:
            rest = [seconds_of(one) for one in own if one not in unit]
            if others := [*elsewhere, *rest]:
                slow = np.max([seconds_of(one) for one in unit], axis=0)
                changed = np.max([np.minimum(slow, np.median(others, axis=0)), *rest], axis=0)
                yield stage, _name(unit), (float(changed[FORWARD]), float(changed[BACKWARD]))


def _name(unit: tuple[RankPasses, ...]) -> str:
    numbers = [one.rank for one in unit if one.rank is not None]
    if not numbers:
        return "the slowest rank"
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {spans(numbers)}, which share passes"


def with_exchanges(passes_s: FloatArray, exchanges_s: FloatArray) -> FloatArray:
    """Passes with the exchanges inside of them, which a forward and a backward have as they have computing."""
    total_s = passes_s.sum(axis=-1)
    longer: FloatArray = passes_s * np.where(total_s > 0, 1 + exchanges_s / total_s, 1.0)[..., None]
    return longer
