"""Process groups by the descriptions that Megatron-LM and torchtitan give them."""

from __future__ import annotations

import pytest

from planner.observe.traces.events import (
    ProcessGroup,
    axis_of,
    axis_of_description,
    ranks_by_stride,
    ranks_of,
)

DESCRIPTIONS = [
    ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
    ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp"),
    ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
    ("CONTEXT_PARALLEL_GROUP", "cp"),
    ("DATA_PARALLEL_GROUP", "dp"),
    ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
    ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
    ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "ep"),
    ("EXPERT_TENSOR_PARALLEL_GROUP", "etp"),
    ("EXPERT_DATA_PARALLEL_GROUP", "edp"),
    ("INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "edp"),
    ("EMBEDDING_GROUP", "embedding"),
    ("POSITION_EMBEDDING_GROUP", "embedding"),
    ("MODEL_PARALLEL_GROUP", "model"),
    ("mesh_tp", "tp"),
    ("mesh_pp", "pp"),
    ("mesh_cp", "cp"),
    ("mesh_ep", "ep"),
    ("mesh_dp_shard", "dp"),
    ("mesh_dp_shard_cp", "dp"),
    ("mesh_fsdp", "dp"),
    ("mesh_efsdp", "edp"),
    ("default_pg", "world"),
    ("undefined", None),
    ("", None),
]


@pytest.mark.parametrize(("description", "axis"), DESCRIPTIONS)
def test_a_description_names_its_axis(description: str, axis: str | None) -> None:
    assert axis_of_description(description) == axis


@pytest.mark.parametrize(
    ("ranks", "axis"),
    [((0, 1), "tp"), ((1, 3), "cp"), ((0, 4, 8, 12), "dp"), ((3, 19), "pp"), ((0, 3), "group 7 (2 ranks, stride 3)")],
)
def test_size_and_stride_name_an_axis_of_the_grid(ranks: tuple[int, ...], axis: str) -> None:
    grid = {"tp": 2, "cp": 2, "dp": 4, "pp": 2}
    assert axis_of(ProcessGroup("7", "undefined", ranks, len(ranks)), grid) == axis


@pytest.mark.parametrize("text", ["[0, 1, ...]", "0, 1", "[a]", "[" + "1," * 10**6 + "]", [0, "1"], [True], [-1], None])
def test_lists_that_are_cut_or_odd_say_no_ranks(text: object) -> None:
    assert ranks_of(text) == ()


def test_ranks_are_read_from_lists_and_from_strides() -> None:
    assert ranks_of("[0, 8, 16]") == ranks_of([0, 8, 16]) == ranks_by_stride(0, 8, 3) == (0, 8, 16)
    assert ranks_by_stride(0, -1, 3) == ranks_by_stride(0, 0, 3) == ranks_by_stride("0", 1, 2) == ()
