"""Rules on models that torchtitan's builders cannot describe, whatever the layout."""

from __future__ import annotations

from planner.specs.model import ModelSpec
from planner.trainers.rules.common import Rule, model_rule

_GPT_OSS = {24: 32, 36: 128}
"""Number of experts by number of layers of gpt-oss 20b and 120b, the two sizes that torchtitan's gpt_oss builds."""


def is_gpt_oss(model: ModelSpec) -> bool:
    """True for the two models that torchtitan's gpt_oss builds."""
    return (
        model.attention_sinks
        and model.moe is not None
        and _GPT_OSS.get(model.num_hidden_layers) == model.moe.num_experts
        and (model.hidden_size, model.num_attention_heads, model.num_key_value_heads) == (2880, 64, 8)
        and (model.vocab_size, model.moe.moe_intermediate_size, model.sliding_window) == (201_088, 2880, 128)
    )


TORCHTITAN_MODEL_RULES: tuple[Rule, ...] = (
    model_rule("position_embedding", lambda m: m.position_embedding != "rope", lambda m: "its models rotate positions"),
    model_rule(
        "partial_rotary_factor",
        lambda m: m.partial_rotary_factor < 1,
        lambda m: f"its models rotate whole heads, not {m.partial_rotary_factor:g} of each",
    ),
    model_rule("norm", lambda m: m.norm != "rmsnorm", lambda m: f"its models have RMSNorm, not {m.norm}"),
    model_rule("embedding_norm", lambda m: m.embedding_norm, lambda m: "it has no norm after the embedding"),
    model_rule("post_norms", lambda m: m.post_norms, lambda m: "it has no second norm after attention and MLP"),
    model_rule(
        "activation",
        lambda m: not (m.gated_mlp and m.activation == "silu"),
        lambda m: f"its MLPs are SwiGLU, the model's {'gated' if m.gated_mlp else 'plain'} {m.activation}",
    ),
    model_rule(
        "bias",
        lambda m: (m.output_bias or m.has_mlp_bias) and not is_gpt_oss(m),
        lambda m: "its models have biases on queries, keys and values only, but for gpt-oss",
    ),
    model_rule(
        "attention_chunk_size", lambda m: m.attention_chunk_size is not None, lambda m: "it attends in chunks nowhere"
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
)
