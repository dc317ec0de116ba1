"""Layouts as they are written down, and what sequences split into."""

from __future__ import annotations

from math import lcm
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from planner.errors import SpecError
from planner.specs.problems import checked
from planner.specs.training import Parallelism, TrainingSpec, tokens_split


def test_two_chunks_for_each_rank_of_cp_of_whole_shards_for_tp() -> None:
    cps, shards = (axis.ravel() for axis in np.meshgrid([1, 2, 3, 8], [1, 2, 3, 4, 7]))
    expected = [cp * lcm(2, tp) if cp > 1 else tp for cp, tp in zip(cps.tolist(), shards.tolist(), strict=True)]
    assert tokens_split(cps, shards).tolist() == expected
    assert [tokens_split(cp, tp) for cp, tp in zip(cps.tolist(), shards.tolist(), strict=True)] == expected


@pytest.mark.parametrize(
    ("stated", "kept", "ranks"),
    [
        (False, None, None),
        ("no", None, None),
        (True, "all", None),
        (8, 8, 8),
        ("FSDP", "FSDP", None),
        ("DeepSpeed ZeRO-3", "DeepSpeed ZeRO-3", None),
        ("FSDP2 shard 32", "FSDP2 shard 32", 32),
        ("megatron-fsdp(group=64)", "megatron-fsdp(group=64)", 64),
    ],
)
def test_fully_sharded_or_not(stated: Any, kept: Any, ranks: int | None) -> None:
    layout = Parallelism.model_validate({"fsdp": stated})
    assert (layout.fsdp, layout.fsdp_shard_size) == (kept, ranks)


@pytest.mark.parametrize("stated", [0, "0", -4])
def test_no_ranks_to_shard_over(stated: Any) -> None:
    with pytest.raises(ValidationError, match="give at least 1"):
        Parallelism.model_validate({"fsdp": stated})


@pytest.mark.parametrize("stated", ["bogus", "3.5", "ZeRO-1", "nothing at all"])
def test_words_that_say_no_group_are_refused(stated: str) -> None:
    with pytest.raises(SpecError) as caught:
        checked(Parallelism, {"fsdp": stated})
    assert f"fsdp: {stated!r} is text" in caught.value.message
    for hint in ("8", "all", "none"):
        Parallelism.model_validate({"fsdp": hint})
    assert caught.value.hint == "give a number of ranks, all or none"


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"recompute_num_layers": 2}, "recompute_num_layers 2 goes with recompute full, not none"),
        ({"recompute": "selective", "recompute_num_layers": 2}, "full, not selective"),
        ({"recompute": "full", "recompute_modules": ("mlp", "moe")}, "mlp,moe go with recompute selective, not full"),
    ],
)
def test_ways_to_recompute_that_exclude_each_other_are_refused(stated: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        checked(Parallelism, stated)


def test_a_histogram_of_imbalances_has_a_mean_and_a_tail() -> None:
    training = TrainingSpec(seq_length=1, global_batch_size=1, moe_imbalance="2.5:1,1.2:8,1:1")  # type: ignore[arg-type]
    assert training.moe_imbalance == pytest.approx(1.31)
    assert training.moe_peak_imbalance == 2.5
    with pytest.raises(ValueError, match="histogram"):
        TrainingSpec(seq_length=1, global_batch_size=1, moe_imbalance="1.2:x")  # type: ignore[arg-type]
