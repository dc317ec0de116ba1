"""Most of these tests price published runs, and many of them the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from remembered import Prices


@pytest.fixture(scope="module", autouse=True)
def asked_once(prices: Prices) -> Iterator[None]:
    """Each run is priced once, for what a module sets up too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.layout.runs.price_given", prices)
        yield
