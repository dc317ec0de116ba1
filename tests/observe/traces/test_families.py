"""Kernels by their names, as CUDA and ROCm libraries spell them."""

from __future__ import annotations

import pytest

from planner.observe.traces.events import COMMUNICATION, FAMILIES, NAMES, OTHER, family_of

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


def test_one_family_communicates_and_every_name_has_one() -> None:
    assert [index for index, family in enumerate(FAMILIES) if family.communicates] == [COMMUNICATION]
    assert FAMILIES[-1].name == OTHER
    assert len(set(NAMES)) == len(NAMES)
