"""Layouts as they are written down, and what sequences split into."""

from __future__ import annotations

from math import lcm
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from planner.specs.training import Parallelism, tokens_split


def test_two_chunks_for_each_rank_of_cp_of_whole_shards_for_tp() -> None:
    cps, shards = (axis.ravel() for axis in np.meshgrid([1, 2, 3, 8], [1, 2, 3, 4, 7]))
    expected = [cp * lcm(2, tp) if cp > 1 else tp for cp, tp in zip(cps.tolist(), shards.tolist(), strict=True)]
    assert tokens_split(cps, shards).tolist() == expected
    assert [tokens_split(cp, tp) for cp, tp in zip(cps.tolist(), shards.tolist(), strict=True)] == expected


@pytest.mark.parametrize(
    ("stated", "kept", "ranks"),
    [(False, None, None), ("no", None, None), (True, "all", None), (8, 8, 8), ("FSDP2 shard 32", "FSDP2 shard 32", 32)],
)
def test_fully_sharded_or_not(stated: Any, kept: Any, ranks: int | None) -> None:
    layout = Parallelism.model_validate({"fsdp": stated})
    assert (layout.fsdp, layout.fsdp_shard_size) == (kept, ranks)


@pytest.mark.parametrize("stated", [0, "0", -4])
def test_no_ranks_to_shard_over(stated: Any) -> None:
    with pytest.raises(ValidationError, match="give at least 1"):
        Parallelism.model_validate({"fsdp": stated})
