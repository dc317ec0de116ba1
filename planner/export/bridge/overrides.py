"""A plan as Megatron-Bridge overrides: the Megatron-LM arguments under the names of Bridge's configuration tree."""

from __future__ import annotations

from typing import Any

from planner.answer import Plan
from planner.export.bridge.fields import DERIVED, SAME
from planner.export.bridge.model import UNASKED, model_overrides
from planner.export.common.arguments import Arguments
from planner.export.common.refusal import Objections
from planner.export.megatron.arguments import megatron_arguments
from planner.trainers.rules.bridge_model import bridge_model_rules

Overrides = dict[str, Any]
"""Path of a field in the configuration tree to its value."""

_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
_MOMENTS = {"bf16": "bfloat16", "fp32": "float32"}
"""Bridge's names of the dtypes of moments."""
_DDP_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather")
_PLAIN: Overrides = {"model.cuda_graph_impl": "none", "model.moe_shared_expert_overlap": False}
"""Switches as recipes of models may not have them, back where Megatron-LM has them unasked."""
_LATENT_RECIPE: Overrides = {
    "optimizer.use_precision_aware_optimizer": False,
    "optimizer.main_grads_dtype": "float32",
    "optimizer.main_params_dtype": "float32",
    "optimizer.exp_avg_dtype": "float32",
    "optimizer.exp_avg_sq_dtype": "float32",
}
"""Fields of the optimizer that the recipe with latent attention sets, back at Megatron's defaults."""


def arguments_for_bridge(plan: Plan) -> Arguments:
    """Megatron-LM's arguments under the rules of Bridge. Raises Inexpressible where Bridge cannot run the plan."""
    return megatron_arguments(plan, "bridge", bridge_model_rules(plan.runtime_spec.version))


def bridge_overrides(plan: Plan) -> Overrides:
    """All overrides of a plan. Raises Inexpressible where Megatron-LM or Bridge cannot run it."""
    arguments = arguments_for_bridge(plan)
    objections = Objections("bridge", [], "export to megatron")
    model = plan.model.spec
    objections.when(
        model.position_embedding == "learned" and model.max_position_embeddings != plan.training.seq_length,
        "max_position_embeddings",
        f"its table has seq_length {plan.training.seq_length} rows, the model's {model.max_position_embeddings}",
    )
    objections.raise_any()
    overrides: Overrides = dict(_PLAIN) if model.mla is None else _PLAIN | _LATENT_RECIPE | UNASKED
    for option, value in arguments.items():
        if option in SAME:
            overrides[SAME[option]] = list(value) if isinstance(value, tuple) else value
        else:
            assert option in DERIVED, option
    return overrides | _derived(plan, arguments) | model_overrides(model, plan.runtime_spec.fused_activation)


def _derived(plan: Plan, arguments: Arguments) -> Overrides:
    """Fields that Bridge spells differently, and fields that its recipes set and a plan must unset."""
    layout, model = plan.parallelism, plan.model.spec
    overlaps = "--overlap-param-gather" in arguments
    overrides: Overrides = {
        "model.seq_length": plan.training.seq_length,
        "dataset.seq_length": plan.training.seq_length,
        "tokenizer.vocab_size": model.vocab_size,
        "model.vocab_size": model.vocab_size,
        "model.should_pad_vocab": True,
        "model.sequence_parallel": "--sequence-parallel" in arguments,
        "model.virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "model.pipeline_dtype": "float16" if plan.training.dtype == "fp16" else "bfloat16",
        **_mixed_precision(plan, arguments),
        "ddp.use_distributed_optimizer": layout.zero_stage >= 1,
        "optimizer.use_distributed_optimizer": layout.zero_stage >= 1,
        "ddp.overlap_grad_reduce": "--overlap-grad-reduce" in arguments,
        "ddp.overlap_param_gather": overlaps,
        "ddp.align_param_gather": overlaps and layout.vpp > 1,
        **_kernels(plan, arguments),
        **_of_switches(arguments),
        **dict.fromkeys(("scheduler.start_weight_decay", "scheduler.end_weight_decay"), arguments["--weight-decay"]),
        **{f"model.{name}": arguments.get(f"--{name.replace('_', '-')}") for name in _RECOMPUTE},
    }
    if "--pipeline-model-parallel-layout" not in arguments:
        overrides["model.pipeline_model_parallel_layout"] = None
    if model.mla is not None:
        overrides |= _instead_of_deepseek(arguments, overrides)
    if isinstance(modules := arguments.get("--recompute-modules"), tuple):
        overrides["model.recompute_modules"] = list(modules)
    return overrides


def _of_switches(arguments: Arguments) -> Overrides:
    """Fields that a switch sets beside those that stand for its options: random numbers of graphs, checks, dtypes."""
    has_graphs = arguments.get("--cuda-graph-impl", "none") != "none"
    checks_nan = "--no-check-for-nan-in-loss-and-grad" not in arguments
    overrides: Overrides = {
        "rerun_state_machine.check_for_nan_in_loss": checks_nan,
        "ddp.check_for_nan_in_grad": checks_nan,
    }
    if has_graphs:
        overrides |= dict.fromkeys(("model.use_te_rng_tracker", "rng.te_rng_tracker"), True)
    if "--cuda-graph-modules" in arguments:
        # the older name of the field, which recipes set; Megatron core refuses both
        overrides["model.cuda_graph_scope"] = None
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if (dtype := arguments.get(f"--{name.replace('_', '-')}")) is not None:
            overrides[f"optimizer.{name}"] = _MOMENTS[str(dtype)]
    return overrides


def _kernels(plan: Plan, arguments: Arguments) -> Overrides:
    """Fusions and exchanges that Bridge chooses by what it finds installed, as Megatron-LM has them unasked."""
    p2p = plan.parallelism.vpp > 1 and "--no-overlap-p2p-communication" not in arguments
    return {
        "model.gradient_accumulation_fusion": "--no-gradient-accumulation-fusion" not in arguments,
        "model.apply_rope_fusion": arguments["--position-embedding-type"] == "rope"
        and "--no-rope-fusion" not in arguments,
        "model.bias_dropout_fusion": True,
        "model.cross_entropy_loss_fusion": "--cross-entropy-loss-fusion" in arguments,
        "model.cross_entropy_fusion_impl": arguments.get("--cross-entropy-fusion-impl", "native"),
        "model.overlap_p2p_comm": p2p,
        "model.batch_p2p_comm": not p2p,
    }


def _mixed_precision(plan: Plan, arguments: Arguments) -> Overrides:
    """Precision, field by field: Bridge's names for precisions also decide the dtype of gradients and outer layers.

    One recipe holds such a name, which an object replaces; the other holds an object, whose fields are set.
    """
    half = plan.training.dtype == "fp16"
    in_fp32 = "--accumulate-allreduce-grads-in-fp32" if half else "--grad-reduce-in-bf16"
    fields: Overrides = {
        "fp16": half,
        "bf16": not half,
        "grad_reduce_in_fp32": (in_fp32 in arguments) == half,
        "fp8": arguments.get("--fp8-format"),
        "fp8_recipe": arguments.get("--fp8-recipe", "tensorwise"),
        "fp8_param_gather": "--fp8-param-gather" in arguments,
        "reuse_grad_buf_for_mxfp8_param_ag": "--reuse-grad-buf-for-mxfp8-param-ag" in arguments,
        "fp4": arguments.get("--fp4-format"),
        "fp4_recipe": arguments.get("--fp4-recipe", "nvfp4"),
        "fp4_param_gather": "--fp4-param-gather" in arguments,
    }
    name = "float16" if half else "bfloat16"
    dtypes = ("params_dtype", "pipeline_dtype")
    if plan.model.spec.mla is not None:
        fields |= dict.fromkeys(dtypes, name)
        return {f"mixed_precision.{field}": value for field, value in fields.items()}
    fields |= {field: {"_target_": f"torch.{name}", "_call_": False} for field in dtypes}
    return {"mixed_precision": {"_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig", **fields}}


def _instead_of_deepseek(arguments: Arguments, overrides: Overrides) -> Overrides:
    """Fields that the recipe sets as DeepSeek-V3 has them, as this model has them.

    Its switches of overlaps come after the model's own and those of `ddp`; Bridge switches on those that are left open.
    """
    fields = ("model.overlap_p2p_comm", "model.batch_p2p_comm", *(f"ddp.{name}" for name in _DDP_OVERLAPS))
    overlaps = {f"comm_overlap.{field.partition('.')[2]}": overrides[field] for field in fields}
    return overlaps | {
        "model.expert_model_parallel_size": arguments.get("--expert-model-parallel-size", 1),
        "model.expert_tensor_parallel_size": arguments.get("--expert-tensor-parallel-size", 1),
        "comm_overlap.tp_comm_overlap": "--tp-comm-overlap" in arguments,
        "comm_overlap.overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm" in arguments,
        "comm_overlap.delay_wgrad_compute": "--delay-wgrad-compute" in arguments,
    }
