"""Rules on models that torchtitan's builders cannot describe, whatever the layout."""

from __future__ import annotations

import math
from typing import Any

from planner.specs.model import ModelSpec
from planner.specs.model_parts import RopeScalingSpec
from planner.trainers.rules.common import Rule, model_rule, stretch_rule
from planner.trainers.rules.facts import has_groups, has_local_base, has_usual_scale, rotary_method
from planner.trainers.rules.fine_tuning import WHOLE_MODEL_RULES
from planner.trainers.rules.layer_kinds import UNWRITTEN_RULES
from planner.trainers.rules.plain_fields import PLAIN

_GPT_OSS = {24: 32, 36: 128}
"""Number of experts by number of layers of gpt-oss 20b and 120b, the two sizes that torchtitan's gpt_oss builds."""
_GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False,
}  # fmt: skip
"""Its rotary scaling."""


def is_gpt_oss(model: ModelSpec) -> bool:
    """True for the two models that torchtitan's gpt_oss builds."""
    return (
        model.attention_sinks
        and model.moe is not None
        and _GPT_OSS.get(model.num_hidden_layers) == model.moe.num_experts
        and (model.hidden_size, model.num_attention_heads, model.num_key_value_heads) == (2880, 64, 8)
        and (model.vocab_size, model.moe.moe_intermediate_size, model.sliding_window) == (201_088, 2880, 128)
        and (model.activation, model.swiglu_limit, model.glu_linear_offset) == ("quick_gelu", 7.0, 1.0)
        and model.rope_theta == 150_000
        and model.norm_eps in (None, 1e-5)
        and model.rope_scaling is not None
        and _numbers(model.rope_scaling, _GPT_OSS_YARN) == _GPT_OSS_YARN
    )


def _numbers(scaling: RopeScalingSpec, usual: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a scaling; those that it leaves out are usual."""
    given = {name: getattr(scaling, name) for name in usual}
    return {name: usual[name] if number is None else number for name, number in given.items()}


def _broken_scaling(model: ModelSpec) -> str | None:
    """The method or scale of rotary frequencies that torchtitan does not have; None where it has all."""
    method, scaling = rotary_method(model), model.rope_scaling
    if method is None or scaling is None or is_gpt_oss(model):
        return None
    if method not in ("llama3", "yarn"):
        return f"it stretches rotary frequencies as llama3 or yarn, not {method}"
    if method == "yarn" and not math.isclose(scaling.yarn_scale, 1.0, rel_tol=1e-6):
        return f"yarn only rotates queries and keys there, the model scales them by {scaling.yarn_scale:.4g}"
    if method == "llama3" and model.mla is not None:
        return "latent attention has yarn there, not llama3"
    return None


TORCHTITAN_MODEL_RULES: tuple[Rule, ...] = (
    *UNWRITTEN_RULES,
    *WHOLE_MODEL_RULES,
    *PLAIN.values(),
    model_rule("position_embedding", lambda m: m.position_embedding != "rope", lambda m: "its models rotate positions"),
    model_rule(
        "partial_rotary_factor",
        lambda m: m.partial_rotary_factor < 1,
        lambda m: f"its models rotate whole heads, not {m.partial_rotary_factor:g} of each",
    ),
    stretch_rule(_broken_scaling),
    model_rule("rope_local_base_freq", has_local_base, lambda m: "all layers have one rotary base there"),
    model_rule(
        "attention_multiplier",
        lambda m: not has_usual_scale(m),
        lambda m: (
            f"it divides attention logits by the root of a head's width, the model scales by "
            f"{m.attention_multiplier:.4g}"
        ),
    ),
    model_rule("norm", lambda m: m.norm != "rmsnorm", lambda m: f"its models have RMSNorm, not {m.norm}"),
    model_rule(
        "qk_norm_over",
        lambda m: m.qk_norm and m.qk_norm_over != "head_dim",
        lambda m: "norms of queries and keys are over a head there, with one weight for all heads",
    ),
    model_rule(
        "qk_norm", lambda m: m.qk_norm and m.mla is not None, lambda m: "latent attention norms its latents alone there"
    ),
    model_rule(
        "activation",
        lambda m: not (m.gated_mlp and m.activation == "silu") and not is_gpt_oss(m),
        lambda m: f"its MLPs are SwiGLU, the model's {'gated' if m.gated_mlp else 'plain'} {m.activation}",
    ),
    model_rule(
        "swiglu_limit",
        lambda m: (m.swiglu_limit is not None or m.glu_linear_offset != 0) and not is_gpt_oss(m),
        lambda m: "it clamps and offsets the halves of an MLP only in gpt-oss 20b and 120b",
    ),
    model_rule(
        "bias",
        lambda m: (m.output_bias or m.has_mlp_bias) and not is_gpt_oss(m),
        lambda m: "its models have biases on queries, keys and values only, but for gpt-oss",
    ),
    Rule(
        "attention_chunk_size",
        lambda model, training, shape: training.seq_length <= (model.attention_chunk_size or training.seq_length),
        lambda model, training, shape: "it attends in chunks nowhere",
    ),
    model_rule(
        "attention_sinks",
        lambda m: (m.attention_sinks or m.sliding_window is not None) and not is_gpt_oss(m),
        lambda m: "it has sinks and sliding windows only in gpt-oss 20b and 120b",
    ),
    model_rule(
        "num_nextn_predict_layers",
        lambda m: m.num_nextn_predict_layers > 0 and m.mla is None,
        lambda m: "it predicts several tokens only in deepseek_v3, whose attention is latent",
    ),
    model_rule(
        "shared_expert_gate",
        lambda m: m.moe is not None and m.moe.shared_expert_gate,
        lambda m: "it has no gate on the shared expert",
    ),
    model_rule(
        "scores_on_input",
        lambda m: m.moe is not None and m.moe.scores_on_input,
        lambda m: "scores scale what comes out of experts there, not what goes in",
    ),
    model_rule(
        "scoring_func",
        lambda m: m.moe is not None and m.scoring_func == "sqrtsoftplus",
        lambda m: "its router scores by softmax or sigmoid, not sqrtsoftplus",
    ),
    model_rule(
        "n_group",
        lambda m: m.moe is not None and has_groups(m.moe) and m.moe.num_experts < 2 * (m.moe.n_group or 1),
        lambda m: "a group needs two experts there",
    ),
    model_rule(
        "router_z_loss_coef",
        lambda m: m.moe is not None and m.moe.router_z_loss_coef > 0,
        lambda m: "it has no loss on the router's logits",
    ),
)
