"""The accounts of traced ranks beside those that were expected of them: the plan's stage, or the same rank before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.observe.case import Case
from planner.observe.gap.account import Account
from planner.observe.gap.planned import planned
from planner.observe.gap.traced import Traced, account_of, traced_ranks
from planner.observe.ideal.grid import grid_of
from planner.observe.traces.recorded import ObservedFiles, Recorded


@dataclass(frozen=True, slots=True)
class Pair:
    """One rank's step as its trace shows it, and as it was expected."""

    rank: Traced
    found: Account
    expected: Account | None

    @property
    def stage(self) -> int | None:
        """The pipeline stage that the rank is of."""
        return self.rank.stage


def pairs_of(case: Case) -> tuple[Pair, ...]:
    """Every traced rank with what was expected of it; None where no price and no earlier run says it."""
    grid = grid_of(case)
    ranks = _ranks(case.recorded, grid.stage if grid else None)
    has_pipeline = grid is None or grid.pp > 1
    earlier = case.earlier
    others = _ranks(earlier.recorded, grid.stage if grid else None) if isinstance(earlier, ObservedFiles) else []
    if case.prediction is not None and case.prediction.kind == "run":
        return tuple(Pair(rank, account_of(rank, has_pipeline), _then(rank, others, has_pipeline)) for rank in ranks)
    priced = _priced(case, {rank.stage for rank in ranks})
    return tuple(Pair(rank, account_of(rank, has_pipeline), priced.get(rank.stage)) for rank in ranks)


def _ranks(recorded: Recorded | None, stage_of: Callable[[int], int] | None) -> list[Traced]:
    return traced_ranks(recorded.traces.ranks, stage_of) if recorded and recorded.traces else []


def _then(rank: Traced, others: Sequence[Traced], has_pipeline: bool) -> Account | None:
    """The same rank in the earlier run."""
    same = next((one for one in others if one.report.rank == rank.report.rank), None)
    return None if same is None else account_of(same, has_pipeline)


def _priced(case: Case, stages: set[int | None]) -> dict[int | None, Account]:
    """The accounts of the plan's stages."""
    candidate = case.candidate
    if candidate is None or not stages - {None}:
        return {}
    pipeline, pp = candidate.run(), int(candidate.shape.pp)
    known = [stage for stage in stages if stage is not None and stage < pp]
    return {stage: planned(candidate, pipeline, stage, "in the plan") for stage in known}
