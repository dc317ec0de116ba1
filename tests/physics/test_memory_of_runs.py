"""Bytes of stages and of whole runs against what allocators showed."""

from __future__ import annotations

import pytest

from planner.validate.rows import Row, load_rows
from planner.validate.score import evaluate_rows

B200 = [row for row in load_rows() if row.family == "simumax-b200"]


@pytest.mark.parametrize("row", B200[::3], ids=lambda row: row.id)
def test_allocated_memory_of_megatron_on_b200(row: Row) -> None:
    """SimuMax's published runs, release v1.2: max_memory_allocated of the worst rank."""
    (scored,) = evaluate_rows([row])
    assert scored.memory_error == pytest.approx(0.0, abs=0.02)


def test_allocated_memory_is_right_on_average() -> None:
    errors = [abs(one.memory_error) for one in evaluate_rows(B200) if one.memory_error is not None]
    assert sum(errors) / len(errors) < 0.01
