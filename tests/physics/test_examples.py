"""Examples in docstrings are true."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from planner import shape
from planner.physics import pricing


@pytest.mark.parametrize("module", [pricing, shape])
def test_examples_are_true(module: ModuleType) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0
