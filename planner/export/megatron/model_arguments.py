"""A model in Megatron-LM's arguments."""

from __future__ import annotations

from planner.export.stated_model import ROTARY_BASE, listed, stated
from planner.export.trainer_files import Arguments
from planner.specs.model import ModelSpec
from planner.specs.model_parts import MLASpec, MoESpec, RopeScalingSpec
from planner.trainers.rules.facts import every_nth, rotary_method


def position_arguments(model: ModelSpec, seq_length: int) -> Arguments:
    """The arguments of a model's positions; a table of learned ones has the model's rows."""
    learned = model.position_embedding == "learned"
    arguments: Arguments = {
        "--position-embedding-type": "learned_absolute" if learned else model.position_embedding,
        "--max-position-embeddings": (model.max_position_embeddings or 0) if learned else seq_length,
    }
    if model.position_embedding == "rope":
        # it reads a whole number
        arguments["--rotary-base"] = round(model.rope_theta or ROTARY_BASE)
        if model.partial_rotary_factor < 1:
            arguments["--rotary-percent"] = model.partial_rotary_factor
        arguments |= _stretched(model) | _unrotated(model)
    return arguments


def _stretched(model: ModelSpec) -> Arguments:
    """Stretched frequencies. Latent attention is always yarn there, whose factor 1 stretches nothing."""
    scaling, method = model.rope_scaling, rotary_method(model)
    if scaling is None or method is None:
        return {} if model.mla is None else {"--rotary-scaling-factor": 1.0}
    factor = scaling.factor or 1.0
    if method == "yarn":
        return _weights(scaling) | (_yarn(scaling) if model.mla is None else {"--rotary-scaling-factor": factor})
    if method == "llama3":
        return {"--use-rope-scaling": True, "--rope-scaling-factor": factor}
    return {"--rotary-seq-len-interpolation-factor": round(factor)}


def _yarn(scaling: RopeScalingSpec) -> Arguments:
    """Yarn of attention that is not latent, which has each number as an option."""
    arguments: Arguments = {
        "--position-embedding-type": "yarn",
        "--rotary-scaling-factor": scaling.factor or 1.0,
        "--yarn-original-max-position-embeddings": scaling.original_max_position_embeddings or 4096,
        "--yarn-beta-fast": scaling.beta_fast or 32.0,
        "--yarn-beta-slow": scaling.beta_slow or 1.0,
    }
    if scaling.truncate is False:
        arguments["--no-yarn-correction-range-round-to-int"] = True
    return arguments


def _weights(scaling: RopeScalingSpec) -> Arguments:
    """Weights of yarn's scales, 1 and 0 unless they are told."""
    weights = {"--mscale": scaling.mscale, "--mscale-all-dim": scaling.mscale_all_dim}
    return {option: weight for option, weight in weights.items() if weight is not None}


def _unrotated(model: ModelSpec) -> Arguments:
    """Every n-th layer without rotary positions; as a list where n does not divide the layers."""
    n, layers = model.no_rope_layer_interval, model.num_hidden_layers
    if n is None or n > layers:
        return {}
    return {"--no-rope-freq": n if layers % n == 0 else listed((i + 1) % n == 0 for i in range(layers))}


def router_arguments(moe: MoESpec) -> Arguments:
    """The arguments of a router with everything stated."""
    arguments: Arguments = {
        "--moe-router-topk": moe.num_experts_per_tok,
        "--moe-router-dtype": "fp32",
        "--moe-router-score-function": moe.scoring_func or "softmax",
        **_balance(moe),
    }
    # before the choice scores are not normed over the chosen; of a single one the softmax would be 1
    if moe.scoring_func == "softmax" and (not moe.norm_topk_prob or moe.num_experts_per_tok == 1):
        arguments["--moe-router-pre-softmax"] = True
    if moe.n_group is not None and moe.topk_group is not None:
        arguments |= {"--moe-router-num-groups": moe.n_group, "--moe-router-group-topk": moe.topk_group}
    if moe.routed_scaling_factor != 1:
        arguments["--moe-router-topk-scaling-factor"] = moe.routed_scaling_factor
    if moe.scores_on_input:
        arguments["--moe-apply-probs-on-input"] = True
    return arguments


def _balance(moe: MoESpec) -> Arguments:
    """A loss of each sequence or of the batch, a bias that moves with the load, or both."""
    loss = moe.router_aux_loss_coef or 0.0
    kind = "none" if not loss else "seq_aux_loss" if moe.seq_aux else "aux_loss"
    arguments: Arguments = {"--moe-router-load-balancing-type": kind, "--moe-aux-loss-coeff": loss}
    if moe.balancing_bias:
        arguments["--moe-router-enable-expert-bias"] = True
        arguments["--moe-router-bias-update-rate"] = moe.bias_update_rate or 0.0
    if moe.router_z_loss_coef:
        arguments["--moe-z-loss-coeff"] = moe.router_z_loss_coef
    return arguments


def model_arguments(model: ModelSpec, seq_length: int, vocab_divisible_by: int, dropout: bool = False) -> Arguments:
    """All arguments that decide the model's parameters, their shapes, its forward and its losses."""
    model = stated(model)
    return {
        "--num-layers": model.num_hidden_layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": _ffn_hidden_size(model),
        **_attention(model),
        **position_arguments(model, seq_length),
        **_vocabulary(model, vocab_divisible_by),
        **_norms(model),
        **_activation(model),
        **_biases(model),
        **(_experts(model, model.moe) if model.moe else {}),
        **_further_tokens(model),
        **({} if dropout else {"--attention-dropout": 0.0, "--hidden-dropout": 0.0}),
    }


def _ffn_hidden_size(model: ModelSpec) -> int:
    """Width of dense MLPs; of experts where no layer is dense."""
    return model.intermediate_size or (model.moe.moe_intermediate_size if model.moe else 4 * model.hidden_size)


def _attention(model: ModelSpec) -> Arguments:
    arguments: Arguments = {"--num-attention-heads": model.num_attention_heads, "--kv-channels": model.head_dim}
    if model.mla is not None:
        arguments |= _latent(model.mla)
    elif model.num_key_value_heads != model.num_attention_heads:
        arguments |= {"--group-query-attention": True, "--num-query-groups": model.num_key_value_heads}
    if model.attention_sinks:
        arguments["--softmax-type"] = "learnable"
    if model.attn_output_gate:
        arguments["--attention-output-gate"] = True
    return arguments | _windows(model)


def _windows(model: ModelSpec) -> Arguments:
    """The window, and the layers that have none: every n-th, or those that a list of all layers says."""
    slides = [kind.attention == "sliding" for kind in model.layers]
    if model.sliding_window is None or not any(slides):
        return {}
    # (left, right) keys beside the query's own
    arguments: Arguments = {"--window-size": f"({model.sliding_window - 1},0)"}
    if not all(slides):
        arguments["--window-attn-skip-freq"] = every_nth([not slide for slide in slides]) or listed(slides)
    return arguments


def _latent(mla: MLASpec) -> Arguments:
    arguments: Arguments = {
        "--multi-latent-attention": True,
        "--kv-lora-rank": mla.kv_lora_rank,
        "--qk-head-dim": mla.qk_nope_head_dim,
        "--qk-pos-emb-head-dim": mla.qk_rope_head_dim,
        "--v-head-dim": mla.v_head_dim,
    }
    if mla.q_lora_rank is not None:
        arguments["--q-lora-rank"] = mla.q_lora_rank
    return arguments


def _vocabulary(model: ModelSpec, divisible_by: int) -> Arguments:
    arguments: Arguments = {"--vocab-size": model.vocab_size, "--make-vocab-size-divisible-by": divisible_by}
    if not model.tie_word_embeddings:
        arguments["--untie-embeddings-and-output-weights"] = True
    return arguments


def _norms(model: ModelSpec) -> Arguments:
    arguments: Arguments = {
        "--normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "--norm-epsilon": model.norm_eps or 0.0,
    }
    if model.zero_centered_norm:
        arguments["--apply-layernorm-1p"] = True
    # latent attention norms its latents under the same option
    if model.qk_norm or model.mla is not None:
        arguments["--qk-layernorm"] = True
    return arguments


def _activation(model: ModelSpec) -> Arguments:
    """SwiGLU, the gated sigmoid of gpt-oss, squared ReLU, GELU: fused with a bias it is the tanh's, else the exact."""
    arguments: Arguments = {}
    if model.gated_mlp:
        arguments["--quick-geglu" if model.activation == "quick_gelu" else "--swiglu"] = True
    elif model.activation == "relu2":
        arguments["--squared-relu"] = True
    elif model.activation == "gelu" and model.has_mlp_bias:
        arguments["--no-bias-gelu-fusion"] = True
    if model.swiglu_limit is not None:
        arguments["--activation-func-clamp-value"] = model.swiglu_limit
    if model.glu_linear_offset:
        arguments["--glu-linear-offset"] = model.glu_linear_offset
    return arguments


def _biases(model: ModelSpec) -> Arguments:
    if model.has_mlp_bias:
        return {}
    return {"--disable-bias-linear": True, **({"--add-qkv-bias": True} if model.qkv_bias else {})}


def _experts(model: ModelSpec, moe: MoESpec) -> Arguments:
    has_experts = [kind.mlp == "moe" for kind in model.layers]
    arguments: Arguments = {
        "--num-experts": moe.num_experts,
        "--moe-ffn-hidden-size": moe.moe_intermediate_size,
        "--moe-layer-freq": "1" if all(has_experts) else listed(has_experts),
        "--moe-grouped-gemm": True,
        "--moe-permute-fusion": True,
    }
    if moe.shared_expert_intermediate_size:
        arguments["--moe-shared-expert-intermediate-size"] = moe.shared_expert_intermediate_size
        if moe.shared_expert_gate:
            arguments["--moe-shared-expert-gate"] = True
    return arguments | router_arguments(moe)


def _further_tokens(model: ModelSpec) -> Arguments:
    """Multi-token prediction and the weight of its loss."""
    if not model.num_nextn_predict_layers:
        return {}
    return {
        "--mtp-num-layers": model.num_nextn_predict_layers,
        "--mtp-loss-scaling-factor": model.mtp_loss_scaling_factor or 0.0,
    }
