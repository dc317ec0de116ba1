"""Random shapes that a schedule is defined for."""

import random
from collections.abc import Callable

import pytest

from planner.schedule.orders import SCHEDULES, violation


@pytest.fixture
def random_shape() -> Callable[[str, random.Random], tuple[int, int, int]]:
    """pp, vpp and num_microbatches that a schedule accepts."""

    def draw(name: str, rng: random.Random) -> tuple[int, int, int]:
        kind = SCHEDULES[name]
        while True:
            pp = rng.randint(kind.min_pp, min(kind.max_pp, 9))
            vpp = rng.randint(kind.min_vpp, min(kind.max_vpp, 4))
            num_microbatches = rng.randint(1, 40)
            if violation(name, pp, vpp, num_microbatches) is None:
                return pp, vpp, num_microbatches

    return draw
