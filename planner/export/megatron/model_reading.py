"""A model from Megatron-LM's arguments, with Megatron's defaults for what they leave out."""

from __future__ import annotations

import re
from typing import Any

from planner.errors import SpecError
from planner.export.megatron.option_words import Options, decimal, given, layer_flags, size, text
from planner.specs.registry import load_model, model_names
from planner.specs.units import is_count
from planner.trainers.rules.facts import every_nth

_BY_TYPE = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    # Megatron-LM's default for its own format: 2^17 tokens
    "TikTokenizer": 131072,
}
"""Tokenizers of Megatron-LM that stand for one vocabulary."""
_BY_NAME: tuple[tuple[str, int], ...] = (
    (r"multiMixV8.*128k", 131072),
    (r"nemotron_2_256k|nemotron[-_]?[34]|minitron", 256000),
    (r"nemotron[-_]?h|nemotron[-_]?nano|nemotron6", 131072),
    (r"bigscience/(tokenizer|bloom)|byte-level-bpe-tokenizer-no-norm-250k", 250680),
    (r"bigscience/oscar_13_languages", 250000),
    (r"test_150k_vocab", 150000),
    (r"google/mt5|mt0", 250100),
    (r"\bt5-(small|base|large|3b|11b)|google/(t5|flan)", 32100),
    (r"gpt[-_]?neox|pythia|20B_tokenizer|olmo", 50254),
    (r"gpt-oss|o200k", 201088),
    (r"\bgpt2|gpt-2|opt-", 50257),
    (r"starcoder2|starcoder", 49152),
    (r"(meta-)?llama[-_]?(3|guard-3)|Hermes-3", 128256),
    (r"llama[-_]?4", 202048),
    (r"(code)?llama[-_]?2?|vicuna|tinyllama|yi-6b-llama", 32000),
    (r"mixtral[-_]8x22b", 32768),
    (r"mixtral|mistral-7b.*v0\.[12]|mistral[-_]7b", 32000),
    (r"mistral[-_]?nemo|tekken|mistral-small|magistral|devstral", 131072),
    (r"qwen1?\.?5?-?moe|qwen3|qwen2\.5-(0\.5|1\.5|3)b|qwen2-(0\.5|1\.5)b|qwen1\.5-(0\.5|1\.8|4)b", 151936),
    (r"qwen", 152064),
    (r"deepseek[-_]v?2[-_]lite|deepseek[-_]v2|deepseek[-_]coder-v2|deepseek[-_]16b|deepseek-moe", 102400),
    (r"deepseek", 129280),
    (r"moonlight|kimi", 163840),
    (r"gemma[-_]?3", 262208),
    (r"gemma", 256000),
    (r"\blfm2", 65536),
    (r"minimax[-_]?(m2|text)", 200064),
    (r"phi-?3", 32064),
    (r"phi-?4", 100352),
    (r"\byi-", 64000),
    (r"internlm2?", 92544),
    (r"baichuan2", 125696),
    (r"chatglm|glm-4", 151552),
    (r"falcon-(7b|40b)", 65024),
    (r"command-r|aya", 256000),
)
"""Beginnings of the names of tokenizers on the Hugging Face hub and elsewhere, and the vocab_size of their models."""


def vocabulary_of(kind: str, name: str) -> int | None:
    """Tokens of the vocabulary of a tokenizer of a kind, loaded from a name or a path; None where it is not known.

    The published model of that name decides, then the table of names, then the kind.
    """
    short = name.rstrip("/").rpartition("/")[2].lower()
    for model, aliases in model_names().items():
        if short and (short == model or short in aliases or name.lower() in aliases):
            return load_model(model).vocab_size
    for pattern, vocab_size in _BY_NAME:
        if name and re.search(pattern, name, re.IGNORECASE):
            return vocab_size
    return _BY_TYPE.get(kind)


POSITION_OPTIONS = {
    "--position-embedding-type", "--use-rotary-position-embeddings", "--no-position-embedding",
    "--max-position-embeddings", "--rotary-base", "--rotary-percent", "--use-rope-scaling", "--rope-scaling-factor",
    "--rotary-scaling-factor", "--rotary-seq-len-interpolation-factor", "--mscale", "--mscale-all-dim",
    "--yarn-original-max-position-embeddings", "--yarn-beta-fast", "--yarn-beta-slow",
    "--no-yarn-correction-range-round-to-int", "--no-rope-freq",
}  # fmt: skip
_KINDS = {
    "learned_absolute": "learned", "rope": "rope", "yarn": "rope", "mrope": "rope", "alibi": "alibi", "none": "none",
}  # fmt: skip
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_positions(options: Options, num_layers: int) -> dict[str, Any]:
    """Fields of positions. Raises SpecError for kinds and patterns that are unknown."""
    kind = text(options, "--position-embedding-type", "learned_absolute")
    if "--use-rotary-position-embeddings" in options:
        kind = "rope"
    elif "--no-position-embedding" in options and kind == "learned_absolute":
        kind = "none"
    position = _KINDS.get(kind)
    if position is None:
        raise SpecError(f"--position-embedding-type: {str(kind)[:60]!r} is unknown", f"one of {', '.join(_KINDS)}")
    if position == "learned":
        rows = "--max-position-embeddings" if "--max-position-embeddings" in options else "--seq-length"
        return {"position_embedding": position, "max_position_embeddings": size(options, rows)}
    if position != "rope":
        return {"position_embedding": position}
    base = text(options, "--rotary-base", "10000")
    share = text(options, "--rotary-percent", "1.0")
    return {
        "position_embedding": position,
        "rope_theta": float(base) if re.fullmatch(r"\d+(\.0*)?", base) else None,
        "partial_rotary_factor": float(share) if re.fullmatch(r"[0-9.]+", share) else 1.0,
        "rope_scaling": _scaling(options, kind),
        "no_rope_layer_interval": _unrotated(options, num_layers),
    }


def _scaling(options: Options, kind: str) -> dict[str, Any] | None:
    """How frequencies are stretched. Latent attention has yarn, whose numbers without an option are DeepSeek's."""
    if kind == "yarn":
        return _yarn(options)
    if "--multi-latent-attention" in options:
        factor = decimal(options, "--rotary-scaling-factor", 1.0)
        return None if factor == 1 else _yarn(options)
    if "--use-rope-scaling" in options:
        return {"rope_type": "llama3", "factor": decimal(options, "--rope-scaling-factor", 8.0), **_LLAMA3}
    if "--rotary-seq-len-interpolation-factor" in options:
        factor = decimal(options, "--rotary-seq-len-interpolation-factor", 1.0)
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    return None


def _yarn(options: Options) -> dict[str, Any]:
    positions = "--yarn-original-max-position-embeddings"
    return {
        "rope_type": "yarn",
        "factor": decimal(options, "--rotary-scaling-factor", 1.0),
        "original_max_position_embeddings": size(options, positions) if positions in options else 4096,
        "beta_fast": decimal(options, "--yarn-beta-fast", 32.0),
        "beta_slow": decimal(options, "--yarn-beta-slow", 1.0),
        "mscale": decimal(options, "--mscale"),
        "mscale_all_dim": decimal(options, "--mscale-all-dim"),
        "truncate": False if "--no-yarn-correction-range-round-to-int" in options else None,
    }


def _unrotated(options: Options, num_layers: int) -> int | None:
    """n where every n-th layer has no rotary positions."""
    pattern = text(options, "--no-rope-freq").strip()
    if not pattern or is_count(pattern):
        return int(pattern) if pattern else None
    n = every_nth(layer_flags("--no-rope-freq", pattern, num_layers))
    if n is None:
        raise SpecError(f"--no-rope-freq: {pattern[:60]!r} has no counterpart here", "every n-th layer is unrotated")
    return n


ROUTER_OPTIONS = {
    "--num-experts", "--moe-router-topk", "--moe-layer-freq", "--moe-ffn-hidden-size",
    "--moe-router-topk-scaling-factor", "--moe-shared-expert-intermediate-size", "--moe-shared-expert-gate",
    "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "--moe-router-score-function",
    "--moe-router-pre-softmax", "--moe-router-num-groups", "--moe-router-group-topk",
    "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-z-loss-coeff", "--moe-apply-probs-on-input",
}  # fmt: skip


def read_experts(options: Options, width: int, bias: bool) -> dict[str, Any]:
    """Fields of the mixture; experts are as wide as a dense MLP (`width`) unless they are given their own."""
    chosen = given(options, "--moe-router-topk", 2)
    score = text(options, "--moe-router-score-function", "softmax")
    by_bias = "--moe-router-enable-expert-bias" in options
    # a softmax over the chosen is the whole one divided by their sum; others are divided where there are several
    normed = "--moe-router-pre-softmax" not in options if score == "softmax" else chosen > 1
    return {
        "num_experts": size(options, "--num-experts"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": given(options, "--moe-ffn-hidden-size", width),
        "shared_expert_intermediate_size": given(options, "--moe-shared-expert-intermediate-size", 0),
        "shared_expert_gate": "--moe-shared-expert-gate" in options,
        "router_bias": bias or by_bias,
        "balancing_bias": by_bias,
        "bias_update_rate": decimal(options, "--moe-router-bias-update-rate", 1e-3) if by_bias else None,
        "scoring_func": score,
        "norm_topk_prob": normed,
        "routed_scaling_factor": decimal(options, "--moe-router-topk-scaling-factor") or 1.0,
        "scores_on_input": "--moe-apply-probs-on-input" in options,
        **_groups(options),
        **_losses(options),
    }


def _groups(options: Options) -> dict[str, Any]:
    if "--moe-router-group-topk" not in options or "--moe-router-num-groups" not in options:
        return {}
    return {"n_group": size(options, "--moe-router-num-groups"), "topk_group": size(options, "--moe-router-group-topk")}


def _losses(options: Options) -> dict[str, Any]:
    """The first of the balancing losses; Megatron-LM's weight is 0 unless it is told."""
    kind = (options.get("--moe-router-load-balancing-type") or ["aux_loss"])[0]
    weight = decimal(options, "--moe-aux-loss-coeff", 0.0) if kind.endswith("aux_loss") else 0.0
    return {
        "router_aux_loss_coef": weight,
        "seq_aux": kind == "seq_aux_loss" and weight > 0,
        "router_z_loss_coef": decimal(options, "--moe-z-loss-coeff", 0.0),
    }


def layers_with_experts(options: Options, num_layers: int) -> list[bool]:
    """True for each layer that has experts: every n-th from the first on, or as a list says."""
    pattern = text(options, "--moe-layer-freq", "1").strip()
    if is_count(pattern) and int(pattern):
        return [layer % int(pattern) == 0 for layer in range(num_layers)]
    return layer_flags("--moe-layer-freq", pattern, num_layers)


def expert_layers(has_experts: list[bool]) -> dict[str, Any]:
    """Fields that say which layers have experts: the first k have none, then every n-th has; else each one's kind."""
    first = has_experts.index(True) if True in has_experts else len(has_experts)
    for every in range(1, first + 2):
        dense = first + 1 - every
        if has_experts == [i >= dense and (i - dense + 1) % every == 0 for i in range(len(has_experts))]:
            return {"moe": {"first_k_dense_replace": dense, "moe_layer_freq": every}}
    return {"mlp_layer_types": ["moe" if experts else "dense" for experts in has_experts]}


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
