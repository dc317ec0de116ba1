"""A model in Megatron-LM's arguments."""

from __future__ import annotations

from itertools import groupby

from planner.export.common.arguments import Arguments
from planner.specs.model import ModelSpec
from planner.specs.model_parts import MLASpec, MoESpec

ROTARY_BASE = 10_000
"""Megatron's default."""


def rotary_base(model: ModelSpec) -> int | None:
    """The base of the rotary frequencies, where the model spec states one: Megatron reads a whole number."""
    return None if model.rope_theta is None else round(model.rope_theta)


def model_arguments(model: ModelSpec, seq_length: int, vocab_divisible_by: int, dropout: bool = False) -> Arguments:
    """All arguments that decide the model's parameters, their shapes, and its forward."""
    return {
        "--num-layers": model.num_hidden_layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": _ffn_hidden_size(model),
        **_attention(model),
        **_positions(model, seq_length),
        **_vocabulary(model, vocab_divisible_by),
        **_norms(model),
        **_activation(model),
        **_biases(model),
        **(_experts(model, model.moe) if model.moe else {}),
        **({"--mtp-num-layers": model.num_nextn_predict_layers} if model.num_nextn_predict_layers else {}),
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
    if model.sliding_window is not None:
        # (left, right) keys beside the query's own
        arguments["--window-size"] = f"({model.sliding_window - 1},0)"
        if model.sliding_window_pattern is not None:
            arguments["--window-attn-skip-freq"] = model.sliding_window_pattern
    if model.attention_sinks:
        arguments["--softmax-type"] = "learnable"
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


def _positions(model: ModelSpec, seq_length: int) -> Arguments:
    learned = model.position_embedding == "learned"
    arguments: Arguments = {
        "--position-embedding-type": "learned_absolute" if learned else model.position_embedding,
        "--max-position-embeddings": (model.max_position_embeddings or 0) if learned else seq_length,
    }
    if model.position_embedding == "rope":
        arguments["--rotary-base"] = rotary_base(model) or ROTARY_BASE
        if model.partial_rotary_factor < 1:
            arguments["--rotary-percent"] = model.partial_rotary_factor
    return arguments


def _vocabulary(model: ModelSpec, divisible_by: int) -> Arguments:
    arguments: Arguments = {"--vocab-size": model.vocab_size, "--make-vocab-size-divisible-by": divisible_by}
    if not model.tie_word_embeddings:
        arguments["--untie-embeddings-and-output-weights"] = True
    return arguments


def _norms(model: ModelSpec) -> Arguments:
    arguments: Arguments = {"--normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"}
    # latent attention norms its latents under the same option
    if model.qk_norm or model.mla is not None:
        arguments["--qk-layernorm"] = True
    return arguments


def _activation(model: ModelSpec) -> Arguments:
    """SwiGLU or squared ReLU; plain GELU needs no argument."""
    if model.gated_mlp:
        return {"--swiglu": True}
    return {"--squared-relu": True} if model.activation == "relu2" else {}


def _biases(model: ModelSpec) -> Arguments:
    if model.has_mlp_bias:
        return {}
    return {"--disable-bias-linear": True, **({"--add-qkv-bias": True} if model.qkv_bias else {})}


def _experts(model: ModelSpec, moe: MoESpec) -> Arguments:
    arguments: Arguments = {
        "--num-experts": moe.num_experts,
        "--moe-ffn-hidden-size": moe.moe_intermediate_size,
        "--moe-router-topk": moe.num_experts_per_tok,
        "--moe-layer-freq": _layer_pattern([kind.mlp == "moe" for kind in model.layers]),
        "--moe-grouped-gemm": True,
        "--moe-permute-fusion": True,
        "--moe-router-dtype": "fp32",
    }
    if moe.shared_expert_intermediate_size:
        arguments["--moe-shared-expert-intermediate-size"] = moe.shared_expert_intermediate_size
        if moe.shared_expert_gate:
            arguments["--moe-shared-expert-gate"] = True
    if model.balances_by_bias:
        arguments |= {
            "--moe-router-score-function": "sigmoid",
            "--moe-router-enable-expert-bias": True,
            "--moe-router-load-balancing-type": "none",
        }
    elif moe.num_experts_per_tok == 1:
        # the softmax of a single logit is 1
        arguments["--moe-router-pre-softmax"] = True
    return arguments


def _layer_pattern(is_moe: list[bool]) -> str:
    """--moe-layer-freq: `([0]*3+[1]*58)`, or 1 where every layer has experts."""
    if all(is_moe):
        return "1"
    runs = [(int(key), len(list(group))) for key, group in groupby(is_moe)]
    return "(" + "+".join(f"[{key}]*{length}" for key, length in runs) + ")"
