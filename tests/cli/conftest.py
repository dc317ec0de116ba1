"""Commands ask for the same few jobs again and again: these are priced once."""

import pytest


@pytest.fixture(autouse=True)
def priced_but_anew(request: pytest.FixtureRequest) -> None:
    """But not where a test is marked `anew`, since it holds two searches beside each other."""
    if request.node.get_closest_marker("anew") is None:
        request.getfixturevalue("priced_once")
