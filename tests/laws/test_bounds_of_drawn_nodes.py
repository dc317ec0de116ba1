"""No bound by which the search prunes is above the replay of a split, whatever the job; its program finds what fits."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from laws.counting import law
from planner.trainers.load import RUNTIMES

sys.path.append(str(Path(__file__).parents[1] / "search"))

from test_bounds_of_search import num_held, random_problem


@law(2)
@given(st.integers(10**6, 10**9), st.sampled_from(RUNTIMES))
def test_no_bound_of_a_drawn_node_is_above_its_replay(seed: int, trainer: str) -> None:
    num_held(random_problem(seed, trainer=trainer), random.Random(seed))
