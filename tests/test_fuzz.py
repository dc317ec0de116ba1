"""A few hundred mutants for every reader; `scripts/fuzz` runs as many as one likes."""

from __future__ import annotations

import pytest
from fuzzing.readers import READERS
from fuzzing.run import fuzz

NUM_CASES = 60


@pytest.mark.parametrize("name", READERS)
def test_nothing_but_an_answer_or_an_error_with_a_hint_comes_of_a_mutant(name: str) -> None:
    escapes = fuzz(name, 0, NUM_CASES)
    assert not [(escape.seed, escape.problem) for escape in escapes]
