"""Most of these tests price published runs, and many of them the same."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def asked_once(priced_once: None) -> None:
    """Each run is priced once."""
