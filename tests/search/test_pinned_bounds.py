"""Bounds of real jobs are those of before, to nine digits (`scripts/pin`): a looser one is noticed too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pinned_numbers import bounds

PINNED = json.loads((Path(__file__).parents[1] / "pinned" / "bounds.json").read_text())


def test_bounds_are_those_of_before() -> None:
    now = bounds()
    assert now.keys() == PINNED.keys()
    changed = [name for name, values in now.items() if values != pytest.approx(PINNED[name], rel=1e-9)]
    assert not changed, f"{len(changed)} bounds changed, such as {changed[0]}"
