"""A model from Megatron-LM's arguments, with Megatron's defaults for what they leave out."""

from __future__ import annotations

import re
from typing import Any

from planner.export.megatron.model.layer_flags import layer_flags
from planner.export.megatron.model.read_positions import POSITION_OPTIONS, read_positions
from planner.export.megatron.model.read_router import ROUTER_OPTIONS, expert_layers, layers_with_experts, read_experts
from planner.export.megatron.options import Options, decimal, given, size, text
from planner.export.megatron.tokenizers import vocabulary_of
from planner.specs.units import is_count
from planner.trainers.rules.facts import every_nth

MODEL_OPTIONS = POSITION_OPTIONS | ROUTER_OPTIONS | {
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--group-query-attention",
    "--num-query-groups", "--kv-channels", "--vocab-size", "--padded-vocab-size", "--swiglu", "--squared-relu",
    "--quick-geglu", "--glu-linear-offset", "--activation-func-clamp-value", "--normalization", "--norm-epsilon",
    "--layernorm-epsilon", "--apply-layernorm-1p", "--disable-bias-linear", "--add-qkv-bias", "--qk-layernorm",
    "--untie-embeddings-and-output-weights", "--attention-output-gate", "--multi-latent-attention", "--q-lora-rank",
    "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", "--mtp-num-layers",
    "--mtp-loss-scaling-factor", "--window-size", "--window-attn-skip-freq", "--softmax-type",
}  # fmt: skip


def read_model(options: Options) -> dict[str, Any]:
    """Fields of a ModelSpec. Raises SpecError where a size is missing or is no number."""
    hidden, heads = size(options, "--hidden-size"), size(options, "--num-attention-heads")
    layers = size(options, "--num-layers")
    bias = "--disable-bias-linear" not in options
    model: dict[str, Any] = {
        "name": "imported",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": given(options, "--ffn-hidden-size", _default_ffn(hidden, "--swiglu" in options)),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(options, heads),
        "head_dim": given(options, "--kv-channels", hidden // max(heads, 1)),
        "vocab_size": _vocabulary(options),
        "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in options,
        **_activation(options, bias),
        **_norms(options),
        "bias": bias,
        "attention_bias": "all" if bias else "qkv" if "--add-qkv-bias" in options else "none",
        "attention_sinks": options.get("--softmax-type") == ["learnable"],
        "attn_output_gate": "--attention-output-gate" in options,
        **read_positions(options, layers),
        **_windows(options, layers),
    }
    if "--num-experts" in options:
        _add_experts(model, options, bias)
    if "--multi-latent-attention" in options:
        model["mla"] = _latent(options)
    if given(options, "--mtp-num-layers", 0):
        model["num_nextn_predict_layers"] = size(options, "--mtp-num-layers")
        model["mtp_loss_scaling_factor"] = decimal(options, "--mtp-loss-scaling-factor", 0.1)
    return model


def _default_ffn(hidden: int, is_swiglu: bool) -> int:
    """Width of a dense MLP: 4·hidden; two thirds of that, in multiples of 64, for SwiGLU."""
    return int((4 * hidden * 2 / 3) / 64) * 64 if is_swiglu else 4 * hidden


def _key_value_heads(options: Options, heads: int) -> int:
    return given(options, "--num-query-groups", 1) if "--group-query-attention" in options else heads


def _vocabulary(options: Options) -> int | None:
    """Size of the vocabulary; None where only the tokenizer knows it."""
    for name in ("--vocab-size", "--padded-vocab-size"):
        if name in options:
            return size(options, name)
    tokenizer = text(options, "--tokenizer-model") or text(options, "--tokenizer-name-or-path")
    return vocabulary_of(text(options, "--tokenizer-type", "GPT2BPETokenizer"), tokenizer)


def _activation(options: Options, bias: bool) -> dict[str, Any]:
    """The MLP's activation: a GELU that is fused with a bias is the tanh's."""
    gated = "--swiglu" in options or "--quick-geglu" in options
    if gated:
        kind = "silu" if "--swiglu" in options else "quick_gelu"
    elif "--squared-relu" in options:
        kind = "relu2"
    else:
        kind = "gelu_tanh" if bias and "--no-bias-gelu-fusion" not in options else "gelu"
    return {
        "gated_mlp": gated,
        "activation": kind,
        "swiglu_limit": decimal(options, "--activation-func-clamp-value"),
        "glu_linear_offset": decimal(options, "--glu-linear-offset", 0.0),
    }


def _norms(options: Options) -> dict[str, Any]:
    epsilon = decimal(options, "--norm-epsilon", decimal(options, "--layernorm-epsilon", 1e-5))
    return {
        "norm": "rmsnorm" if options.get("--normalization") == ["RMSNorm"] else "layernorm",
        "norm_eps": epsilon,
        "norm_bias": True,
        "zero_centered_norm": "--apply-layernorm-1p" in options,
        "qk_norm": "--qk-layernorm" in options and "--multi-latent-attention" not in options,
    }


def _windows(options: Options, num_layers: int) -> dict[str, Any]:
    """The window, and the layers that have it: all, all but every n-th, or as a list says."""
    numbers = re.findall(r"\d+", text(options, "--window-size"))
    if not numbers:
        return {}
    pattern, window = text(options, "--window-attn-skip-freq").strip(), {"sliding_window": int(numbers[0]) + 1}
    if not pattern or is_count(pattern):
        return {**window, "sliding_window_pattern": int(pattern) if pattern else None}
    slides = layer_flags("--window-attn-skip-freq", pattern, num_layers)
    if n := every_nth([not slide for slide in slides]):
        return {**window, "sliding_window_pattern": n}
    return {**window, "layer_types": ["sliding" if slide else "full" for slide in slides]}


def _add_experts(model: dict[str, Any], options: Options, bias: bool) -> None:
    """Put the mixture and the layers that have it into the model's fields."""
    has_experts = layers_with_experts(options, model["num_hidden_layers"])
    model["moe"] = read_experts(options, model["intermediate_size"], bias)
    where = expert_layers(has_experts)
    model["moe"] |= where.pop("moe", {})
    model |= where
    if all(has_experts):
        model["intermediate_size"] = None


def _latent(options: Options) -> dict[str, Any]:
    """Latent attention; Megatron's defaults are not DeepSeek's: kv-lora-rank 32."""
    return {
        "q_lora_rank": size(options, "--q-lora-rank") if "--q-lora-rank" in options else None,
        "kv_lora_rank": given(options, "--kv-lora-rank", 32),
        "qk_nope_head_dim": given(options, "--qk-head-dim", 128),
        "qk_rope_head_dim": given(options, "--qk-pos-emb-head-dim", 64),
        "v_head_dim": given(options, "--v-head-dim", 128),
    }
