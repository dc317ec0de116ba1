"""A model in fields of Megatron-Bridge's providers, where Megatron-LM spells it otherwise or has no option."""

from __future__ import annotations

from typing import Any

from planner.export.common.model import ROTARY_BASE, stated
from planner.specs.model import ModelSpec
from planner.specs.model_parts import RopeScalingSpec
from planner.trainers.rules.bridge_model import Family, family_of
from planner.trainers.rules.facts import every_nth, query_width, rotary_method

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
