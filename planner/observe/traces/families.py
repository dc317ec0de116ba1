"""Kernels by family: a table of patterns for the names that CUDA, ROCm, Triton, CPU and collective kernels have.

The first row that matches wins. Names are public: cuBLAS, CUTLASS, hipBLASLt (`Cijk_…`), Composable Kernel, AITER,
cuDNN, PyTorch's `at::native`, Inductor's `triton_…`, Transformer Engine, Apex, Megatron-LM, DeepEP, NCCL and RCCL.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels that do the same kind of work."""

    name: str
    pattern: str
    communicates: bool = False


OPTIMIZER = "optimizer"
OTHER = "other"
"""The family of names that no row knows; its share is told, with the largest of them."""

FAMILIES = (
    Family(
        "communication",
        r"nccl|rccl|^gloo:|c10d::|multimem_\w*(reduce|gather)|(one|two)_?shot_all_?reduce|cross_device_reduce|symm_mem"
        r"|nvshmem|ishmem|deep_?ep|hybrid_?ep|(intranode|internode)::|low_latency::|allreduce_\w*kernel|mscclpp?"
        r"|userbuffers|all_?gather_kernel|reduce_?scatter_kernel|quick_?reduce",
        communicates=True,
    ),
    Family("fused by Inductor", r"^triton_(poi|red|per|for|unk|_)"),
    Family(
        "attention",
        r"flash|fmha|attn|attention|scaled_dot_product|sdpa|\bmha_|sage_fwd|cudnn_generated_.*sdp|_attn_|mla_",
    ),
    Family(
        "MoE routing",
        r"permute_kernel|unpermute|moe_|_moe|topk|top_k|router|gating|expert|group_?token|token_dispatch|sinkhorn"
        r"|sort_chunks|row_id_map|aux_loss|(gatherTopK|sbtopk|mbtopk)",
    ),
    Family(
        OPTIMIZER,
        r"adam|\blamb(?!da)|adagrad|muon|newton_?schulz|multi_tensor|_foreach_|fused_sgd|optimizer|l2norm",
    ),
    Family("loss", r"cross_?entropy|nll_loss|log_?softmax|logsumexp|vocab_parallel"),
    Family("softmax", r"soft_?max"),
    Family(
        "norm",
        r"layer_?norm|rms_?norm|batch_?norm|group_?norm|\bln_(fwd|bwd)|_ln_|GammaBeta|RowwiseMoments|bn_(fw|bw)_|Welford"
        r"|native_norm|rmsnorm",
    ),
    Family("position embedding", r"rotary|rope"),
    Family(
        "scan",
        r"selective_scan|mamba|chunk_(scan|state|cumsum|fwd|bwd)|ssd_|causal_conv1d|gated_delta|state_passing",
    ),
    Family(
        "convolution",
        r"conv(?!ert)|im2col|col2im|max_pool|average_pool|winograd|wgrad_alg|dgrad_engine|wgrad2d|scudnn"
        r"|implicit_gemm|igemm_(fwd|bwd|wrw)|fprop|dgrad_opt",
    ),
    Family(
        "gemm",
        r"gemm|Cijk_|nvjet|cublas|matmul|cutlass|splitk_?reduce|\bbmm_|gemv|_mm_|\bck::kernel_|addmm"
        r"|aten::(mm|bmm|linear)|xmma_|hipblaslt|mma_|dot_kernel|deep_?gemm|tensile",
    ),
    Family("embedding", r"embedding|pooled_embs|indexing_backward|index_?select|vectorized_gather"),
    Family(
        "casts and quantisation",
        r"quant|cast_transpose|fp8|mxfp|amax|float8|_to_copy|to_float|(b?float16|half)_copy|(?<!no)cast",
    ),
    Family(
        "copies",
        r"copy|CatArray|transpose|contiguous|aten::(cat|clone|to|stack|fill_|zero_)|memcpy|memset|ToN[hc]|pad",
    ),
    Family(
        "elementwise",
        r"elementwise|Functor|gelu|silu|swiglu|geglu|\brelu|dropout|bias|act_and_mul|activation|tanh|sigmoid"
        r"|aten::(add|mul|sub|div|normal|uniform|rand|exp|neg|pow|sqrt|masked_fill|where|copy)|distribution_|SubTensorOp",
    ),
    Family("reductions", r"reduce|aten::(sum|mean|max|min|norm)|argmax|argmin|cunn_|Reduce"),
    Family("sorting and indexing", r"cub::|sort|scatter|gather|index|cumsum|scan|nonzero|unique|thrust|rocprim|hipcub"),
    Family("dispatch on the host", r"^aten::|^autograd::|Backward\d*$|^torch::|^detach$"),
    Family(OTHER, ""),
)

NAMES = tuple(family.name for family in FAMILIES)
_PATTERNS = tuple(re.compile(family.pattern, re.IGNORECASE) for family in FAMILIES)
COMMUNICATION = 0
"""The index of the one family that communicates."""


def family_of(name: str) -> int:
    """The index in FAMILIES of a kernel's name."""
    return next(index for index, pattern in enumerate(_PATTERNS) if pattern.search(name))


def families_of(names: Sequence[str]) -> NDArray[np.int64]:
    """`family_of` of each name."""
    return np.array([family_of(name) for name in names], np.int64)
