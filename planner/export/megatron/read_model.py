"""A model from Megatron-LM's arguments, with Megatron's defaults for what they leave out."""

from __future__ import annotations

import re
from typing import Any

from planner.errors import SpecError
from planner.export.megatron.options import Options, text
from planner.export.megatron.tokenizers import vocabulary_of

MODEL_OPTIONS = {
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--group-query-attention",
    "--num-query-groups", "--kv-channels", "--vocab-size", "--padded-vocab-size", "--swiglu", "--squared-relu",
    "--normalization", "--disable-bias-linear", "--add-qkv-bias", "--qk-layernorm",
    "--untie-embeddings-and-output-weights", "--position-embedding-type", "--use-rotary-position-embeddings",
    "--no-position-embedding", "--max-position-embeddings", "--num-experts", "--moe-router-topk", "--moe-layer-freq",
    "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--moe-shared-expert-gate",
    "--moe-router-enable-expert-bias", "--multi-latent-attention", "--q-lora-rank", "--kv-lora-rank", "--qk-head-dim",
    "--qk-pos-emb-head-dim", "--v-head-dim", "--mtp-num-layers", "--window-size", "--window-attn-skip-freq",
    "--softmax-type", "--rotary-base", "--rotary-percent",
}  # fmt: skip
_POSITIONS = {
    "learned_absolute": "learned", "rope": "rope", "yarn": "rope", "mrope": "rope",
    "alibi": "alibi", "none": "none",
}  # fmt: skip


def read_model(options: Options) -> dict[str, Any]:
    """Fields of a ModelSpec. Raises SpecError where a size is missing or is no number."""
    hidden, heads = _size(options, "--hidden-size"), _size(options, "--num-attention-heads")
    gated = "--swiglu" in options
    bias = "--disable-bias-linear" not in options
    model: dict[str, Any] = {
        "name": "imported",
        "num_hidden_layers": _size(options, "--num-layers"),
        "hidden_size": hidden,
        "intermediate_size": _given(options, "--ffn-hidden-size", _default_ffn(hidden, gated)),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(options, heads),
        "head_dim": _given(options, "--kv-channels", hidden // heads),
        "vocab_size": _vocabulary(options),
        "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in options,
        "gated_mlp": gated,
        "activation": "silu" if gated else "relu2" if "--squared-relu" in options else "gelu",
        "norm": "rmsnorm" if options.get("--normalization") == ["RMSNorm"] else "layernorm",
        "bias": bias,
        "norm_bias": True,
        "attention_bias": "all" if bias else "qkv" if "--add-qkv-bias" in options else "none",
        "qk_norm": "--qk-layernorm" in options and "--multi-latent-attention" not in options,
        "attention_sinks": options.get("--softmax-type") == ["learnable"],
        **_positions(options),
        **_windows(options),
    }
    if "--num-experts" in options:
        model["moe"] = _experts(options, model["num_hidden_layers"], model["intermediate_size"], bias)
        if not model["moe"]["first_k_dense_replace"] and model["moe"]["moe_layer_freq"] == 1:
            model["intermediate_size"] = None
    if "--multi-latent-attention" in options:
        model["mla"] = _latent(options)
    if "--mtp-num-layers" in options:
        model["num_nextn_predict_layers"] = _given(options, "--mtp-num-layers", 0)
    return model


def _given(options: Options, name: str, default: int) -> int:
    """The size that an option gives; `default` where the option is not given."""
    return _size(options, name) if name in options else default


def _size(options: Options, name: str) -> int:
    """The size that an option gives; SpecError where it gives none."""
    values = options.get(name, [])
    try:
        return int(values[0])
    except IndexError:
        raise SpecError(f"{name}: is missing, or its variable is not set in the script", f"add {name} N") from None
    except ValueError:
        raise SpecError(f"{name}: {values[0]!r} is no whole number", "write a number") from None


def _default_ffn(hidden: int, gated: bool) -> int:
    """Width of a dense MLP: 4·hidden; two thirds of that, in multiples of 64, for SwiGLU."""
    return int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden


def _key_value_heads(options: Options, heads: int) -> int:
    return _given(options, "--num-query-groups", 1) if "--group-query-attention" in options else heads


def _vocabulary(options: Options) -> int | None:
    """Size of the vocabulary; None where only the tokenizer knows it."""
    for name in ("--vocab-size", "--padded-vocab-size"):
        if name in options:
            return _size(options, name)
    tokenizer = text(options, "--tokenizer-model") or text(options, "--tokenizer-name-or-path")
    return vocabulary_of(text(options, "--tokenizer-type", "GPT2BPETokenizer"), tokenizer)


def _positions(options: Options) -> dict[str, Any]:
    kind = text(options, "--position-embedding-type", "learned_absolute")
    if "--use-rotary-position-embeddings" in options:
        kind = "rope"
    elif "--no-position-embedding" in options and kind == "learned_absolute":
        kind = "none"
    position = _POSITIONS.get(kind)
    if position is None:
        raise SpecError(f"--position-embedding-type: {kind!r} is unknown", f"one of {', '.join(_POSITIONS)}")
    if position == "rope":
        base = text(options, "--rotary-base", "10000")
        share = text(options, "--rotary-percent", "1.0")
        return {
            "position_embedding": position,
            "rope_theta": int(base) if base.isdigit() else None,
            "partial_rotary_factor": float(share) if re.fullmatch(r"[0-9.]+", share) else 1.0,
        }
    if position != "learned":
        return {"position_embedding": position}
    rows = "--max-position-embeddings" if "--max-position-embeddings" in options else "--seq-length"
    return {"position_embedding": position, "max_position_embeddings": _size(options, rows)}


def _windows(options: Options) -> dict[str, Any]:
    if "--window-size" not in options:
        return {}
    left = int(re.findall(r"\d+", text(options, "--window-size"))[0])
    every = text(options, "--window-attn-skip-freq")
    return {"sliding_window": left + 1, "sliding_window_pattern": int(every) if every.isdigit() else None}


def _experts(options: Options, num_layers: int, width: int, bias: bool) -> dict[str, Any]:
    """Experts as wide as a dense MLP (`width`) unless they are given a width of their own."""
    dense, every = _layer_pattern(text(options, "--moe-layer-freq", "1"), num_layers)
    return {
        "num_experts": _size(options, "--num-experts"),
        "num_experts_per_tok": _given(options, "--moe-router-topk", 2),
        "moe_intermediate_size": _given(options, "--moe-ffn-hidden-size", width),
        "shared_expert_intermediate_size": _given(options, "--moe-shared-expert-intermediate-size", 0),
        "shared_expert_gate": "--moe-shared-expert-gate" in options,
        "first_k_dense_replace": dense,
        "moe_layer_freq": every,
        "router_bias": bias or "--moe-router-enable-expert-bias" in options,
    }


def _layer_pattern(pattern: str, num_layers: int) -> tuple[int, int]:
    """(dense layers in front, n where every n-th of the rest is MoE) for `1`, `2` or `([0]*3+[1]*58)`."""
    if pattern.strip().isdigit():
        return 0, int(pattern)  # Megatron's first layer is MoE, the planner's n-th: as many of them, one place apart
    parts = re.findall(r"\[([01, ]+)\](?:\*(\d+))?", pattern)
    layers = [int(bit) for bits, times in parts for _ in range(int(times or 1)) for bit in bits.split(",")]
    first = layers.index(1) if 1 in layers else len(layers)
    for every in range(1, first + 2):
        dense = first + 1 - every
        if layers == [int(i >= dense and (i - dense + 1) % every == 0) for i in range(num_layers)]:
            return dense, every
    raise SpecError(
        f"--moe-layer-freq: {pattern!r} has no counterpart here", "dense layers in front, then every n-th has experts"
    )


def _latent(options: Options) -> dict[str, Any]:
    """Latent attention; Megatron's defaults are not DeepSeek's: kv-lora-rank 32."""
    return {
        "q_lora_rank": _size(options, "--q-lora-rank") if "--q-lora-rank" in options else None,
        "kv_lora_rank": _given(options, "--kv-lora-rank", 32),
        "qk_nope_head_dim": _given(options, "--qk-head-dim", 128),
        "qk_rope_head_dim": _given(options, "--qk-pos-emb-head-dim", 64),
        "v_head_dim": _given(options, "--v-head-dim", 128),
    }
