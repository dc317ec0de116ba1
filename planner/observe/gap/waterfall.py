"""The waterfall: measured less predicted seconds of a step, in named terms that add up to the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.layout.candidate import Candidate
from planner.observe.case import Case
from planner.observe.gap.account import Account, differences, netted
from planner.observe.gap.planned import planned
from planner.observe.gap.terms import (
    BUBBLE,
    EXCHANGES,
    HOST_GAPS,
    PASSES,
    PIPELINE,
    PP_LINK_RATE,
    PROFILER,
    TERMS,
    UNATTRIBUTED,
)
from planner.observe.gap.timed import priced, timed
from planner.observe.gap.traced import Traced, account_of, traced_ranks, typical, unnamed
from planner.observe.observation import Term
from planner.observe.traces.recorded import ObservedFiles, Recorded
from planner.report.format import seconds
from planner.shape import FloatArray

_SMALL, _NOTHING = 1e-6, 1e-9
"""Shares of a step: a smaller term is the rounding of clocks and counts to the rest, a smaller rest is nothing."""


def waterfall(case: Case, known: Sequence[Term] = ()) -> tuple[Term, ...]:
    """Terms that add up to the observed step less the predicted one; nothing where one of them is not known.

    `known` are terms that something else than times tells, such as a switch that the log shows off: they are taken out
    of what no file tells further, but where traces show the seconds themselves.
    """
    step_s = case.observation.step_s
    if step_s is None or case.prediction is None:
        return ()
    gap_s = step_s - case.prediction.step_s
    terms = _of_traces(case, step_s)
    if not terms:
        terms = _without(_of_timers(case, step_s), known)
    terms = [term for term in terms if abs(term.seconds) > _SMALL * step_s]
    left_s = gap_s - sum(term.seconds for term in terms)
    if abs(left_s) > _NOTHING * step_s:
        terms.append(Term(term=UNATTRIBUTED, seconds=left_s, evidence=_rest(case, terms)))
    order = list(TERMS)
    return tuple(sorted(terms, key=lambda term: order.index(term.term) if term.term in order else -1))


def _without(terms: list[Term], known: Sequence[Term]) -> list[Term]:
    """The terms with those that are known taken out of the passes, where timers tell these."""
    taken_s = sum(term.seconds for term in known)
    cut = [
        term.model_copy(update={"seconds": term.seconds - taken_s, "recoverable_s": max(0.0, term.seconds - taken_s)})
        if term.term == PASSES
        else term
        for term in terms
    ]
    return [*known, *cut]


def _rest(case: Case, terms: Sequence[Term]) -> str:
    """A sentence on what is left."""
    assert case.prediction is not None
    if not terms:
        ours, theirs = case.observation.step_s or 0.0, case.prediction.step_s
        like_s = max(ours, theirs)
        steps = f"{seconds(ours, like_s)} a step, {seconds(theirs, like_s)} predicted by {case.prediction.source}"
        return f"{steps}; no file tells more than the step apart"
    return "the rest: no timer or trace has it, or the prediction has it elsewhere"


def _of_timers(case: Case, step_s: float) -> list[Term]:
    """Terms by the timers of the log; none where they tell nothing apart."""
    prediction, breakdown = case.prediction, case.observation.breakdown
    assert prediction is not None
    found = timed(breakdown, step_s, "by the log's timers")
    if found is None:
        return []
    where = f"in {prediction.source}"
    if prediction.kind == "plan":
        tail_s = 0.0 if case.candidate is None else case.candidate.outside.tail_s
        expected: Account | None = priced(prediction.breakdown, tail_s, breakdown, where)
    else:
        same = breakdown.keys() == prediction.breakdown.keys()
        expected = timed(prediction.breakdown, prediction.step_s, where) if same else None
    return [] if expected is None else list(differences(found, expected))


def _of_traces(case: Case, step_s: float) -> list[Term]:
    """Terms by the trace of a typical rank; none without traces of steps, or where their stage is not known."""
    assert case.prediction is not None
    ranks = _ranks(case.recorded, case.candidate)
    if not ranks:
        return []
    pair = _beside_plan(case, ranks) if case.prediction.kind == "plan" else _beside_run(case, ranks)
    if pair is None:
        return []
    rank, measured, expected = pair
    if unnamed(rank):
        measured, expected = _merged(measured, expected)
    terms = list(differences(measured, expected))
    logged = {source.path for source in case.observation.sources} - set(case.recorded.kinds if case.recorded else ())
    return _with_profiler(terms, rank, step_s) if logged else terms


def _ranks(recorded: Recorded | None, candidate: Candidate | None) -> list[Traced]:
    """The traced ranks of a run; the layout says the stage of those whose traces do not."""
    if recorded is None or recorded.traces is None:
        return []
    if candidate is None:
        return traced_ranks(recorded.traces.ranks)
    pp, stride = int(candidate.shape.pp), int(candidate.shape.stage_stride)
    return traced_ranks(recorded.traces.ranks, lambda rank: rank // stride % pp)


def _beside_plan(case: Case, ranks: Sequence[Traced]) -> tuple[Traced, Account, Account] | None:
    """The typical rank, its account, and that of the plan's rank of the same stage."""
    candidate, prediction = case.candidate, case.prediction
    if candidate is None or prediction is None:
        return None
    pp, rank = int(candidate.shape.pp), typical(ranks)
    stage = 0 if pp == 1 else rank.stage
    if stage is None or stage >= pp:
        return None
    pipeline = candidate.run()
    expected = planned(candidate, pipeline, stage, f"in {prediction.source}{f' for stage {stage}' if pp > 1 else ''}")
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


def _beside_run(case: Case, ranks: Sequence[Traced]) -> tuple[Traced, Account, Account] | None:
    """The typical rank, its account, and that of the earlier run's same rank, or of one of its stage."""
    assert case.prediction is not None
    earlier = case.earlier
    others = _ranks(earlier.recorded if isinstance(earlier, ObservedFiles) else None, case.candidate)
    rank = typical(ranks)
    same = [one for one in others if one.report.rank == rank.report.rank] or [
        one for one in others if one.stage == rank.stage and rank.stage is not None
    ]
    if not same:
        return None
    has_pipeline = case.candidate is None or int(case.candidate.shape.pp) > 1
    measured, expected = (account_of(one, has_pipeline) for one in (rank, typical(same)))
    return rank, measured, replace(expected, where=f"{expected.where} in {case.prediction.source}")


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


def _with_profiler(terms: list[Term], rank: Traced, step_s: float) -> list[Term]:
    """The terms with the log's step less the traced one; what a profiler adds is first taken out of host gaps."""
    more = Term(
        term=PROFILER,
        seconds=step_s - rank.wall_s,
        evidence=f"{seconds(step_s)} a step in the log, {seconds(rank.wall_s)} in the trace, which a profiler slowed",
        recoverable_s=0.0,
    )
    by_name = {term.term: term for term in [*terms, more]}
    gaps = by_name.get(HOST_GAPS)
    if gaps is not None and more.seconds < 0 < gaps.seconds:
        net = netted({HOST_GAPS: gaps.seconds, PROFILER: more.seconds}, PROFILER)
        says = f"{gaps.evidence}; {seconds(gaps.seconds - net[HOST_GAPS])} of them are the profiler's own"
        by_name[HOST_GAPS] = gaps.model_copy(
            update={"seconds": net[HOST_GAPS], "recoverable_s": net[HOST_GAPS], "evidence": says}
        )
        by_name[PROFILER] = more.model_copy(update={"seconds": net[PROFILER]})
    return list(by_name.values())
