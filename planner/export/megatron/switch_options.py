"""Megatron-LM's options for each value of each switch, and the versions of Megatron core that spell it so."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.spelling import IS_SET, ITSELF, MODULES, SHARE, Spelling, recipe_of, spelling_of
from planner.export.trainer_files import Arguments
from planner.trainers.switches import Value

CAPACITY = 1.5
"""Room of a rank for tokens of its experts, over the mean: the recipes of Megatron-Bridge for DeepSeek-V3 and Qwen3."""
DROP_CAPACITY = 1.0
"""Room of an expert for tokens, over the mean, where it drops the others."""
INTERLEAVE = 32
"""Columns of gate and up projections that lie beside each other in the fused kernel (Megatron-Bridge's recipes)."""

_WHOLE = "full_iteration"
_MODULES = {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": MODULES}
_MODULES_AS_SCOPE = {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-scope": MODULES}
_FLEX = {"--moe-token-dispatcher-type": "flex"}
_FUSED_EXPERTS = {"--use-transformer-engine-op-fuser": True, "--moe-mlp-glu-interleave-size": INTERLEAVE}
_PRECISION_AWARE = {"--use-precision-aware-optimizer": True}

SWITCH_OPTIONS: tuple[Spelling, ...] = (
    Spelling("ep_overlap", False),
    Spelling("ep_overlap", True, {"--overlap-moe-expert-parallel-comm": True}),
    Spelling("ep_overlap", "delayed", {"--overlap-moe-expert-parallel-comm": True, "--delay-wgrad-compute": True}),
    Spelling("cuda_graph", "none"),
    Spelling("cuda_graph", _WHOLE, {"--cuda-graph-impl": _WHOLE}, since="0.18"),
    Spelling(
        "cuda_graph", _WHOLE, {"--cuda-graph-impl": "local", "--cuda-graph-scope": _WHOLE}, since="0.15", before="0.18"
    ),
    Spelling("cuda_graph", _WHOLE, {"--enable-cuda-graph": True, "--cuda-graph-scope": _WHOLE}, before="0.15"),
    Spelling("cuda_graph", None, _MODULES, since="0.18"),
    Spelling("cuda_graph", None, _MODULES_AS_SCOPE, since="0.16", before="0.18"),
    # before 0.16 a graph is of attention or of whole layers
    Spelling("cuda_graph", "attn", _MODULES_AS_SCOPE, since="0.15", before="0.16"),
    Spelling("cuda_graph", "attn", {"--external-cuda-graph": True, "--cuda-graph-scope": "attn"}, before="0.15"),
    *(
        Spelling("cuda_graph", _WHOLE, settings, is_read_only=True)
        for settings in ({"--enable-cuda-graph": True}, {"--external-cuda-graph": True}, {"--cuda-graph-impl": "local"})
    ),
    Spelling("cuda_graph", None, {"--cuda-graph-impl": ITSELF}, is_read_only=True),
    Spelling("nan_checks", True),
    Spelling("nan_checks", False, {"--no-check-for-nan-in-loss-and-grad": True}),
    Spelling("fused_experts", False),
    Spelling("fused_experts", True, _FUSED_EXPERTS, since="0.18"),
    Spelling("fused_experts", True, {"--use-transformer-engine-op-fuser": True}, is_read_only=True),
    Spelling("dispatcher", "allgather", {"--moe-token-dispatcher-type": "allgather"}),
    Spelling("dispatcher", "alltoall", {"--moe-token-dispatcher-type": "alltoall"}),
    Spelling("dispatcher", "deepep", _FLEX | {"--moe-flex-dispatcher-backend": "deepep"}, since="0.16"),
    Spelling("dispatcher", "deepep", _FLEX | {"--moe-enable-deepep": True}, before="0.16"),
    Spelling("dispatcher", "hybridep", _FLEX | {"--moe-flex-dispatcher-backend": "hybridep"}, since="0.16"),
    Spelling("dispatcher", "deepep", _FLEX, is_read_only=True),
    Spelling("shared_expert_overlap", False),
    Spelling("shared_expert_overlap", True, {"--moe-shared-expert-overlap": True}),
    Spelling("tp_comm_overlap", False),
    Spelling("tp_comm_overlap", True, {"--tp-comm-overlap": True}),
    Spelling("overlap_grad_reduce", False),
    Spelling("overlap_grad_reduce", True, {"--overlap-grad-reduce": True}),
    Spelling("overlap_param_gather", False),
    Spelling("overlap_param_gather", True, {"--overlap-param-gather": True}),
    Spelling("p2p_overlap", True),
    Spelling("p2p_overlap", False, {"--no-overlap-p2p-communication": True}),
    Spelling("cp_comm_type", None, {"--cp-comm-type": ITSELF}),
    Spelling("cross_entropy_fusion", False),
    Spelling("cross_entropy_fusion", "native", {"--cross-entropy-loss-fusion": True}, is_read_only=True),
    Spelling(
        "cross_entropy_fusion", "native", {"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "native"}
    ),
    # the parser refuses it since 0.18; Bridge has no parser, and takes it
    Spelling("cross_entropy_fusion", True, {"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "te"}),
    Spelling("bf16_gradients", False),
    Spelling("bf16_gradients", True, {"--grad-reduce-in-bf16": True}),
    # gradients of bf16 training are summed in fp32 only where the optimizer's are fp32
    Spelling("bf16_gradients", True, {"--main-grads-dtype": "bf16"}, is_read_only=True),
    Spelling("bf16_moments", False),
    Spelling(
        "bf16_moments", True, _PRECISION_AWARE | {"--exp-avg-dtype": "bf16", "--exp-avg-sq-dtype": "bf16"}
    ),
    Spelling("optimizer", "adamw"),
    Spelling("optimizer", "adamw", {"--optimizer": "adam"}, is_read_only=True),
    Spelling("optimizer", "muon", {"--optimizer": "muon", "--muon-tp-mode": "duplicated"}, since="0.19"),
    Spelling("optimizer", "muon", {"--optimizer": "muon"}, is_read_only=True),
    Spelling("optimizer", "muon", {"--optimizer": "dist_muon"}, is_read_only=True),
    Spelling("optimizer", "sgd-momentum", {"--optimizer": "sgd"}),
    Spelling("optimizer_offload", 0.0),
    Spelling(
        "optimizer_offload", None,
        _PRECISION_AWARE | {
            "--optimizer-cpu-offload": True, "--optimizer-offload-fraction": SHARE,
            "--overlap-cpu-optimizer-d2h-h2d": True,
        },
    ),
    Spelling("optimizer_offload", 1.0, {"--optimizer-cpu-offload": True}, is_read_only=True),
    Spelling(
        "optimizer_offload", None, {"--optimizer-cpu-offload": True, "--optimizer-offload-fraction": SHARE},
        is_read_only=True,
    ),
    Spelling("activation_offload", "none"),
    Spelling(
        "activation_offload", None, {"--fine-grained-activation-offloading": True, "--offload-modules": MODULES},
        since="0.16",
    ),
    Spelling("deterministic", False),
    Spelling("deterministic", True, {"--deterministic-mode": True}),
    Spelling("token_drop", False),
    Spelling(
        "token_drop", True,
        {"--moe-expert-capacity-factor": DROP_CAPACITY, "--moe-pad-expert-input-to-capacity": True},
    ),
    Spelling("token_drop", None, {"--moe-expert-capacity-factor": IS_SET}, is_read_only=True),
)  # fmt: skip
"""The table that the exporter and the importer share."""
SWITCHING = frozenset(name for row in SWITCH_OPTIONS for name in row.settings)
"""All options that say a switch."""
BRIDGE_OF_SWITCHES = {
    "--moe-token-dispatcher-type": "model.moe_token_dispatcher_type",
    "--moe-flex-dispatcher-backend": "model.moe_flex_dispatcher_backend",
    "--cp-comm-type": "model.cp_comm_type",
    "--cross-entropy-fusion-impl": "model.cross_entropy_fusion_impl",
    "--deterministic-mode": "model.deterministic_mode",
    "--tp-comm-overlap": "model.tp_comm_overlap",
    "--overlap-moe-expert-parallel-comm": "model.overlap_moe_expert_parallel_comm",
    "--delay-wgrad-compute": "model.delay_wgrad_compute",
    "--moe-shared-expert-overlap": "model.moe_shared_expert_overlap",
    "--cuda-graph-impl": "model.cuda_graph_impl",
    "--cuda-graph-scope": "model.cuda_graph_scope",
    "--cuda-graph-modules": "model.cuda_graph_modules",
    "--use-transformer-engine-op-fuser": "model.use_transformer_engine_op_fuser",
    "--moe-mlp-glu-interleave-size": "model.moe_mlp_glu_interleave_size",
    "--moe-expert-rank-capacity-factor": "model.moe_expert_rank_capacity_factor",
    "--moe-paged-stash": "model.moe_paged_stash",
    "--moe-paged-stash-buffer-size-factor-cuda": "model.moe_paged_stash_buffer_size_factor_cuda",
    "--moe-expert-capacity-factor": "model.moe_expert_capacity_factor",
    "--moe-pad-expert-input-to-capacity": "model.moe_pad_expert_input_to_capacity",
    "--fine-grained-activation-offloading": "model.fine_grained_activation_offloading",
    "--offload-modules": "model.offload_modules",
    "--fine-grained-offloading-max-inflight-offloads": "model.fine_grained_offloading_max_inflight_offloads",
    "--optimizer": "optimizer.optimizer",
    "--use-precision-aware-optimizer": "optimizer.use_precision_aware_optimizer",
    "--optimizer-cpu-offload": "optimizer.optimizer_cpu_offload",
    "--optimizer-offload-fraction": "optimizer.optimizer_offload_fraction",
    "--overlap-cpu-optimizer-d2h-h2d": "optimizer.overlap_cpu_optimizer_d2h_h2d",
}
"""Megatron-Bridge's field of the same value of each option of a switch; the others it says otherwise."""


STASH = 1.2
"""Buffers of the paged stash, over what balanced experts keep (Megatron-Bridge's recipes for DeepSeek-V3)."""
INFLIGHT = 1
"""Copies to the host, of one kind, that a graph of a whole iteration does not wait for: Megatron-Bridge's recipe of
DeepSeek-V3 for GB300."""


def switch_arguments(plan: Plan) -> Arguments:
    """The options that say the plan's recipe in its version's words; those of refused values are left out."""
    arguments: Arguments = {}
    for name, value in _recipe(plan).items():
        arguments |= spelling_of(SWITCH_OPTIONS, name, value, plan.runtime_spec.version) or {}
    if plan.model.spec.moe is not None:
        # allgather unless told
        arguments.setdefault("--moe-token-dispatcher-type", "alltoall")
        arguments |= _whole_mixture(plan)
    if plan.runtime_spec.cuda_graphs and plan.runtime_spec.offload_modules:
        arguments["--fine-grained-offloading-max-inflight-offloads"] = INFLIGHT
    if not plan.model.spec.gated_mlp:
        arguments.pop("--moe-mlp-glu-interleave-size", None)
    return arguments


def _recipe(plan: Plan) -> dict[str, Value]:
    recipe = dict(recipe_of(plan, SWITCH_OPTIONS))
    if plan.training.dtype == "fp16":
        # the other way about: gradients are 16 bits wide unless they are asked to be 32
        recipe.pop("bf16_gradients")
    return recipe


def _whole_mixture(plan: Plan) -> Arguments:
    """The room for tokens of experts in a graph that replays whatever their numbers are: no host sees these."""
    if not (plan.runtime_spec.cuda_graphs and plan.runtime_spec.fuses_experts):
        return {}
    return {
        "--moe-token-dispatcher-type": "flex",
        "--moe-flex-dispatcher-backend": "hybridep",
        "--moe-expert-rank-capacity-factor": CAPACITY,
        "--moe-paged-stash": True,
        "--moe-paged-stash-buffer-size-factor-cuda": STASH,
    }
