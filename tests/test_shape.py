"""What a shape derives from its sizes, for one shape and for arrays of them."""

import numpy as np
import pytest

from planner.errors import SpecError
from planner.physics.memory import optimizer_bytes
from planner.shape import Shape
from planner.trainers.load import load_runtime


def test_tokens_are_split_over_cp_and_over_tp_only_under_sequence_parallelism() -> None:
    shape = Shape(tp=8, cp=4, seq_length=8192, micro_batch_size=2)
    assert shape.tokens == 4096
    assert shape.shard_tokens == 4096
    sharded = Shape(tp=8, cp=4, seq_length=8192, micro_batch_size=2, sequence_parallel=1)
    assert sharded.tokens == 4096
    assert sharded.shard_tokens == 512


def test_ranks_and_the_replicas_of_an_expert() -> None:
    shape = Shape(tp=2, cp=2, pp=4, dp=16, ep=8, etp=1)
    assert shape.num_ranks == 256
    assert shape.expert_dp * shape.ep * shape.etp * shape.pp == shape.num_ranks
    assert Shape(tp=2, dp=16, ep=8, etp=2).expert_dp == 2


def test_of_checks_sizes_and_shards_over_all_data_parallel_ranks() -> None:
    shape = Shape.of(tp=2, cp=2, dp=32)
    assert shape == Shape(tp=2, cp=2, dp=32, shard_size=64)
    assert {shape: 1}[Shape.of(tp=2, cp=2, dp=32)] == 1
    assert Shape.of(dp=32, shard_size=8).shard_size == 8
    assert Shape.of(zero_stage=0, sequence_parallel=1).zero_stage == 0
    many = Shape.of(tp=np.array([1, 2]), dp=np.array([4, 8]), seq_length=4096)
    np.testing.assert_array_equal(many.shard_size, [4, 8])
    np.testing.assert_array_equal(many.seq_length, [4096, 4096])
    few = many.take(1)
    assert (int(few.tp), int(few.dp), int(few.shard_size)) == (2, 8, 8)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tp": 0}, "tp 0 is no size"), ({"dp": 2.0}, "dp 2.0 is no size"), ({"pp": "4"}, "pp 4 is no size"),
        ({"tp": np.array([1, -2])}, "tp"), ({"zero_stage": 4}, "zero_stage 4 is no size"),
        ({"sequence_parallel": 2}, "sequence_parallel 2 is no size"),
        ({"dp": 8, "shard_size": 3}, "shard_size 3 does not divide dp·cp 8"),
        ({"dp": np.array([8, 9]), "shard_size": 4}, "does not divide"),
    ],
)  # fmt: skip
def test_of_refuses_what_is_no_shape(sizes: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Shape.of(**sizes)


def test_a_shape_whose_shards_are_not_said_keeps_a_share_of_the_optimizer() -> None:
    """Over 32 ranks: what every rank held whole would be 32 times as much."""
    runtime = load_runtime("megatron")
    shape = Shape.of(tp=2, dp=32)
    assert optimizer_bytes(32e6, 0.0, shape, runtime) == 12 * 1e6
