"""A plan as Megatron-Bridge overrides: the Megatron-LM arguments under the names of Bridge's configuration tree."""

from __future__ import annotations

from typing import Any

from planner.answer import Plan
from planner.export.megatron.plan_arguments import megatron_arguments
from planner.export.refusal import Objections
from planner.export.stated_model import ROTARY_BASE, stated
from planner.export.trainer_files import Arguments
from planner.specs.model import ModelSpec
from planner.specs.model_parts import RopeScalingSpec
from planner.trainers.rules.bridge_model import Family, bridge_model_rules, family_of
from planner.trainers.rules.facts import every_nth, query_width, rotary_method

SAME = {
    "--num-layers": "model.num_layers",
    "--hidden-size": "model.hidden_size",
    "--ffn-hidden-size": "model.ffn_hidden_size",
    "--num-attention-heads": "model.num_attention_heads",
    "--kv-channels": "model.kv_channels",
    "--num-query-groups": "model.num_query_groups",
    "--multi-latent-attention": "model.multi_latent_attention",
    "--kv-lora-rank": "model.kv_lora_rank",
    "--q-lora-rank": "model.q_lora_rank",
    "--qk-head-dim": "model.qk_head_dim",
    "--qk-pos-emb-head-dim": "model.qk_pos_emb_head_dim",
    "--v-head-dim": "model.v_head_dim",
    "--softmax-type": "model.softmax_type",
    "--position-embedding-type": "model.position_embedding_type",
    "--rotary-base": "model.rotary_base",
    "--rotary-percent": "model.rotary_percent",
    "--make-vocab-size-divisible-by": "model.make_vocab_size_divisible_by",
    "--normalization": "model.normalization",
    "--norm-epsilon": "model.layernorm_epsilon",
    "--attention-output-gate": "model.attention_output_gate",
    "--activation-func-clamp-value": "model.activation_func_clamp_value",
    "--glu-linear-offset": "model.glu_linear_offset",
    "--add-qkv-bias": "model.add_qkv_bias",
    "--attention-dropout": "model.attention_dropout",
    "--hidden-dropout": "model.hidden_dropout",
    "--num-experts": "model.num_moe_experts",
    "--moe-ffn-hidden-size": "model.moe_ffn_hidden_size",
    "--moe-router-topk": "model.moe_router_topk",
    "--moe-grouped-gemm": "model.moe_grouped_gemm",
    "--moe-permute-fusion": "model.moe_permute_fusion",
    "--moe-token-dispatcher-type": "model.moe_token_dispatcher_type",
    "--moe-flex-dispatcher-backend": "model.moe_flex_dispatcher_backend",
    "--moe-router-dtype": "model.moe_router_dtype",
    "--moe-shared-expert-intermediate-size": "model.moe_shared_expert_intermediate_size",
    "--moe-shared-expert-gate": "model.moe_shared_expert_gate",
    "--moe-router-score-function": "model.moe_router_score_function",
    "--moe-router-enable-expert-bias": "model.moe_router_enable_expert_bias",
    "--moe-router-load-balancing-type": "model.moe_router_load_balancing_type",
    "--moe-router-pre-softmax": "model.moe_router_pre_softmax",
    "--moe-router-num-groups": "model.moe_router_num_groups",
    "--moe-router-group-topk": "model.moe_router_group_topk",
    "--moe-router-topk-scaling-factor": "model.moe_router_topk_scaling_factor",
    "--moe-router-bias-update-rate": "model.moe_router_bias_update_rate",
    "--moe-aux-loss-coeff": "model.moe_aux_loss_coeff",
    "--moe-z-loss-coeff": "model.moe_z_loss_coeff",
    "--moe-apply-probs-on-input": "model.moe_apply_probs_on_input",
    "--mtp-num-layers": "model.mtp_num_layers",
    "--mtp-loss-scaling-factor": "model.mtp_loss_scaling_factor",
    "--tensor-model-parallel-size": "model.tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "model.pipeline_model_parallel_size",
    "--context-parallel-size": "model.context_parallel_size",
    "--cp-comm-type": "model.cp_comm_type",
    "--expert-model-parallel-size": "model.expert_model_parallel_size",
    "--expert-tensor-parallel-size": "model.expert_tensor_parallel_size",
    "--use-tp-pp-dp-mapping": "dist.use_tp_pp_dp_mapping",
    "--pipeline-model-parallel-layout": "model.pipeline_model_parallel_layout",
    "--micro-batch-size": "train.micro_batch_size",
    "--global-batch-size": "train.global_batch_size",
    "--use-megatron-fsdp": "ddp.use_megatron_fsdp",
    "--data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "--ckpt-format": "checkpoint.ckpt_format",
    "--num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "--recompute-granularity": "model.recompute_granularity",
    "--recompute-method": "model.recompute_method",
    "--recompute-num-layers": "model.recompute_num_layers",
    "--transformer-impl": "model.transformer_impl",
    "--attention-backend": "model.attention_backend",
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
    "--manual-gc": "train.manual_gc",
    "--manual-gc-interval": "train.manual_gc_interval",
    "--train-iters": "train.train_iters",
    "--exit-signal-handler": "train.exit_signal_handler",
    "--lr": "optimizer.lr",
    "--min-lr": "optimizer.min_lr",
    "--weight-decay": "optimizer.weight_decay",
    "--adam-beta1": "optimizer.adam_beta1",
    "--adam-beta2": "optimizer.adam_beta2",
    "--adam-eps": "optimizer.adam_eps",
    "--clip-grad": "optimizer.clip_grad",
    "--init-method-std": "model.init_method_std",
    "--lr-warmup-iters": "scheduler.lr_warmup_iters",
    "--lr-decay-iters": "scheduler.lr_decay_iters",
    "--lr-decay-style": "scheduler.lr_decay_style",
    "--lr-wsd-decay-style": "scheduler.lr_wsd_decay_style",
    "--lr-wsd-decay-iters": "scheduler.lr_wsd_decay_iters",
    "--log-interval": "logger.log_interval",
    "--log-throughput": "logger.log_throughput",
    "--log-memory-interval": "logger.log_memory_interval",
    "--distributed-timeout-minutes": "dist.distributed_timeout_minutes",
    "--distributed-timeout-seconds-after-init": "dist.distributed_timeout_seconds_after_init",
    "--eval-interval": "validation.eval_interval",
    "--eval-iters": "validation.eval_iters",
    "--data-path": "dataset.data_path",
    "--data-cache-path": "dataset.path_to_cache",
    "--split": "dataset.split",
    "--tokenizer-type": "tokenizer.tokenizer_type",
    "--tokenizer-model": "tokenizer.tokenizer_model",
    "--save": "checkpoint.save",
    "--load": "checkpoint.load",
    "--save-interval": "checkpoint.save_interval",
    "--async-save": "checkpoint.async_save",
    "--async-strategy": "checkpoint.async_strategy",
    "--use-persistent-ckpt-worker": "checkpoint.use_persistent_ckpt_worker",
    "--moe-router-force-load-balancing": "model.moe_router_force_load_balancing",
}
"""Options whose value a configuration field takes as it is."""

DERIVED = frozenset(
    {
        "--group-query-attention", "--vocab-size", "--untie-embeddings-and-output-weights", "--qk-layernorm",
        "--swiglu", "--squared-relu", "--quick-geglu", "--disable-bias-linear", "--moe-layer-freq", "--window-size",
        "--window-attn-skip-freq", "--apply-layernorm-1p", "--no-rope-freq", "--use-rope-scaling",
        "--rope-scaling-factor", "--rotary-scaling-factor", "--rotary-seq-len-interpolation-factor", "--mscale",
        "--mscale-all-dim", "--yarn-original-max-position-embeddings", "--yarn-beta-fast", "--yarn-beta-slow",
        "--no-yarn-correction-range-round-to-int",
        "--max-position-embeddings", "--ddp-bucket-size",
        "--sequence-parallel", "--num-virtual-stages-per-pipeline-rank", "--seq-length", "--use-distributed-optimizer",
        "--overlap-grad-reduce", "--overlap-param-gather", "--recompute-modules", "--bf16", "--fp16", "--fp8-format",
        "--fp8-recipe", "--fp4-format", "--fp4-recipe", "--grad-reduce-in-bf16", "--fp8-param-gather",
        "--fp4-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag", "--accumulate-allreduce-grads-in-fp32",
        "--no-gradient-accumulation-fusion", "--no-rope-fusion", "--no-bias-swiglu-fusion", "--no-bias-gelu-fusion",
        "--no-overlap-p2p-communication", "--cross-entropy-loss-fusion",
        "--no-check-for-nan-in-loss-and-grad", "--exp-avg-dtype", "--exp-avg-sq-dtype",
    }
)  # fmt: skip
"""Options whose meaning other fields take, by rules of their own."""


RECIPES: dict[Family, str] = {
    "gpt": "vanilla_gpt_pretrain_config",
    "mla": "deepseek_v3_pretrain_config",
    "gemma2": "gemma2_2b_pretrain_config",
    "gemma3": "gemma3_1b_pretrain_config",
}
"""The recipe whose layers a family of models has; all of its sizes are overridden."""
DOWNLOADS: dict[Family, str] = {"mla": "deepseek-ai/DeepSeek-V3", "gemma2": "google/gemma-2-2b"}
"""Models whose configuration a recipe reads from Hugging Face or its cache."""
TANH = "fast_gelu"
"""Bridge's name of the GELU by a tanh, which fused with a bias is the plain one's."""

UNASKED: dict[str, Any] = {
    "model.num_moe_experts": None,
    "model.moe_shared_expert_intermediate_size": None,
    "model.mtp_num_layers": None,
    "model.moe_router_pre_softmax": False,
    "model.moe_router_score_function": "softmax",
    "model.moe_router_enable_expert_bias": False,
    "model.moe_router_load_balancing_type": "none",
    "model.moe_router_num_groups": None,
    "model.moe_router_group_topk": None,
    "model.moe_router_topk_scaling_factor": None,
}
"""Fields that the recipe with latent attention sets for DeepSeek-V3, as Megatron-LM has them unasked."""

Overrides = dict[str, Any]


def model_overrides(model: ModelSpec, fuses_activation: bool) -> Overrides:
    """The fields; a field that a recipe sets for its own model is there even where it is the default."""
    model = stated(model)
    family = family_of(model)
    overrides: Overrides = {
        "share_embeddings_and_output_weights": model.tie_word_embeddings,
        "add_bias_linear": model.has_mlp_bias,
        "qk_layernorm": model.qk_norm or model.mla is not None,
        "layernorm_zero_centered_gamma": model.zero_centered_norm,
        "gated_linear_unit": model.gated_mlp,
        **_activation(model, fuses_activation),
        **_windows(model),
        **(_rotary(model) if model.position_embedding == "rope" else {}),
        **_experts(model),
    }
    if family == "mla":
        overrides |= _latent(model)
    elif family == "gemma2":
        overrides |= _gemma2(model)
    else:
        overrides["softmax_scale"] = model.attention_multiplier
    if family == "gemma3":
        overrides |= _gemma3(model)
    return {f"model.{name}": value for name, value in overrides.items()}


def _activation(model: ModelSpec, fuses: bool) -> Overrides:
    """The activation, and its fusion with a bias, which makes every GELU the tanh's."""
    fused = fuses and model.gated_mlp and model.activation in ("silu", "quick_gelu")
    name = {"relu2": "squared_relu", "gelu_tanh": TANH}.get(model.activation, model.activation)
    if fuses and model.activation == "gelu_tanh" and model.has_mlp_bias and not model.gated_mlp:
        name, fused = "gelu", True
    return {"activation_func": name, "bias_activation_fusion": fused}


def _windows(model: ModelSpec) -> Overrides:
    slides = [kind.attention == "sliding" for kind in model.layers]
    if model.sliding_window is None or not any(slides):
        return {}
    nth = every_nth([not slide for slide in slides])
    skipped: int | list[int] | None = None if all(slides) else nth or [int(slide) for slide in slides]
    return {"window_size": [model.sliding_window - 1, 0], "window_attn_skip_freq": skipped}


def _rotary(model: ModelSpec) -> Overrides:
    """How frequencies are stretched, and the layers without rotary positions."""
    overrides: Overrides = {}
    n, layers = model.no_rope_layer_interval, model.num_hidden_layers
    if n is not None and n <= layers:
        overrides["no_rope_freq"] = [int((i + 1) % n == 0) for i in range(layers)]
    scaling, method = model.rope_scaling, rotary_method(model)
    if scaling is None or method is None or model.mla is not None:
        return overrides
    if method == "llama3":
        return overrides | {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
    if method == "linear":
        return overrides | {"seq_len_interpolation_factor": scaling.factor}
    # weights of null are those that follow from the factor
    numbers = _yarn(scaling) | {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    rounded = {"yarn_correction_range_round_to_int": scaling.truncate is not False}
    return overrides | {f"yarn_{name}": number for name, number in numbers.items()} | rounded


def _yarn(scaling: RopeScalingSpec) -> Overrides:
    """Numbers of yarn; those that are not given are usual."""
    return {
        "rotary_scaling_factor": scaling.factor or 1.0,
        "original_max_position_embeddings": scaling.original_max_position_embeddings or 4096,
        "beta_fast": scaling.beta_fast or 32.0,
        "beta_slow": scaling.beta_slow or 1.0,
    }


def _experts(model: ModelSpec) -> Overrides:
    if model.moe is None and model.mla is None:
        return {}
    # the recipe with latent attention has experts
    return {"moe_layer_freq": [int(kind.mlp == "moe") for kind in model.layers]}


def _latent(model: ModelSpec) -> Overrides:
    """Latent attention's own numbers, which the recipe has from DeepSeek-V3; yarn by 1 stretches nothing."""
    assert model.mla is not None
    method, scaling = rotary_method(model), model.rope_scaling
    used = scaling if scaling is not None and method == "yarn" else RopeScalingSpec(rope_type="yarn", factor=1.0)
    return {
        "q_lora_rank": model.mla.q_lora_rank,
        "num_query_groups": model.num_attention_heads,
        **_yarn(used),
        "mscale": 1.0 if used.mscale is None else used.mscale,
        "mscale_all_dim": used.mscale_all_dim or 0.0,
    }


def _gemma2(model: ModelSpec) -> Overrides:
    """Capped logits, and the number whose root divides attention's."""
    scale = model.attention_multiplier or query_width(model) ** -0.5
    scalar = scale**-2
    return {
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
    }


def _gemma3(model: ModelSpec) -> Overrides:
    """Bases of sliding and of full layers, the latter's stretching, and after how many sliding layers a full one is."""
    base, method = round(model.rope_theta or ROTARY_BASE), rotary_method(model)
    factor = model.rope_scaling.factor if model.rope_scaling is not None and method == "linear" else None
    n = every_nth([kind.attention == "full" for kind in model.layers]) or 1
    return {
        "rotary_base": [round(model.rope_local_base_freq or base), base],
        "rope_scaling_factor": factor or 1.0,
        "seq_len_interpolation_factor": None,
        "softmax_scale": model.attention_multiplier or query_width(model) ** -0.5,
        "window_size": model.sliding_window,
        "window_attn_skip_freq": None,
        "interleaved_attn_pattern": [n - 1, 1],
    }


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
