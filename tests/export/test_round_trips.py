"""Random jobs return from every target's files with the same seconds and the same bytes on every stage."""

from __future__ import annotations

import pytest
from round_trips import RUNTIME_OF, round_trips

from planner.export.targets import SOURCES, TRAINERS


@pytest.mark.thorough(4)
@pytest.mark.parametrize("target", RUNTIME_OF)
def test_exports_come_back_with_the_same_price(target: str) -> None:
    for trip in round_trips(target, 20):
        assert trip.is_same, str(trip)
        assert trip.imported.unknown == {}, str(trip)


def test_every_target_is_tried() -> None:
    assert set(RUNTIME_OF) == set(TRAINERS)
    assert set(TRAINERS) <= set(SOURCES)
