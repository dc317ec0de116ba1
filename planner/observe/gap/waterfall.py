"""The waterfall: measured less predicted seconds of a step, in named terms that add up to the difference."""

from __future__ import annotations

from collections.abc import Sequence

from planner.layout.candidate import Candidate
from planner.layout.price import price_layout
from planner.observe.case import Case
from planner.observe.gap.account import differences, netted
from planner.observe.gap.pairs import paired
from planner.observe.gap.terms import HOST_GAPS, PROFILER, TERMS, UNATTRIBUTED
from planner.observe.gap.timed import priced, timed
from planner.observe.gap.traced import Traced
from planner.observe.observation import Prediction, Term
from planner.observe.remedy.running import differences as stated_otherwise
from planner.report.format import seconds

_NO_TIMER = "no timer or trace has it, or the prediction has it elsewhere"
_SMALL, _NOTHING = 1e-6, 1e-9
"""Shares of a step: a smaller term is the rounding of clocks and counts to the rest, a smaller rest is nothing."""


def waterfall(case: Case, known: Sequence[Term] = ()) -> tuple[Term, ...]:
    """Terms that add up to the observed step less the predicted one; nothing where one of them is not known.

    `known` are what switches cost that the log shows otherwise than the plan (`recipe_terms`): all other terms are
    beside the price of the recipe that the run has. They say nothing beside an earlier run.
    """
    step_s, prediction = case.observation.step_s, case.prediction
    if step_s is None or prediction is None:
        return ()
    known = known if prediction.kind == "plan" else ()
    candidate = _as_run(case) if known else case.candidate
    where = f"in {prediction.source}{' with the recipe of the log' if known else ''}"
    terms, rest = _of_traces(case, candidate, where)
    if not terms:
        terms, rest = _of_timers(case, candidate if known else None, where), _NO_TIMER
    if not terms:
        rest = _alone(step_s, prediction)
    terms = [term for term in [*known, *terms] if abs(term.seconds) > _SMALL * step_s]
    left_s = step_s - prediction.step_s - sum(term.seconds for term in terms)
    if abs(left_s) > _NOTHING * step_s:
        terms.append(Term(term=UNATTRIBUTED, seconds=left_s, evidence=rest))
    order = list(TERMS)
    return tuple(sorted(terms, key=lambda term: order.index(term.term) if term.term in order else -1))


def _as_run(case: Case) -> Candidate | None:
    """The plan's layout with all that the log states otherwise."""
    stated = stated_otherwise(case)
    return stated[-1].candidate if stated else case.candidate


def _alone(step_s: float, prediction: Prediction) -> str:
    """A sentence where only the steps are known."""
    like_s = max(step_s, prediction.step_s)
    steps = f"{seconds(step_s, like_s)} a step, {seconds(prediction.step_s, like_s)} predicted by {prediction.source}"
    return f"{steps}; no file tells more than the step apart"


def _of_timers(case: Case, changed: Candidate | None, where: str) -> list[Term]:
    """Terms by the timers of the log; none where they tell nothing apart. `changed` is priced in the plan's place."""
    prediction, observation = case.prediction, case.observation
    assert prediction is not None
    found = timed(observation, "by the log's timers")
    if found is None:
        return []
    breakdown = observation.breakdown
    if prediction.kind == "plan":
        whole = prediction.breakdown if changed is None else price_layout(changed).step.breakdown.model_dump()
        layout = changed or case.candidate
        tail_s = 0.0 if layout is None else layout.outside.tail_s
        return list(differences(found, priced(whole, tail_s, breakdown, where)))
    earlier = case.earlier
    if earlier is None or breakdown.keys() != prediction.breakdown.keys():
        return []
    expected = timed(earlier.observation, where)
    return [] if expected is None else list(differences(found, expected))


def _of_traces(case: Case, candidate: Candidate | None, where: str) -> tuple[list[Term], str]:
    """Terms by the trace of a typical rank, and a sentence on what they leave; none where nothing can be compared."""
    pair, step_s = paired(case, candidate, where), case.observation.step_s
    if pair is None or step_s is None:
        return [], ""
    rank, measured, expected = pair
    terms = list(differences(measured, expected))
    rest = (
        f"{seconds(step_s)} a step, the traced steps {measured.where.removeprefix('in ')} took "
        f"{seconds(rank.wall_s)} in the mean, and the prediction adds up to {seconds(expected.total_s)}"
    )
    logged = {source.path for source in case.observation.sources} - set(case.recorded.kinds if case.recorded else ())
    return (_with_profiler(terms, rank, step_s), _NO_TIMER) if logged else (terms, rest)


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
