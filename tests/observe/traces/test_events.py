"""Intervals of time, families of kernels as libraries spell them, and groups as trainers describe them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.observe.traces.events import (
    COMMUNICATION,
    NAMES,
    OTHER,
    ProcessGroup,
    Spans,
    axis_of,
    axis_of_description,
    family_of,
    intersect,
    length_ns,
    merge,
    ranks_by_stride,
    ranks_of,
    subtract,
    union,
    window,
)

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8)


def spans_of(pairs: list[tuple[int, int]]) -> Spans:
    starts = np.array([start for start, _ in pairs], np.int64)
    return union(starts, starts + np.array([length for _, length in pairs], np.int64))


def points(spans: Spans) -> set[int]:
    return {point for start, end in spans.tolist() for point in range(start, end)}


@given(PAIRS, PAIRS)
def test_spans_are_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b = spans_of(one), spans_of(other)
    assert points(a) == {point for start, length in one for point in range(start, start + length)}
    assert points(intersect(a, b)) == points(a) & points(b)
    assert points(subtract(a, b)) == points(a) - points(b)
    assert points(merge(a, b)) == points(a) | points(b)


@given(PAIRS)
def test_spans_are_sorted_and_apart_so_that_lengths_count_once(pairs: list[tuple[int, int]]) -> None:
    spans = spans_of(pairs)
    assert length_ns(spans) == len(points(spans))
    assert (spans[1:, 0] > spans[:-1, 1]).all()


def test_a_window_without_length_is_empty() -> None:
    assert length_ns(window(5, 5)) == 0
    assert window(2, 5).tolist() == [[2, 5]]


KERNELS = [
    ("communication", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    ("communication", "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)"),
    ("communication", "gloo:all_reduce"),
    ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x128"),
    ("attention", "attn_fwd"),
    ("attention", "aiter::fmha_bwd_hd128_bf16_causal_a32_psskddv"),
    ("gemm", "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT"),
    ("gemm", "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64"),
    ("gemm", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"),
    ("gemm", "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(Params)"),
    ("norm", "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits>(Params)"),
    ("norm", "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)"),
    ("MoE routing", "_permute_kernel"),
    ("MoE routing", "void at::native::sbtopk::gatherTopK<float, unsigned int, 1, false>(TensorInfo)"),
    ("optimizer", "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(long)"),
    ("elementwise", "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"),
    (
        "elementwise",
        "void at::native::elementwise_kernel<128, 4, gpu_kernel_impl_nocast<BinaryFunctor, lambda(int)#1>>",
    ),
    ("casts and quantisation", "void transformer_engine::cast_transpose_fused_kernel_notaligned<true>(CTDBiasParam)"),
    ("fused by Inductor", "triton_red_fused_add_native_layer_norm_3"),
    ("loss", "void vocab_parallel_cross_entropy_kernel<float>()"),
    ("scan", "_chunk_scan_fwd_kernel"),
    (OTHER, "somebody_s_own_kernel"),
]


@pytest.mark.parametrize(("family", "name"), KERNELS)
def test_a_kernel_is_of_its_family(family: str, name: str) -> None:
    assert NAMES[family_of(name)] == family


def test_families_have_names_of_their_own() -> None:
    assert (NAMES[COMMUNICATION], NAMES[-1]) == ("communication", OTHER)
    assert len(set(NAMES)) == len(NAMES)


DESCRIPTIONS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP TENSOR_AND_CONTEXT_PARALLEL_GROUP mesh_tp",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP mesh_pp",
    "cp": "CONTEXT_PARALLEL_GROUP mesh_cp",
    "dp": "DATA_PARALLEL_GROUP DATA_PARALLEL_GROUP_WITH_CP mesh_dp_shard mesh_dp_shard_cp mesh_fsdp",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP mesh_ep",
    "etp": "EXPERT_TENSOR_PARALLEL_GROUP",
    "edp": "EXPERT_DATA_PARALLEL_GROUP INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP mesh_efsdp",
    "embedding": "EMBEDDING_GROUP POSITION_EMBEDDING_GROUP",
    "model": "MODEL_PARALLEL_GROUP",
    "world": "default_pg",
    None: "undefined",
}


@pytest.mark.parametrize("axis", DESCRIPTIONS)
def test_a_description_names_its_axis(axis: str | None) -> None:
    assert {axis_of_description(description) for description in DESCRIPTIONS[axis].split()} == {axis}
    assert axis_of_description("") is None


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
