"""The seconds and bytes of given layouts are those of before, to nine digits (`scripts/pin`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pinned_numbers import layouts

PINNED = json.loads((Path(__file__).parents[1] / "pinned" / "layouts.json").read_text())


def test_layouts_are_priced_as_before() -> None:
    now = layouts()
    assert now.keys() == PINNED.keys()
    changed = [name for name, values in now.items() if values != pytest.approx(PINNED[name], rel=1e-9)]
    assert not changed, f"{len(changed)} layouts changed, such as {changed[0]}"
