"""The account of a traced rank beside the one that was expected of it: the plan's stage, or an earlier run's rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.layout.candidate import Candidate
from planner.observe.case import Case
from planner.observe.gap.account import Account
from planner.observe.gap.planned import planned
from planner.observe.gap.terms import BUBBLE, EXCHANGES, PIPELINE, PP_LINK_RATE
from planner.observe.gap.traced import Traced, account_of, traced_ranks, typical, unnamed
from planner.observe.ideal.grid import grid_of
from planner.observe.traces.recorded import ObservedFiles, Recorded
from planner.shape import FloatArray

Pair = tuple[Traced, Account, Account]
"""A traced rank, its account, and the expected one."""


def paired(case: Case, candidate: Candidate | None, where: str) -> Pair | None:
    """The typical rank beside the candidate, or the earlier run; None without traces of steps and their stage."""
    assert case.prediction is not None
    ranks = _ranks(case, case.recorded)
    if not ranks:
        return None
    if case.prediction.kind == "run":
        pair = _beside_run(case, ranks, where)
    else:
        pair = None if candidate is None else _beside_plan(candidate, where, ranks)
    if pair is None or not unnamed(pair[0]):
        return pair
    return pair[0], *_merged(*pair[1:])


def _ranks(case: Case, recorded: Recorded | None) -> list[Traced]:
    """The traced ranks of a run; the layout says the stage and the group of those whose traces do not."""
    if recorded is None or recorded.traces is None:
        return []
    grid = grid_of(case)
    return traced_ranks(recorded.traces.ranks, grid.stage if grid else None, only_group(case))


def only_group(case: Case) -> str:
    """The one group of a job's ranks where all exchanges are of one; else empty."""
    layout, grid = case.plan.parallelism if case.plan else None, grid_of(case)
    if grid is None:
        return ""
    sizes = {"tp": grid.tp, "cp": grid.cp, "dp": grid.dp, "pp": grid.pp, "ep": layout.ep if layout else 1}
    groups = [group for group, size in sizes.items() if size > 1]
    return groups[0] if len(groups) == 1 else ""


def _beside_plan(candidate: Candidate, source: str, ranks: Sequence[Traced]) -> Pair | None:
    """The typical rank, its account, and that of the plan's rank of the same stage."""
    pp, rank = int(candidate.shape.pp), typical(ranks)
    stage = 0 if pp == 1 else rank.stage
    if stage is None or stage >= pp:
        return None
    pipeline = candidate.run()
    expected = planned(candidate, pipeline, stage, f"{source}{f' for stage {stage}' if pp > 1 else ''}")
    measured = account_of(rank, has_pipeline=pp > 1)
    if pp == 1:
        return rank, measured, expected
    factors = _observed_factors(candidate, ranks, pipeline.busy_s)
    if factors is None:
        return rank, measured, _one_pipeline(expected)
    replayed = replace(candidate, rank_factors=factors).run()
    bubble_s = replayed.makespan_s - float(replayed.busy_s[stage]) - float(replayed.transfer_s[stage])
    return rank, _split_pipeline(measured, bubble_s), expected


def _observed_factors(candidate: Candidate, ranks: Sequence[Traced], busy_s: FloatArray) -> tuple[float, ...] | None:
    """Factor on the seconds of each stage that makes it as busy as its traces show; None unless all are traced."""
    stages = range(int(candidate.shape.pp))
    own = [[rank for rank in ranks if rank.stage == stage] for stage in stages]
    if not all(own):
        return None
    given, step_overhead_s = candidate.rank_factors or (1.0,) * len(own), candidate.pricing.runtime.step_overhead_s
    took_s = [max(0.0, typical(traced).passes_s - step_overhead_s) for traced in own]
    return tuple(given[stage] * took_s[stage] / float(busy_s[stage]) for stage in stages)


def _split_pipeline(account: Account, bubble_s: float) -> Account:
    """The account with the waits of its pipeline cut into a bubble and what is left for transfers."""
    parts = dict(account.parts)
    waited_s = parts.pop(PIPELINE)
    bubble_s = min(bubble_s, waited_s)
    says = "the bubble is that of the plan's order replayed with the traced stages"
    details = {**account.details, BUBBLE: says, PP_LINK_RATE: f"{says}, transfers are the rest"}
    return replace(account, parts={**parts, BUBBLE: bubble_s, PP_LINK_RATE: waited_s - bubble_s}, details=details)


def _one_pipeline(account: Account) -> Account:
    """The account with bubble and transfers of its pipeline as one number."""
    parts = dict(account.parts)
    both_s = parts.pop(BUBBLE, 0.0) + parts.pop(PP_LINK_RATE, 0.0)
    return replace(account, parts={**parts, PIPELINE: both_s + parts.get(PIPELINE, 0.0)})


def _beside_run(case: Case, ranks: Sequence[Traced], where: str) -> Pair | None:
    """The typical rank, its account, and that of the earlier run's same rank, or of one of its stage."""
    assert case.prediction is not None
    earlier = case.earlier
    others = _ranks(case, earlier.recorded if isinstance(earlier, ObservedFiles) else None)
    rank = typical(ranks)
    same = [one for one in others if one.report.rank == rank.report.rank] or [
        one for one in others if one.stage == rank.stage and rank.stage is not None
    ]
    if not same:
        return None
    grid = grid_of(case)
    has_pipeline = grid is None or grid.pp > 1
    measured, expected = (account_of(one, has_pipeline) for one in (rank, typical(same)))
    return rank, measured, replace(expected, where=f"{expected.where} {where}")


def _merged(measured: Account, expected: Account) -> tuple[Account, Account]:
    """Both accounts with the exchanges of groups that the trace does not name as one number."""
    missing = expected.exchanges.keys() - measured.exchanges.keys()
    waits = [] if measured.parts.get(PIPELINE) or measured.parts.get(BUBBLE) else [PIPELINE, BUBBLE, PP_LINK_RATE]

    def merged(account: Account) -> Account:
        shown_s = sum(one.busy_s - one.hidden_s for name, one in account.exchanges.items() if name in missing)
        waited_s = sum(account.parts.get(name, 0.0) for name in waits)
        parts = {name: value for name, value in account.parts.items() if name not in waits}
        parts[EXCHANGES] = parts.get(EXCHANGES, 0.0) + shown_s + waited_s
        return replace(
            account,
            parts=parts,
            exchanges={name: one for name, one in account.exchanges.items() if name not in missing},
        )

    return merged(measured), merged(expected)
