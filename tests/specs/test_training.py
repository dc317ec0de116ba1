"""What sequences split into, for one layout and for many at once."""

from __future__ import annotations

from math import lcm

import numpy as np

from planner.specs.training import tokens_split


def test_two_chunks_for_each_rank_of_cp_of_whole_shards_for_tp() -> None:
    cps, shards = (axis.ravel() for axis in np.meshgrid([1, 2, 3, 8], [1, 2, 3, 4, 7]))
    expected = [cp * lcm(2, tp) if cp > 1 else tp for cp, tp in zip(cps.tolist(), shards.tolist(), strict=True)]
    assert tokens_split(cps, shards).tolist() == expected
    assert [tokens_split(cp, tp) for cp, tp in zip(cps.tolist(), shards.tolist(), strict=True)] == expected
