"""The waterfall: measured less predicted seconds of a step, and wall time per step less the steady step."""

from __future__ import annotations

from planner.observe.case import Case
from planner.observe.observation import Term

UNATTRIBUTED = "unattributed"


def waterfall(case: Case) -> tuple[Term, ...]:
    """Terms that add up to the observed step less the predicted one; nothing where one of them is not known."""
    step_s = case.observation.step_s
    if step_s is None or case.prediction is None:
        return ()
    gap_s = step_s - case.prediction.step_s
    return (Term(term=UNATTRIBUTED, seconds=gap_s, evidence="no file tells more than the step apart"),)


def beside_steps(case: Case) -> tuple[Term, ...]:
    """Terms that add up to the wall time per step less the steady step; nothing where lines have no times."""
    return ()
