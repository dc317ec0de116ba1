"""The trainers that are known, a RuntimeSpec each, in the generations that differ."""

from __future__ import annotations

from typing import Any

from planner.errors import SpecError
from planner.specs.registry import nearest
from planner.trainers.features import ONE_SCALE, SCALES_BY_ROW
from planner.trainers.spec import RuntimeSpec

TORCH_SCHEDULES = (
    "none", "gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
    "dualpipe-v", "auto",
)  # fmt: skip
"""What torch.distributed.pipelining runs: its own classes; any order through its CSV runtime (`auto`)."""

NCCL_WAIT_US = 46.77
"""What ranks of today's trainers wait for the last one in an exchange, per doubling of the group."""

_EAGER: dict[str, Any] = {
    "fused_rotary": False,
    "fused_activation": False,
    "fused_permute": False,
    "fused_cross_entropy": False,
    "fused_grad_accumulation": False,
    "fused_bias_gradients": False,
    "tuned_products": False,
    "collective_sync_us": NCCL_WAIT_US,
    "vocab_divisible_by": 1,
}
"""torch as it comes: a kernel for each operation."""

_TORCHTITAN: dict[str, Any] = {
    "compiled": True,
    "attention_kernel": "flash",
    "cp_comm_type": "all_gather",
    "keeps_gathered_keys": True,
    "keeps_gathered_inputs": True,
    "stops_recompute_early": True,
    "collective_sync_us": NCCL_WAIT_US,
    "weights_expert_outputs": True,
    "has_torch_stages": True,
    **SCALES_BY_ROW,
    "fused_projections": False,
    "casts_weights": True,
    "selective_recompute_modules": ("op",),
    "selective_default": ("op",),
    "fused_grad_accumulation": False,
    "fused_bias_gradients": False,
    "tuned_products": False,
    "weight_bytes": 4,
    "optimizer_bytes": 8,
    "vocab_divisible_by": 1,
    "balances_in_buffers": True,
    "splits_mtp_projection": False,
    "zero_stages": (3,),
    "schedules": TORCH_SCHEDULES,
    "min_microbatches_is_pp": True,
}

_TORCHTITAN_BEFORE_2026: dict[str, Any] = {
    **_TORCHTITAN,
    "architectures": ("ampere", "hopper"),
    "repeats_keys": True,
    "cp_comm_type": "p2p",
    "keeps_gathered_keys": False,
    "balances_context": False,
    **ONE_SCALE,
}
"""torch's own attention: keys repeated until January 2026 (pull request 2259), and taken block by block over ranks that
share a sequence. Its report of 2024 slows down over cp 1, 2, 4, 8 as if parts were dealt in order (tables 2 and 6),
although the code deals heads with tails. Until February 2026 an 8-bit recipe meant one scale a tensor; now there are
rows and blocks alone."""

_BEFORE_FLASH: dict[str, Any] = {
    "architectures": ("volta", "ampere"),
    "has_context_parallel": False,
    "flash_attention": False,
    "dropout": True,
    "fused_cross_entropy": False,
    "loss_in_place": True,
    "fused_bias_gradients": False,
    "gradient_bytes": 2,
    "sequence_parallel": False,
    "scatters_p2p": True,
    "interleaved_p2p_overlap": False,
    "gradient_overlap_fraction": 0.0,
    "parameter_overlap_fraction": 0.0,
}
"""Trainers before FlashAttention and overlapped reductions (2021 and 2022); gradients of mixed precision in fp16."""

RUNTIMES: dict[str, RuntimeSpec] = {
    spec.name: spec
    for spec in (
        RuntimeSpec(
            name="megatron",
            host_factor=1.3,
            step_overhead_s=0.01046,
            loss_in_place=True,
            balances_in_buffers=True,
            narrow_parameters=True,
            narrow_gradient_bytes=2,
            hands_unused_gradients=True,
            head_only_stage=True,
            uneven_chunks=True,
            recomputes_mtp=True,
            widens_gradients=True,
            # what NeMo and Megatron-Bridge set; Megatron-LM by itself, 10⁶ a rank and 4·10⁷ at least
            bucket_parameters=128 * 2**20,
            tp_overlap_fraction=0.5457,
            tp_async_overlap_fraction=0.9,
            ep_row_bytes=8419.0,
            moe_kernels=55.13,
            narrow_host_factor=1.248,
            collective_sync_us=NCCL_WAIT_US,
            expert_kernels=0.8918,
            ep_overlap_host_factor=1.471,
            sends_tokens_once=True,
            groups_products=False,
            selective_recompute_modules=(
                "core_attn",
                "moe_act",
                "layernorm",
                "mla_up_proj",
                "mlp",
                "moe",
                "shared_experts",
            ),
            zero_stages=(0, 1),
        ),
        RuntimeSpec(name="torchtitan", **_TORCHTITAN),
        RuntimeSpec(
            # torch.compile was for layers alone; the loss made fp32 copies
            name="torchtitan-2024",
            trainer="torchtitan",
            fused_cross_entropy=False,
            **_TORCHTITAN_BEFORE_2026,
        ),
        RuntimeSpec(name="torchtitan-2025", trainer="torchtitan", **_TORCHTITAN_BEFORE_2026),
        RuntimeSpec(
            name="torch-eager",
            head_backward_factor=0.6741,
            keeps_tables=True,
            clips_gradients=False,
            schedules=TORCH_SCHEDULES,
            clones_embedding_shard=False,
            zero_stages=(0, 1),
            recompute_per_stage=True,
            head_only_stage=True,
            interleaved_microbatch_multiple=False,
            cp_comm_type="all_gather",
            cp_overlap_fraction=0.0,
            gradient_overlap_fraction=0.0,
            parameter_overlap_fraction=0.0,
            **_EAGER,
        ),
        RuntimeSpec(
            # FullyShardedDataParallel around each layer: Composer and LLM Foundry, Accelerate, Lightning
            name="torch-fsdp",
            has_model_parallel=False,
            attention_kernel="flash",
            weight_bytes=4,
            optimizer_bytes=8,
            casts_weights=True,
            schedules=("none",),
            zero_stages=(2, 3),
            **_EAGER,
        ),
        RuntimeSpec(
            # read from its sources of February 2025 and after; what its Python costs, from the runs of the playbook
            name="nanotron",
            attention_kernel="flash",
            fused_activation=False,
            fused_cross_entropy=False,
            loss_in_place=True,
            fused_grad_accumulation=False,
            fused_bias_gradients=False,
            tuned_products=False,
            kept_gradient_bytes=2,
            all_reduces_gradients=True,
            keeps_gathered_inputs=True,
            parameter_overlap_fraction=0.0,
            tp_async_overlap_fraction=0.9,
            collective_sync_us=NCCL_WAIT_US,
            host_factor=1.855,
            zero_stages=(0, 1),
            vocab_divisible_by=1,
        ),
        RuntimeSpec(
            name="megatron-2021",
            trainer="megatron",
            widens_gradients=True,
            fsdp_overlap_fraction=0.5,
            fsdp_rate_fraction=0.2,
            zero_stages=(0,),
            has_sequence_parallel=False,
            fused_grad_accumulation=False,
            **_BEFORE_FLASH,
        ),
        RuntimeSpec(
            name="megatron-2022",
            trainer="megatron",
            widens_gradients=True,
            zero_stages=(0,),
            **{**_BEFORE_FLASH, "gradient_bytes": 4},
        ),
        RuntimeSpec(
            name="megatron-deepspeed",
            collective_sync_us=324.5,
            tp_jitter_fraction=0.05201,
            zero_stages=(0, 1, 3),
            blocking_launches=True,
            fused_grad_accumulation=False,
            has_sequence_parallel=False,
            fp16_gradient_bytes=2,
            kept_gradient_bytes=2,
            reserved_gib=11.0,
            **{**_BEFORE_FLASH, "gradient_bytes": 4, "host_factor": 0.5129},
        ),
    )
}


def load_runtime(name: str) -> RuntimeSpec:
    """The runtime called `name`; SpecError with the nearest names when there is none."""
    try:
        return RUNTIMES[name]
    except KeyError:
        raise SpecError(
            f"runtime: unknown {name!r}", f"one of {', '.join(RUNTIMES)}{nearest(name, RUNTIMES)}"
        ) from None
