"""Seeded mutants for every reader: 500 each, fewer where pricing makes one dear, and as many again with --thorough.

`scripts/fuzz` makes any number.
"""

import pytest
from fuzzing.readers import READERS
from fuzzing.run import fuzz

SLICE = 500
"""Mutants of one test; those behind the first of a reader are for --thorough."""
SLICES = [
    pytest.param(name, first, min(first + SLICE, reader.cases), marks=[pytest.mark.thorough(0)] if first else [])
    for name, reader in READERS.items()
    for first in range(0, reader.cases, SLICE)
]


@pytest.mark.parametrize(("name", "first", "last"), SLICES)
def test_nothing_but_an_answer_or_an_error_with_a_hint_comes_of_a_mutant(name: str, first: int, last: int) -> None:
    escapes = fuzz(name, first, last)
    assert not [(escape.seed, escape.problem) for escape in escapes]
