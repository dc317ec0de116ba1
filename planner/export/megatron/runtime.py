"""The runtime a plan was priced with, in Megatron-LM's arguments: sharding, precision, fusions without a switch."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.arguments import Arguments


def is_fsdp(plan: Plan) -> bool:
    """ZeRO-2 and 3 are Megatron-FSDP; ZeRO-1 is the distributed optimizer."""
    return plan.parallelism.zero_stage >= 2


def data_parallel(plan: Plan) -> Arguments:
    """Distributed optimizer or FSDP, the ranks it shards over, and the size of its buckets."""
    layout, runtime, arguments = plan.parallelism, plan.runtime_spec, Arguments()
    if is_fsdp(plan):
        strategy = "optim_grads_params" if layout.zero_stage == 3 else "optim_grads"
        arguments |= {
            "--use-megatron-fsdp": True,
            "--data-parallel-sharding-strategy": strategy,
            "--ckpt-format": "fsdp_dtensor",
        }
    if layout.zero_stage >= 1:
        arguments["--use-distributed-optimizer"] = True
        if layout.shard_size < layout.dp * layout.cp:
            arguments["--num-distributed-optimizer-instances"] = layout.dp * layout.cp // layout.shard_size
    if runtime.gradient_overlap_fraction > 0 and not is_fsdp(plan) and runtime.bucket_parameters is not None:
        arguments["--ddp-bucket-size"] = runtime.bucket_among(layout.shard_size)
    return arguments


_PRECISION: dict[str, Arguments] = {
    "bf16": {"--bf16": True},
    "fp16": {"--fp16": True},
    "fp8": {"--bf16": True, "--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "mxfp8": {"--bf16": True, "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--bf16": True, "--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}


_NARROW: dict[str, Arguments] = {
    "fp8": {"--fp8-param-gather": True},
    "mxfp8": {"--fp8-param-gather": True, "--reuse-grad-buf-for-mxfp8-param-ag": True},
    "nvfp4": {"--fp4-param-gather": True},
}
"""Weights of the recipe's own dtype; the tiles of mxfp8 cannot be gathered into a buffer of weights."""


def precision(plan: Plan) -> Arguments:
    """The dtypes of matrix products and of weights, and that of the gradients of fp16."""
    dtype = plan.training.dtype
    runtime = plan.runtime_spec.in_dtype(dtype, plan.cluster.hardware.architecture)
    arguments = dict(_PRECISION[dtype])
    if runtime.narrow_parameters and plan.parallelism.zero_stage >= 1:
        arguments |= _NARROW.get(dtype, {})
    if dtype == "fp16" and runtime.gradient_bytes == 4:
        arguments["--accumulate-allreduce-grads-in-fp32"] = True
    return arguments


def kernels(plan: Plan) -> Arguments:
    """Kernels and fusions that no switch chooses."""
    runtime, model = plan.runtime_spec, plan.model.spec
    arguments: Arguments = {
        "--transformer-impl": "transformer_engine",
        "--attention-backend": "auto" if runtime.flash_attention else "unfused",
    }
    if not runtime.fused_grad_accumulation:
        arguments["--no-gradient-accumulation-fusion"] = True
    if not runtime.fused_rotary and model.position_embedding == "rope":
        arguments["--no-rope-fusion"] = True
    if not runtime.fused_activation:
        is_swiglu = model.gated_mlp and model.activation == "silu"
        arguments["--no-bias-swiglu-fusion" if is_swiglu else "--no-bias-gelu-fusion"] = True
    return arguments
