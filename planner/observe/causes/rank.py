"""The likely causes of what a run shows, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence

from planner.observe.case import Case
from planner.observe.observation import Cause, Term, WhatIf


def causes_of(case: Case, waterfall: Sequence[Term], what_ifs: Sequence[WhatIf]) -> tuple[Cause, ...]:
    """Causes with evidence for them; nothing where a run shows none."""
    return ()
