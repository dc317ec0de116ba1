"""The runtime a plan was priced with, in Megatron-LM's arguments: sharding, precision, fusions, hidden exchanges."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.arguments import Arguments


def is_fsdp(plan: Plan) -> bool:
    """ZeRO-2 and 3 are Megatron-FSDP; ZeRO-1 is the distributed optimizer."""
    return plan.parallelism.zero_stage >= 2


def data_parallel(plan: Plan) -> Arguments:
    """Distributed optimizer or FSDP, the ranks it shards over, and exchanges behind compute."""
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
    if runtime.gradient_overlap_fraction > 0:
        arguments["--overlap-grad-reduce"] = True
        if not is_fsdp(plan) and runtime.bucket_parameters is not None:
            arguments["--ddp-bucket-size"] = runtime.bucket_among(layout.shard_size)
        if runtime.parameter_overlap_fraction > 0 and layout.zero_stage >= 1:
            arguments["--overlap-param-gather"] = True
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
    """The dtypes of matrix products, of weights, and of gradients when summed and reduced."""
    dtype = plan.training.dtype
    runtime = plan.runtime_spec.in_dtype(dtype, plan.cluster.hardware.architecture)
    arguments = dict(_PRECISION[dtype])
    if runtime.narrow_parameters and plan.parallelism.zero_stage >= 1:
        arguments |= _NARROW.get(dtype, {})
    if dtype == "fp16":
        # the other way about: gradients are 16 bits wide unless they are asked to be 32
        return arguments | ({"--accumulate-allreduce-grads-in-fp32": True} if runtime.gradient_bytes == 4 else {})
    return arguments | ({"--grad-reduce-in-bf16": True} if runtime.gradient_bytes == 2 else {})


def kernels(plan: Plan) -> Arguments:
    """Fusions, tensor-parallel exchanges behind products, and CUDA graphs."""
    runtime, model = plan.runtime_spec, plan.model.spec
    arguments: Arguments = {
        "--transformer-impl": "transformer_engine",
        "--attention-backend": "auto" if runtime.flash_attention else "unfused",
    }
    if runtime.fused_cross_entropy:
        arguments |= {"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "native"}
    if not runtime.fused_grad_accumulation:
        arguments["--no-gradient-accumulation-fusion"] = True
    if not runtime.fused_rotary and model.position_embedding == "rope":
        arguments["--no-rope-fusion"] = True
    if not runtime.fused_activation:
        arguments["--no-bias-swiglu-fusion" if model.gated_mlp else "--no-bias-gelu-fusion"] = True
    if _overlaps_tp(plan):
        arguments["--tp-comm-overlap"] = True
    if runtime.cuda_graphs:
        # the whole iteration, where nothing may look at the loss in between
        arguments |= {"--cuda-graph-impl": "full_iteration", "--no-check-for-nan-in-loss-and-grad": True}
    return arguments


def _overlaps_tp(plan: Plan) -> bool:
    """Tensor-parallel gathers and scatters were priced behind products."""
    layout, runtime = plan.parallelism, plan.runtime_spec
    hidden = runtime.tp_overlap_fraction if plan.model.spec.mla is None else runtime.mla_tp_overlap_fraction
    return hidden > 0 and layout.tp > 1 and layout.sequence_parallel


def expert_exchange(plan: Plan) -> Arguments:
    """The dispatcher that was priced, and its exchanges behind compute."""
    layout, runtime = plan.parallelism, plan.runtime_spec
    if plan.model.spec.moe is None:
        return {}
    arguments: Arguments = {"--moe-token-dispatcher-type": "alltoall"}
    if runtime.sends_tokens_once and layout.ep * layout.etp > 1:
        backend = "hybridep" if plan.cluster.nvlink_domain_size > plan.cluster.node_size else "deepep"
        arguments = {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": backend}
    if overlaps_ep(plan):
        arguments["--overlap-moe-expert-parallel-comm"] = True
    return arguments


def nvlink_topology(plan: Plan) -> dict[str, str]:
    """Variables from which HybridEP learns how many ranks of an exchange are joined by NVLink across nodes."""
    if expert_exchange(plan).get("--moe-flex-dispatcher-backend") != "hybridep":
        return {}
    domain, ranks = plan.cluster.nvlink_domain_size, plan.parallelism.ep * plan.parallelism.etp
    joined = max(size for size in range(1, min(ranks, domain) + 1) if ranks % size == 0)
    return {
        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": str(joined),
        "NVLINK_DOMAIN_SIZE": str(domain),
        "USE_MNNVL": "1",
    }


def overlaps_ep(plan: Plan) -> bool:
    """Exchanges of experts were priced behind compute."""
    return plan.parallelism.ep > 1 and plan.runtime_spec.ep_overlap_fraction > 0


def ep_overlap_obstacle(plan: Plan) -> str:
    """The reason why Megatron-LM refuses --overlap-moe-expert-parallel-comm for a layout; empty where it does not."""
    layout = plan.parallelism
    if layout.pp > 1 and layout.vpp == 1:
        return "at pp > 1 without interleaving"
    if layout.recompute == "full" or "moe" in layout.recompute_modules:
        return "where experts are recomputed"
    if plan.model.spec.num_nextn_predict_layers > 1:
        return "with several multi-token-prediction blocks"
    return ""
