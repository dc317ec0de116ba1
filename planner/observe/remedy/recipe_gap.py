"""The recipe of a run beside the best one, switch by switch, and beside its plan's where the log states another."""

from __future__ import annotations

from dataclasses import dataclass

from planner.layout.candidate import Candidate
from planner.observe.case import Case
from planner.observe.observation import Term
from planner.observe.remedy.against import CAUSE_OF, RECIPE
from planner.observe.remedy.change import options_between, runtime_of, spoken
from planner.observe.remedy.estimate import best_of, expected_step_s
from planner.observe.remedy.moves import switch
from planner.observe.remedy.running import differences, layout_before, running, states_switches
from planner.observe.remedy.written import settings_between
from planner.trainers.switches import SWITCHES, written

LEAST_WORD = 0.02
"""Least share of a step that a better value has to win before a run is told that its recipe is at fault."""
OF_LOG = "the log's arguments"
"""The source of a prediction that the log itself states."""
_OF_LAYOUT = ("recompute", "zero_stage")
"""Settings that are no switches: what is recomputed is a cause of its own."""


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """A switch of a run that is not at its best value."""

    switch: str
    has: str
    better: str
    gain_s: float
    """Seconds of the step that the better value wins by itself, by the price, with the switches that it needs."""
    options: tuple[str, ...]
    """Words of `plan evaluate`."""
    settings: tuple[str, ...]
    """Lines of the trainer's files, as `plan export` writes them."""
    is_stated: bool
    """True where the log's own arguments say the value that the run has."""
    planned: str
    """The value in the plan; that of the run where the plan was made of the log."""

    @property
    def cause(self) -> str:
        """The name of the cause that this is, for which `remedy_for` has the remedy."""
        return CAUSE_OF.get(self.switch, RECIPE)

    @property
    def evidence(self) -> str:
        """The value in one sentence, and who says so."""
        says = "the log shows" if self.is_stated else "the plan has"
        return f"{says} {self.switch} {self.has}, and {self.better} is faster"


def recipe_gap(case: Case) -> tuple[RecipeRow, ...]:
    """The switches that would win something at another value, the most winning first; nothing without a plan.

    Only values that change no numerics, that the trainer's rules allow on this layout, and that fit.
    """
    now = running(case)
    if now is None or case.plan is None:
        return ()
    planned = {row.name: row.planned for row in differences(case)}
    rows = []
    for name in spoken(now):
        best = best_of(now, switch(name)(now))
        if best is not None:
            has, better = (written(SWITCHES[name].value_of(runtime_of(each))) for each in (now, best))
            gain_s = _gain_s(case, now, best)
            rows.append(
                RecipeRow(
                    name, has, better, gain_s, options_between(now, best), settings_between(case.plan, now, best),
                    name in case.observation.facts.stated_switches, planned.get(name, has),
                )
            )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.gain_s))


def _gain_s(case: Case, now: Candidate, best: Candidate) -> float:
    return (case.observation.step_s or now.step_s) - expected_step_s(case, now, best)


def recipe_terms(case: Case) -> tuple[Term, ...]:
    """The price of the layout under the log's recipe less that under the plan's, one switch at a time.

    The order is fixed, and the terms add up to the whole difference, whichever way switches act on each other. Beside
    an earlier run, the recipe is that of its log; nothing where that says none.
    """
    return tuple(term for _, term in _stated_otherwise(case))


def slower_settings(case: Case) -> dict[str, tuple[Term, ...]]:
    """The settings that the log states and that make the step longer, by the cause that each of them is.

    Beside a plan or an earlier run they are those that it has otherwise; where the log's own arguments are the plan,
    those with a better value that wins `LEAST_WORD` of the step.
    """
    found: dict[str, list[Term]] = {}
    if case.prediction is not None and case.prediction.source == OF_LOG:
        least_s = LEAST_WORD * case.prediction.step_s
        rows = [row for row in recipe_gap(case) if row.is_stated and row.gain_s > least_s]
        terms = [(row.switch, Term(term=row.switch, seconds=row.gain_s, evidence=row.evidence)) for row in rows]
    else:
        terms = [(name, term) for name, term in _stated_otherwise(case) if name not in _OF_LAYOUT]
    for name, term in terms:
        found.setdefault(CAUSE_OF.get(name, RECIPE), []).append(term)
    return {cause: tuple(of_cause) for cause, of_cause in found.items()}


def _stated_otherwise(case: Case) -> tuple[tuple[str, Term], ...]:
    """Each setting that the log states otherwise than what it is held against, with what that costs by the price."""
    before, terms, theirs = layout_before(case), list[tuple[str, Term]](), "the plan"
    if case.earlier is not None:
        theirs = "the earlier run"
        if not states_switches(Case(case.earlier.observation)):
            return ()
    for row in differences(case):
        assert before is not None
        cost_s = row.candidate.step_s - before.step_s
        says = f"the log shows {row.name} {row.has}, {theirs} has {row.planned}"
        more = Term(term=f"recipe: {row.name}", seconds=cost_s, evidence=says, recoverable_s=max(0.0, cost_s))
        terms.append((row.name, more))
        before = row.candidate
    return tuple(terms)
