"""Commands ask for the same few jobs again and again: these are searched and priced once."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def asked_once(request: pytest.FixtureRequest) -> None:
    """But not where a test is marked `anew`, since it holds two searches beside each other."""
    if request.node.get_closest_marker("anew") is None:
        request.getfixturevalue("searched_once")
        request.getfixturevalue("priced_once")
