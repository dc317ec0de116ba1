"""A search looks at its clock between any two pieces of work, however large the job is."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from toys import toy_cluster, toy_model, toy_problem, toy_training

from planner.errors import SolverError
from planner.search import frontier
from planner.search.case import Deadline
from planner.search.frontier import blocks_of
from planner.search.search import plan


@pytest.mark.parametrize("pps", [[1] * 10, [5, 9, 1, 1, 1, 20, 3], [], [100]], ids=str)
def test_blocks_have_every_shape_once_and_few_ranks(pps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "BLOCK", 4)
    monkeypatch.setattr(frontier, "BLOCK_RANKS", 10)
    order = np.arange(len(pps))[::-1]
    blocks = [block.tolist() for block in blocks_of(order, np.array(pps, dtype=np.int64))]
    assert [index for block in blocks for index in block] == order.tolist()
    for block in blocks:
        assert 1 <= len(block) <= 4
        assert len(block) == 1 or sum(pps[index] for index in block) <= 10


def test_time_that_ends_anywhere_leaves_a_plan_that_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second later; shapes are opened two at a time."""
    monkeypatch.setattr(frontier, "BLOCK", 2)
    free = {"cp": (1,), "micro_batch_size": (1,), "recompute": ("none",), "zero_stage": (1,), "top": 1}
    problem = toy_problem(toy_model(4), toy_cluster(4), toy_training(8), gap_fraction=0.0, **free)
    ends = []
    for asks in (1, 4, 8, 1e9):
        monkeypatch.setattr("planner.search.case.time", SimpleNamespace(monotonic=count().__next__))
        limits = problem.limits.model_copy(update={"time_limit_s": asks})
        found = plan(problem.model, problem.cluster, problem.training, limits=limits, runtime=problem.runtime)
        ends.append(found.search.outcome)
    assert ends[:2] == ["feasible", "feasible"]
    assert ends[-1] in ("proven", "bounded")


def test_a_search_that_is_not_patient_gives_up_without_a_layout() -> None:
    late = Deadline(1.0, count().__next__, patient=False)
    assert Deadline(1.0, count().__next__).gives_up(has_layout=False) is False
    assert Deadline(1.0, count().__next__).gives_up(has_layout=True)
    with pytest.raises(SolverError, match="1 s"):
        late.gives_up(has_layout=False)
