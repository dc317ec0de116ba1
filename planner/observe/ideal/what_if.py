"""Steps replayed as if one operation, rank or stage were not slow."""

from __future__ import annotations

from planner.observe.case import Case
from planner.observe.observation import WhatIf


def what_ifs(case: Case) -> tuple[WhatIf, ...]:
    """The replays, the most winning first; nothing where no rank's own seconds are known."""
    return ()
