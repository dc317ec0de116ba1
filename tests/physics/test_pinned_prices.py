"""Prices of layers of every kind are those of before, to nine digits (`scripts/pin`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pinned_numbers import prices

PINNED = json.loads((Path(__file__).parents[1] / "pinned" / "prices.json").read_text())


def test_prices_are_those_of_before() -> None:
    now = prices()
    assert now.keys() == PINNED.keys()
    changed = [name for name, values in now.items() if values != pytest.approx(PINNED[name], rel=1e-9)]
    assert not changed, f"{len(changed)} prices changed, such as {changed[0]}"
