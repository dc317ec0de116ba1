"""The waterfall: measured less predicted seconds of a step, in named terms that add up to the difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from planner.layout.candidate import Candidate
from planner.layout.price import price_layout
from planner.observe.case import Case
from planner.observe.gap.account import differences, netted
from planner.observe.gap.pairs import paired
from planner.observe.gap.terms import HOST_GAPS, PASSES, PROFILER, TERMS, UNATTRIBUTED
from planner.observe.gap.timed import priced, timed
from planner.observe.observation import Prediction, Term
from planner.observe.remedy.running import differences as stated_otherwise
from planner.report.format import seconds

_SMALL, _NOTHING = 1e-6, 1e-9
"""Shares of a step: a smaller term is the rounding of clocks and counts to the rest, a smaller rest is nothing."""


def waterfall(case: Case, known: Sequence[Term] = ()) -> tuple[Term, ...]:
    """Terms that add up to the observed step less the predicted one; nothing where one of them is not known.

    `known` are what switches cost that the log shows otherwise than the plan (`recipe_terms`): other terms are beside
    the price of the recipe that the run has. Beside an earlier run's traces nothing is known better than they show.
    """
    step_s, prediction = case.observation.step_s, case.prediction
    if step_s is None or prediction is None:
        return ()
    changed = _as_run(case) if known and prediction.kind == "plan" else None
    where = f"in {PurePath(prediction.source).name}{' with the recipe of the log' if changed else ''}"
    terms, rest = _of_traces(case, changed or case.candidate, where)
    if terms and prediction.kind == "run":
        known = ()
    if not terms:
        terms, rest = _of_timers(case, changed, where)
        terms = _without(terms, known) if prediction.kind == "run" else terms
    if not terms:
        rest = _alone(step_s, prediction)
    terms = [term for term in [*known, *terms] if abs(term.seconds) > _SMALL * step_s]
    left_s = step_s - prediction.step_s - sum(term.seconds for term in terms)
    if abs(left_s) > _NOTHING * step_s:
        terms.append(Term(term=UNATTRIBUTED, seconds=left_s, evidence=rest))
    order = list(TERMS)
    return tuple(sorted(terms, key=lambda term: order.index(term.term) if term.term in order else -1))


def _without(terms: list[Term], known: Sequence[Term]) -> list[Term]:
    """The terms less what is known of them: switches act on passes."""
    known_s = sum(term.seconds for term in known)
    return [
        term.model_copy(update={"seconds": term.seconds - known_s, "recoverable_s": max(0.0, term.seconds - known_s)})
        if term.term == PASSES
        else term
        for term in terms
    ]


def _as_run(case: Case) -> Candidate | None:
    """The plan's layout with all that the log states otherwise."""
    stated = stated_otherwise(case)
    return stated[-1].candidate if stated else case.candidate


def _alone(step_s: float, prediction: Prediction) -> str:
    """A sentence where only the steps are known."""
    like_s = max(step_s, prediction.step_s)
    steps = f"{seconds(step_s, like_s)} a step, {seconds(prediction.step_s, like_s)} predicted by {prediction.source}"
    return f"{steps}; no file tells more than the step apart"


def _of_timers(case: Case, changed: Candidate | None, where: str) -> tuple[list[Term], str]:
    """Terms by the timers of the log, and a sentence on what they leave; none where they tell nothing apart.

    `changed` is priced in the plan's place.
    """
    prediction, observation = case.prediction, case.observation
    assert prediction is not None
    found, breakdown, expected = timed(observation, "by the log's timers"), observation.breakdown, None
    whole_s = prediction.step_s if changed is None else changed.step_s
    if found is not None and prediction.kind == "plan":
        whole = prediction.breakdown if changed is None else price_layout(changed).step.breakdown.model_dump()
        layout = changed or case.candidate
        expected = priced(whole, 0.0 if layout is None else layout.outside.tail_s, breakdown, where)
    elif case.earlier is not None and breakdown.keys() == prediction.breakdown.keys():
        expected = timed(case.earlier.observation, where)
    if found is None or expected is None:
        return [], ""
    left = (observation.step_s or 0.0) - found.total_s, whole_s - expected.total_s
    here, there = (seconds(max(0.0, one)) for one in left)
    rest = f"{here} of the step that no such timer has, {there} {where} beside them"
    return list(differences(found, expected)), rest


def _of_traces(case: Case, candidate: Candidate | None, where: str) -> tuple[list[Term], str]:
    """Terms by the trace of a typical rank, and a sentence on what they leave; none where nothing can be compared."""
    pair, step_s = paired(case, candidate, where), case.observation.step_s
    if pair is None or step_s is None:
        return [], ""
    rank, measured, expected = pair
    terms, prediction = list(differences(measured, expected)), case.prediction
    assert prediction is not None
    rest = (
        f"{seconds(step_s)} a step, {seconds(rank.wall_s)} in the mean of the steps {measured.where}; "
        f"{seconds(prediction.step_s)} are predicted, terms have {seconds(expected.total_s)} of them"
    )
    logged = {source.path for source in case.observation.sources} - set(case.recorded.kinds if case.recorded else ())
    if not logged:
        return terms, rest
    # of an earlier run, its own profiler is in both of its numbers
    then_s = prediction.step_s - expected.total_s if prediction.kind == "run" else 0.0
    return _with_profiler(terms, step_s, rank.wall_s, then_s), rest


def _with_profiler(terms: list[Term], step_s: float, traced_s: float, then_s: float) -> list[Term]:
    """The terms with the log's step less the traced one, beyond what it was in an earlier run.

    What a profiler adds is first taken out of host gaps, and is no term where the traced steps are the shorter ones.
    """
    seconds_s = step_s - traced_s - then_s
    if seconds_s >= 0:
        return terms
    before = f", {seconds(-then_s)} more in the earlier run's" if then_s < 0 else ""
    says = f"{seconds(step_s)} a step in the log, {seconds(traced_s)} in the trace, which a profiler slows down{before}"
    more = Term(term=PROFILER, seconds=seconds_s, evidence=says, recoverable_s=0.0)
    by_name = {term.term: term for term in [*terms, more]}
    gaps = by_name.get(HOST_GAPS)
    if gaps is not None and gaps.seconds > 0:
        net = netted({HOST_GAPS: gaps.seconds, PROFILER: seconds_s}, PROFILER)
        says = f"{gaps.evidence}; {seconds(gaps.seconds - net[HOST_GAPS])} of them are the profiler's own"
        by_name[HOST_GAPS] = gaps.model_copy(
            update={"seconds": net[HOST_GAPS], "recoverable_s": net[HOST_GAPS], "evidence": says}
        )
        by_name[PROFILER] = more.model_copy(update={"seconds": net[PROFILER]})
    return list(by_name.values())
