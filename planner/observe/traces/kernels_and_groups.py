"""Kernels by family: a table of patterns for the names that CUDA, ROCm, Triton, CPU and collective kernels have.

The first row that matches wins. Names are public: cuBLAS, CUTLASS, hipBLASLt (`Cijk_…`), Composable Kernel, AITER,
cuDNN, PyTorch's `at::native`, Inductor's `triton_…`, Transformer Engine, Apex, Megatron-LM, DeepEP, NCCL and RCCL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """Kernels that do the same kind of work."""

    name: str
    pattern: str
    communicates: bool = False


OPTIMIZER = "optimizer"
OTHER = "other"
"""The family of names that no row knows; its share is told, with the largest of them."""

FAMILIES = (
    KernelFamily(
        "communication",
        r"nccl|rccl|^gloo:|c10d::|multimem_\w*(reduce|gather)|(one|two)_?shot_all_?reduce|cross_device_reduce|symm_mem"
        r"|nvshmem|ishmem|deep_?ep|hybrid_?ep|(intranode|internode)::|low_latency::|allreduce_\w*kernel|mscclpp?"
        r"|userbuffers|all_?gather_kernel|reduce_?scatter_kernel|quick_?reduce",
        communicates=True,
    ),
    KernelFamily("fused by Inductor", r"^triton_(poi|red|per|for|unk|_)"),
    KernelFamily(
        "attention",
        r"flash|fmha|attn|attention|scaled_dot_product|sdpa|\bmha_|sage_fwd|cudnn_generated_.*sdp|_attn_|mla_",
    ),
    KernelFamily(
        "MoE routing",
        r"permute_kernel|unpermute|moe_|_moe|topk|top_k|router|gating|expert|group_?token|token_dispatch|sinkhorn"
        r"|sort_chunks|row_id_map|aux_loss|(gatherTopK|sbtopk|mbtopk)",
    ),
    KernelFamily(
        OPTIMIZER,
        r"adam|\blamb(?!da)|adagrad|muon|newton_?schulz|multi_tensor|_foreach_|fused_sgd|optimizer|l2norm",
    ),
    KernelFamily("loss", r"cross_?entropy|nll_loss|log_?softmax|logsumexp|vocab_parallel"),
    KernelFamily("softmax", r"soft_?max"),
    KernelFamily(
        "norm",
        r"layer_?norm|rms_?norm|batch_?norm|group_?norm|\bln_(fwd|bwd)|_ln_|GammaBeta|RowwiseMoments|bn_(fw|bw)_|Welford"
        r"|native_norm|rmsnorm",
    ),
    KernelFamily("position embedding", r"rotary|rope"),
    KernelFamily(
        "scan",
        r"selective_scan|mamba|chunk_(scan|state|cumsum|fwd|bwd)|ssd_|causal_conv1d|gated_delta|state_passing",
    ),
    KernelFamily(
        "convolution",
        r"conv(?!ert)|im2col|col2im|max_pool|average_pool|winograd|wgrad_alg|dgrad_engine|wgrad2d|scudnn"
        r"|implicit_gemm|igemm_(fwd|bwd|wrw)|fprop|dgrad_opt",
    ),
    KernelFamily(
        "gemm",
        r"gemm|Cijk_|nvjet|cublas|matmul|cutlass|splitk_?reduce|\bbmm_|gemv|_mm_|\bck::kernel_|addmm"
        r"|aten::(mm|bmm|linear)|xmma_|hipblaslt|mma_|dot_kernel|deep_?gemm|tensile",
    ),
    KernelFamily("embedding", r"embedding|pooled_embs|indexing_backward|index_?select|vectorized_gather"),
    KernelFamily(
        "casts and quantisation",
        r"quant|cast_transpose|fp8|mxfp|amax|float8|_to_copy|to_float|(b?float16|half)_copy|(?<!no)cast",
    ),
    KernelFamily(
        "copies",
        r"copy|CatArray|transpose|contiguous|aten::(cat|clone|to|stack|fill_|zero_)|memcpy|memset|ToN[hc]|pad",
    ),
    KernelFamily(
        "elementwise",
        r"elementwise|Functor|gelu|silu|swiglu|geglu|\brelu|dropout|bias|act_and_mul|activation|tanh|sigmoid"
        r"|aten::(add|mul|sub|div|normal|uniform|rand|exp|neg|pow|sqrt|masked_fill|where|copy)|distribution_|SubTensorOp",
    ),
    KernelFamily("reductions", r"reduce|aten::(sum|mean|max|min|norm)|argmax|argmin|cunn_|Reduce"),
    KernelFamily(
        "sorting and indexing", r"cub::|sort|scatter|gather|index|cumsum|scan|nonzero|unique|thrust|rocprim|hipcub"
    ),
    KernelFamily("dispatch on the host", r"^aten::|^autograd::|Backward\d*$|^torch::|^detach$"),
    KernelFamily(OTHER, ""),
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


AXES = (
    # dispatch of tokens over experts and the tensor ranks inside them
    ("ep", r"expert_tensor_and_model"),
    ("etp", r"expert_tensor|\betp\b|mesh_etp"),
    ("edp", r"expert_data|data_modulo_expert|\befsdp\b|mesh_(efsdp|edp|ep_dp|dp_shard_mod_ep)"),
    ("ep", r"expert_model|expert_parallel|\bep(_group)?\b|_ep\b|deep_?ep|hybrid_?ep"),
    ("embedding", r"embedding_group|embd"),
    ("pp", r"pipeline|\bpp\b|_pp\b"),
    ("cp", r"^(hierarchical_)?context_parallel|^cp$|mesh_cp\b|ulysses|\bsp\b|sequence_parallel"),
    ("tp", r"^tensor_model_parallel|^tensor_parallel|^tp$|mesh_tp\b|^tensor_and_context|^tp_cp"),
    ("dp", r"data_parallel|\bdp\b|mesh_(dp|fsdp|hsdp|dp_\w+)|fsdp|zero|intra_distributed|inter_distributed|\bddp\b"),
    ("model", r"^model_parallel|^mp$"),
    ("world", r"default_pg|^world"),
)
"""(axis, pattern) of a group's description, in lower case; the first that matches wins."""

_AXIS_PATTERNS = tuple((axis, re.compile(pattern)) for axis, pattern in AXES)
GRID_ORDER = ("tp", "cp", "dp", "pp")
"""From ranks beside each other to ranks far apart, as Megatron and torchtitan lay them out."""
UNKNOWN = "unknown"
POINT_TO_POINT = "point to point"
PLANNED = {
    "tp": "tp", "cp": "cp", "ep": "ep", "etp": "ep", "dp": "dp", "edp": "dp", "pp": "pp", POINT_TO_POINT: "pp",
}  # fmt: skip
"""The group of a plan's step that a group of a trace counts to: a plan has expert tensor parallelism with ep."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group as a trace says it: ranks are unknown where the list was truncated and no stride is said."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()
    size: int | None = None

    @property
    def stride(self) -> int | None:
        """The distance of neighbours, where it is one number."""
        steps = {b - a for a, b in pairwise(self.ranks)}
        return steps.pop() if len(steps) == 1 else None

    @property
    def label(self) -> str:
        """The group in a report: its axis, or its size and stride."""
        axis = axis_of_description(self.description)
        if axis:
            return axis
        size = f"{self.size} ranks" if self.size else "ranks unknown"
        return f"group {self.name or '?'} ({size}{f', stride {self.stride}' if self.stride else ''})"


def axis_of_description(description: str) -> str | None:
    """The axis that a description names, or None."""
    lowered = description.strip().lower()
    return next((axis for axis, pattern in _AXIS_PATTERNS if pattern.search(lowered)), None)


def axis_of(group: ProcessGroup, grid: Mapping[str, int] | None = None) -> str:
    """The axis of a group: as described, else as its size and stride are in `grid` (sizes of tp, cp, dp and pp)."""
    described = axis_of_description(group.description)
    if described and described != "world":
        return described
    stride = 1
    for axis in GRID_ORDER if grid else ():
        size = (grid or {}).get(axis, 1)
        if size > 1 and group.size == size and group.stride == stride:
            return axis
        stride *= size
    return group.label


def ranks_of(text: object) -> tuple[int, ...]:
    """The ranks in a list, or in text such as `[0, 1]`; none where it was truncated or is something else."""
    if isinstance(text, str):
        if "..." in text or not re.fullmatch(r"\[[\d,\s]*\]", text) or len(text) > 10**6:
            return ()
        entries: Sequence[object] = [int(word) for word in re.findall(r"\d{1,9}", text)]
    else:
        entries = text if isinstance(text, list) else []
    good = all(isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < 10**7 for entry in entries)
    return tuple(entries) if good else ()  # type: ignore[arg-type]


def ranks_by_stride(start: object, stride: object, size: object) -> tuple[int, ...]:
    """The ranks of `Global rank start`, `Global rank stride` and `Group size`."""
    if not all(isinstance(number, int) and 0 <= number < 10**7 for number in (start, stride, size)):
        return ()
    assert isinstance(start, int)
    assert isinstance(stride, int)
    assert isinstance(size, int)
    return tuple(start + stride * index for index in range(min(size, 10**6))) if stride > 0 else ()
