"""The pipelines of an observed run as the replay takes them: order, transfers, and what comes behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np

from planner.layout.candidate import Candidate
from planner.observe.case import Case
from planner.observe.ideal.grid import Grid
from planner.observe.ideal.passes import INSIDE
from planner.observe.ideal.workers import BACKWARD, FORWARD
from planner.observe.traces.families import OPTIMIZER
from planner.observe.traces.groups import POINT_TO_POINT
from planner.observe.traces.recorded import steady
from planner.observe.traces.results import RankReport, TraceStep
from planner.schedule.actions import Schedule
from planner.schedule.orders import build_schedule, violation
from planner.schedule.replay import Durations, makespans_s
from planner.shape import FloatArray

BETWEEN = ("pp", POINT_TO_POINT)
"""Groups whose exchanges are between stages."""
_SYNCED_INSIDE, _SYNCED_BEHIND = "all-grads-sync", "grads-all-reduce"
"""Megatron-LM's timers of the gradients' exchange: inside of `forward-backward` since core 0.7, behind it before."""
MOST_ACTIONS = 1 << 17
"""Longer steps are not replayed here: dozens of replays of 131,072 actions take a second."""


@dataclass(frozen=True, slots=True, eq=False)
class Pipelines:
    """All that a step takes from its stages' passes to its end."""

    order: Schedule
    shares: FloatArray
    """The part of its rank's forward and backward that each chunk has; shape (chunks, 2)."""
    weight_fraction: FloatArray
    """The part of each chunk's backward that is its weight gradient."""
    transfers_s: FloatArray
    """Seconds of a transfer between each two neighbouring chunks."""
    blocking: bool
    behind_s: float = 0.0
    """Seconds of a step outside of its pipelines."""
    notes: tuple[str, ...] = ()

    def ends_s(self, rows: FloatArray, sizes: Sequence[Sequence[float]] = ()) -> FloatArray:
        """Seconds of pipelines whose stages take `rows`, of shape (pipelines, stages, 2).

        `sizes` are those of each one's micro-batches, empty where they are alike.
        """
        chunks = rows[:, list(self.order.stage_to_rank[: len(self.shares)])] * self.shares
        each = sizes or [()] * len(rows)
        return makespans_s(self.order, [self._durations(*pair) for pair in zip(chunks, each, strict=True)])

    def _durations(self, chunks: FloatArray, sizes: Sequence[float]) -> Durations:
        weight_s = chunks[:, BACKWARD] * self.weight_fraction
        hops: float | list[float] = self.transfers_s.tolist() if len(self.transfers_s) else 0.0
        return Durations(
            chunks[:, FORWARD].tolist(), (chunks[:, BACKWARD] - weight_s).tolist(), weight_s.tolist(), hops,
            blocking_p2p=self.blocking,
            microbatch_sizes=sizes if len(sizes) == self.order.num_microbatches else None,
        )  # fmt: skip

    def with_transfers(self, seconds: FloatArray) -> Pipelines:
        """The same pipelines with other transfers."""
        return replace(self, transfers_s=seconds)


def pipelines_of(case: Case, grid: Grid | None, num_stages: int, num_microbatches: int | None) -> Pipelines | None:
    """The plan's order, transfers and end of the step, or what the files say of them; None where the order is open."""
    behind_s, notes = _behind_s(case)
    observed = transfers_of(case, num_stages)
    if case.candidate is not None:
        found = _of_plan(case.candidate, num_stages)
    else:
        found = _of_files(grid, num_stages, (grid.num_microbatches if grid else None) or num_microbatches)
    if found is None:
        return None
    if observed is not None and len(observed) == len(found.transfers_s):
        found = found.with_transfers(observed)
    return replace(found, behind_s=behind_s, notes=(*notes, *found.notes))


def _of_plan(candidate: Candidate, num_stages: int) -> Pipelines | None:
    """The plan's own; None for a step that is too long, and where a rank holds stages of both directions."""
    placement, parts = list(candidate.placement), candidate.durations
    actions = 2 * len(placement) * candidate.num_microbatches
    if actions > MOST_ACTIONS or candidate.order.num_directions > 1:
        return None
    backward_s = np.add(parts.input_grad_s, parts.weight_grad_s)
    own_s, totals_s = np.stack([np.array(parts.forward_s), backward_s], axis=1), np.zeros((num_stages, 2))
    np.add.at(totals_s, placement, own_s)
    return Pipelines(
        candidate.order, own_s / totals_s[placement], np.array(parts.weight_grad_s) / backward_s,
        np.broadcast_to(np.asarray(parts.p2p_s, dtype=np.float64), (len(placement) - 1,)), parts.blocking_p2p,
    )  # fmt: skip


def _of_files(grid: Grid | None, num_stages: int, num_microbatches: int | None) -> Pipelines | None:
    """1F1B, interleaved where a rank holds several chunks: what trainers run unless told otherwise."""
    vpp = grid.vpp if grid else 1
    name = "none" if num_stages == 1 else "interleaved-1f1b" if vpp > 1 else "1f1b"
    count, chunks = num_microbatches, num_stages * vpp
    if count is None or 2 * chunks * count > MOST_ACTIONS or violation(name, num_stages, vpp, count):
        return None
    notes = (f"the order of the passes is taken to be {name}: no file says it",) if num_stages > 1 else ()
    order, shares = build_schedule(name, num_stages, vpp, count), np.full((chunks, 2), 1 / vpp)
    return Pipelines(order, shares, np.full(chunks, 0.5), np.zeros(chunks - 1), False, notes=notes)


def transfers_of(case: Case, num_stages: int) -> FloatArray | None:
    """Seconds of a transfer between neighbouring stages where peers' traces tell it apart from waits.

    A rank's transfers are of both of its sides, so that the faster end of a boundary counts.
    """
    of_stage: dict[int, list[float]] = {}
    for report in _reports(case):
        for one in report.collectives:
            if one.group in BETWEEN and one.transfer_s is not None and report.stage is not None:
                of_stage.setdefault(report.stage, []).append(one.transfer_s)
    ends = [median(of_stage[stage]) if stage in of_stage else None for stage in range(num_stages)]
    known = [[end for end in pair if end is not None] for pair in pairwise(ends)]
    return np.array([min(pair) for pair in known]) if known and all(known) else None


def _behind_s(case: Case) -> tuple[float, tuple[str, ...]]:
    """Seconds of a step outside of its pipelines: by traces, else by timers, else by the plan."""
    if reports := _reports(case):
        return _behind_in_traces_s(reports), ()
    timers = {timer.name: timer for timer in case.observation.timers}
    step_s = case.observation.step_s or 0.0
    inside_s = 0.0 if (sync := timers.get(_SYNCED_INSIDE)) is None else sync.min_s
    if (whole := timers.get("forward-backward")) is not None and whole.max_s < step_s:
        return step_s - whole.max_s + inside_s, ()
    if found := [timers[name].min_s for name in (_SYNCED_INSIDE, _SYNCED_BEHIND, "optimizer") if name in timers]:
        return sum(found), ()
    if case.candidate is not None:
        return sum(case.candidate.outside), ("what comes behind the pipelines is as the plan has it",)
    return 0.0, ("gradients and optimizer are not in the replay: no file shows them",)


def _behind_in_traces_s(reports: Sequence[RankReport]) -> float:
    """Exchanges outside of passes on the rank that waits least in them, the optimizer, and the least of host gaps."""
    exchanged: dict[str, list[float]] = {}
    optimizer, gaps = [], []
    for report in reports:
        steps = steady([report])
        named = {group.group for step in steps for group in step.groups} - {*INSIDE, *BETWEEN}
        for name in named:
            seconds = [sum(group.exposed_s for group in step.groups if group.group == name) for step in steps]
            exchanged.setdefault(name, []).append(median(seconds))
        optimizer += [
            sum(phase.own_s or phase.seconds for phase in step.phases if phase.phase == OPTIMIZER) for step in steps
        ]
        gaps.append(median(_gaps_outside_s(step) for step in steps) if steps else 0.0)
    least_s = sum(min(seconds) for seconds in exchanged.values()) + min(gaps)
    return least_s + (median(optimizer) if optimizer else 0.0)


def _gaps_outside_s(step: TraceStep) -> float:
    """Host gaps that are not inside of phases, where the phases' own seconds hold them."""
    inside_s = sum(phase.own_s - phase.seconds for phase in step.phases if phase.own_s is not None)
    return max(0.0, step.host_gaps_s - inside_s)


def _reports(case: Case) -> Sequence[RankReport]:
    """The traces whose phases were told."""
    traces = case.recorded.traces if case.recorded else None
    return [report for report in traces.ranks if any(step.phases for step in report.steps)] if traces else []
