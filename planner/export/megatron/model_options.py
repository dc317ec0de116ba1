"""The options of Megatron-LM that say a model: how each is written, and read with Megatron's defaults."""

from __future__ import annotations

import re
from typing import Any

from planner.errors import SpecError
from planner.export.megatron.option_rows import (
    Fields,
    OptionRow,
    amount,
    count,
    flag,
    known,
    names_read,
    read_fields,
    row,
    written,
)
from planner.export.megatron.option_words import Options, decimal, given, layer_flags, size, text
from planner.export.named_models import vocabulary_of
from planner.export.stated_model import ROTARY_BASE, listed, stated
from planner.export.trainer_files import Arguments
from planner.specs.model import ModelSpec
from planner.specs.model_parts import MoESpec
from planner.specs.units import is_count
from planner.trainers.rules.facts import every_nth, rotary_method

_POSITIONS = {
    "learned_absolute": "learned", "rope": "rope", "yarn": "rope", "mrope": "rope", "alibi": "alibi", "none": "none",
}  # fmt: skip
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _width(options: Options) -> int:
    """Width of a dense MLP: 4·hidden unless told; two thirds of that, in multiples of 64, for SwiGLU."""
    hidden = size(options, "--hidden-size")
    unasked = int((4 * hidden * 2 / 3) / 64) * 64 if "--swiglu" in options else 4 * hidden
    return given(options, "--ffn-hidden-size", unasked)


def _write_width(model: ModelSpec) -> int:
    """Width of dense MLPs; of experts where no layer is dense."""
    return model.intermediate_size or (model.moe.moe_intermediate_size if model.moe else 4 * model.hidden_size)


def _read_width(options: Options) -> Fields:
    dense = "--num-experts" not in options or not all(_have_experts(options))
    return {"intermediate_size": _width(options) if dense else None}


def _head_dim(options: Options) -> int:
    return size(options, "--hidden-size") // max(size(options, "--num-attention-heads"), 1)


def _has_groups(model: ModelSpec) -> bool:
    return model.num_key_value_heads != model.num_attention_heads


def _read_groups(options: Options) -> Fields:
    grouped = "--group-query-attention" in options
    heads = given(options, "--num-query-groups", 1) if grouped else size(options, "--num-attention-heads")
    return {"num_key_value_heads": heads}


def _write_windows(model: ModelSpec) -> Arguments:
    """The window, and the layers that have none: every n-th, or those that a list of all layers says."""
    slides = [kind.attention == "sliding" for kind in model.layers]
    if model.sliding_window is None or not any(slides):
        return {}
    # (left, right) keys beside the query's own
    arguments: Arguments = {"--window-size": f"({model.sliding_window - 1},0)"}
    if not all(slides):
        arguments["--window-attn-skip-freq"] = every_nth([not slide for slide in slides]) or listed(slides)
    return arguments


def _read_windows(options: Options) -> Fields:
    """The window, and the layers that have it: all, all but every n-th, or as a list says."""
    numbers = re.findall(r"\d+", text(options, "--window-size"))
    if not numbers:
        return {}
    pattern, window = text(options, "--window-attn-skip-freq").strip(), {"sliding_window": int(numbers[0]) + 1}
    if not pattern or is_count(pattern):
        return {**window, "sliding_window_pattern": int(pattern) if pattern else None}
    slides = layer_flags("--window-attn-skip-freq", pattern, size(options, "--num-layers"))
    if n := every_nth([not slide for slide in slides]):
        return {**window, "sliding_window_pattern": n}
    return {**window, "layer_types": ["sliding" if slide else "full" for slide in slides]}


def _write_positions(model: ModelSpec) -> str:
    """The kind of positions; yarn is one of its own where attention is not latent."""
    if model.position_embedding == "rope":
        return "yarn" if rotary_method(model) == "yarn" and model.mla is None else "rope"
    return "learned_absolute" if model.position_embedding == "learned" else model.position_embedding


def _kind_of_positions(options: Options) -> str:
    kind = text(options, "--position-embedding-type", "learned_absolute")
    if "--use-rotary-position-embeddings" in options:
        return "rope"
    return "none" if "--no-position-embedding" in options and kind == "learned_absolute" else kind


def _read_positions(options: Options) -> Fields:
    kind = _kind_of_positions(options)
    if kind not in _POSITIONS:
        raise SpecError(f"--position-embedding-type: {kind[:60]!r} is unknown", f"one of {', '.join(_POSITIONS)}")
    if _POSITIONS[kind] != "learned":
        return {"position_embedding": _POSITIONS[kind]}
    rows = "--max-position-embeddings" if "--max-position-embeddings" in options else "--seq-length"
    return {"position_embedding": "learned", "max_position_embeddings": size(options, rows)}


def _read_base(options: Options) -> Fields:
    base = text(options, "--rotary-base", "10000")
    return {"rope_theta": float(base) if re.fullmatch(r"\d+(\.0*)?", base) else None}


def _read_share(options: Options) -> Fields:
    share = text(options, "--rotary-percent", "1.0")
    return {"partial_rotary_factor": float(share) if re.fullmatch(r"[0-9.]+", share) else 1.0}


def _write_scaling(model: ModelSpec) -> Arguments:
    """Stretched frequencies. Latent attention is always yarn there, whose factor 1 stretches nothing."""
    scaling, method = model.rope_scaling, rotary_method(model)
    if scaling is None or method is None:
        return {} if model.mla is None else {"--rotary-scaling-factor": 1.0}
    factor = scaling.factor or 1.0
    if method == "llama3":
        return {"--use-rope-scaling": True, "--rope-scaling-factor": factor}
    if method == "linear":
        return {"--rotary-seq-len-interpolation-factor": round(factor)}
    weights = {"--mscale": scaling.mscale, "--mscale-all-dim": scaling.mscale_all_dim}
    arguments: Arguments = {option: weight for option, weight in weights.items() if weight is not None}
    arguments["--rotary-scaling-factor"] = factor
    if model.mla is None:
        arguments |= {
            "--yarn-original-max-position-embeddings": scaling.original_max_position_embeddings or 4096,
            "--yarn-beta-fast": scaling.beta_fast or 32.0,
            "--yarn-beta-slow": scaling.beta_slow or 1.0,
        }
        if scaling.truncate is False:
            arguments["--no-yarn-correction-range-round-to-int"] = True
    return arguments


def _read_scaling(options: Options) -> Fields:
    """How frequencies are stretched. Latent attention has yarn, whose numbers without an option are DeepSeek's."""
    is_latent = "--multi-latent-attention" in options
    scaling: Fields | None = None
    if _kind_of_positions(options) == "yarn" or (is_latent and decimal(options, "--rotary-scaling-factor", 1.0) != 1):
        scaling = {
            "rope_type": "yarn",
            "factor": decimal(options, "--rotary-scaling-factor", 1.0),
            "original_max_position_embeddings": given(options, "--yarn-original-max-position-embeddings", 4096),
            "beta_fast": decimal(options, "--yarn-beta-fast", 32.0),
            "beta_slow": decimal(options, "--yarn-beta-slow", 1.0),
            "mscale": decimal(options, "--mscale"),
            "mscale_all_dim": decimal(options, "--mscale-all-dim"),
            "truncate": False if "--no-yarn-correction-range-round-to-int" in options else None,
        }
    elif "--use-rope-scaling" in options and not is_latent:
        scaling = {"rope_type": "llama3", "factor": decimal(options, "--rope-scaling-factor", 8.0), **_LLAMA3}
    elif not is_latent and (factor := decimal(options, "--rotary-seq-len-interpolation-factor", 1.0)) != 1:
        scaling = {"rope_type": "linear", "factor": factor}
    return {"rope_scaling": scaling}


def _write_unrotated(model: ModelSpec) -> int | str | None:
    """Every n-th layer without rotary positions; as a list where n does not divide the layers."""
    n, layers = model.no_rope_layer_interval, model.num_hidden_layers
    if n is None or n > layers:
        return None
    return n if layers % n == 0 else listed((i + 1) % n == 0 for i in range(layers))


def _read_unrotated(options: Options) -> Fields:
    pattern = text(options, "--no-rope-freq").strip()
    if not pattern or is_count(pattern):
        return {"no_rope_layer_interval": int(pattern) if pattern else None}
    n = every_nth(layer_flags("--no-rope-freq", pattern, size(options, "--num-layers")))
    if n is None:
        raise SpecError(f"--no-rope-freq: {pattern[:60]!r} has no counterpart here", "every n-th layer is unrotated")
    return {"no_rope_layer_interval": n}


def _vocabulary(options: Options) -> int | None:
    """Size of the vocabulary; None where only the tokenizer knows it."""
    if "--padded-vocab-size" in options:
        return size(options, "--padded-vocab-size")
    tokenizer = text(options, "--tokenizer-model") or text(options, "--tokenizer-name-or-path")
    return vocabulary_of(text(options, "--tokenizer-type", "GPT2BPETokenizer"), tokenizer)


def _norm(options: Options) -> str:
    return "rmsnorm" if options.get("--normalization") == ["RMSNorm"] else "layernorm"


def _write_activation(model: ModelSpec) -> Arguments:
    """SwiGLU, the gated sigmoid of gpt-oss, squared ReLU, GELU: fused with a bias it is the tanh's, else the exact."""
    if model.gated_mlp:
        return {"--quick-geglu" if model.activation == "quick_gelu" else "--swiglu": True}
    if model.activation == "relu2":
        return {"--squared-relu": True}
    return {"--no-bias-gelu-fusion": True} if model.activation == "gelu" and model.has_mlp_bias else {}


def _read_activation(options: Options) -> Fields:
    if "--swiglu" in options or "--quick-geglu" in options:
        return {"gated_mlp": True, "activation": "silu" if "--swiglu" in options else "quick_gelu"}
    if "--squared-relu" in options:
        return {"gated_mlp": False, "activation": "relu2"}
    is_fused = _has_bias(options) and "--no-bias-gelu-fusion" not in options
    return {"gated_mlp": False, "activation": "gelu_tanh" if is_fused else "gelu"}


def _has_bias(options: Options) -> bool:
    return "--disable-bias-linear" not in options


def _write_biases(model: ModelSpec) -> Arguments:
    if model.has_mlp_bias:
        return {}
    return {"--disable-bias-linear": True, **({"--add-qkv-bias": True} if model.qkv_bias else {})}


def _read_biases(options: Options) -> Fields:
    bias = _has_bias(options)
    return {"bias": bias, "attention_bias": "all" if bias else "qkv" if "--add-qkv-bias" in options else "none"}


def _have_experts(options: Options) -> list[bool]:
    """True for each layer that has experts: every n-th from the first on, or as a list says."""
    pattern, num_layers = text(options, "--moe-layer-freq", "1").strip(), size(options, "--num-layers")
    if is_count(pattern) and int(pattern):
        return [layer % int(pattern) == 0 for layer in range(num_layers)]
    return layer_flags("--moe-layer-freq", pattern, num_layers)


def _read_expert_layers(options: Options) -> Fields:
    """Fields that say which layers have experts: the first k have none, then every n-th has; else each one's kind."""
    flags = _have_experts(options)
    first = flags.index(True) if True in flags else len(flags)
    for every in range(1, first + 2):
        dense = first + 1 - every
        if flags == [i >= dense and (i - dense + 1) % every == 0 for i in range(len(flags))]:
            return {"moe.first_k_dense_replace": dense, "moe.moe_layer_freq": every}
    return {"mlp_layer_types": ["moe" if experts else "dense" for experts in flags]}


def _write_expert_layers(model: ModelSpec) -> str:
    flags = [kind.mlp == "moe" for kind in model.layers]
    return "1" if all(flags) else listed(flags)


def _balance(moe: MoESpec) -> str:
    """A loss of each sequence, of the batch, or none."""
    return "none" if not moe.router_aux_loss_coef else "seq_aux_loss" if moe.seq_aux else "aux_loss"


def _read_balance(options: Options) -> Fields:
    """The first of the balancing losses; Megatron-LM's weight is 0 unless it is told."""
    kind = (options.get("--moe-router-load-balancing-type") or ["aux_loss"])[0]
    weight = decimal(options, "--moe-aux-loss-coeff", 0.0) if kind.endswith("aux_loss") else 0.0
    return {"moe.router_aux_loss_coef": weight, "moe.seq_aux": kind == "seq_aux_loss" and weight > 0}


def _read_bias_of_router(options: Options) -> Fields:
    by_bias = "--moe-router-enable-expert-bias" in options
    return {
        "moe.router_bias": _has_bias(options) or by_bias,
        "moe.bias_update_rate": decimal(options, "--moe-router-bias-update-rate", 1e-3) if by_bias else None,
    }


def _scores_before_choice(moe: MoESpec) -> bool:
    """Scores that are not normed over the chosen; of a single one the softmax would be 1."""
    return moe.scoring_func == "softmax" and (not moe.norm_topk_prob or moe.num_experts_per_tok == 1)


def _read_scores(options: Options) -> Fields:
    """A softmax over the chosen is the whole one divided by their sum; others are divided where there are several."""
    score = text(options, "--moe-router-score-function", "softmax")
    several = given(options, "--moe-router-topk", 2) > 1
    normed = "--moe-router-pre-softmax" not in options if score == "softmax" else several
    return {"moe.scoring_func": score, "moe.norm_topk_prob": normed}


def _read_router_groups(options: Options) -> Fields:
    names = {"moe.n_group": "--moe-router-num-groups", "moe.topk_group": "--moe-router-group-topk"}
    if not all(name in options for name in names.values()):
        return {}
    return {field: size(options, name) for field, name in names.items()}


def _read_further_tokens(options: Options) -> Fields:
    if not given(options, "--mtp-num-layers", 0):
        return {}
    return {
        "num_nextn_predict_layers": size(options, "--mtp-num-layers"),
        "mtp_loss_scaling_factor": decimal(options, "--mtp-loss-scaling-factor", 0.1),
    }


_ATTENTION: tuple[OptionRow, ...] = (
    count("--num-layers", "num_hidden_layers", "model.num_layers"),
    count("--hidden-size", "hidden_size", "model.hidden_size"),
    row("--ffn-hidden-size", "model.ffn_hidden_size", _write_width, _read_width),
    count("--num-attention-heads", "num_attention_heads", "model.num_attention_heads"),
    count("--kv-channels", "head_dim", "model.kv_channels", _head_dim),
)
_LATENT: tuple[OptionRow, ...] = (
    row("--multi-latent-attention", "model.multi_latent_attention", lambda model: True, known),
    count("--kv-lora-rank", "mla.kv_lora_rank", "model.kv_lora_rank", 32),
    count("--qk-head-dim", "mla.qk_nope_head_dim", "model.qk_head_dim", 128),
    count("--qk-pos-emb-head-dim", "mla.qk_rope_head_dim", "model.qk_pos_emb_head_dim", 64),
    count("--v-head-dim", "mla.v_head_dim", "model.v_head_dim", 128),
    count("--q-lora-rank", "mla.q_lora_rank", "model.q_lora_rank", None),
)
"""Latent attention; Megatron's defaults are not DeepSeek's."""
_HEADS: tuple[OptionRow, ...] = (
    row("--group-query-attention", "", _has_groups, known),
    row(
        "--num-query-groups", "model.num_query_groups",
        lambda model: model.num_key_value_heads if _has_groups(model) else None, _read_groups,
    ),
    row(
        "--softmax-type", "model.softmax_type", lambda model: "learnable" if model.attention_sinks else None,
        lambda options: {"attention_sinks": options.get("--softmax-type") == ["learnable"]},
    ),
    flag("--attention-output-gate", "attn_output_gate", "model.attention_output_gate"),
    OptionRow({"--window-size": "", "--window-attn-skip-freq": ""}, _write_windows, _read_windows),
    OptionRow(
        {
            "--position-embedding-type": "model.position_embedding_type", "--use-rotary-position-embeddings": "",
            "--no-position-embedding": "", "--max-position-embeddings": "",
        },
        lambda model: {"--position-embedding-type": _write_positions(model)}, _read_positions,
    ),
)  # fmt: skip
_ROTARY: tuple[OptionRow, ...] = (
    # Megatron-LM reads a whole number
    row("--rotary-base", "model.rotary_base", lambda model: round(model.rope_theta or ROTARY_BASE), _read_base),
    row(
        "--rotary-percent", "model.rotary_percent",
        lambda model: model.partial_rotary_factor if model.partial_rotary_factor < 1 else None, _read_share,
    ),
    OptionRow(
        dict.fromkeys((
            "--use-rope-scaling", "--rope-scaling-factor", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim",
            "--rotary-seq-len-interpolation-factor", "--yarn-original-max-position-embeddings", "--yarn-beta-fast",
            "--yarn-beta-slow", "--no-yarn-correction-range-round-to-int",
        ), ""),
        _write_scaling, _read_scaling,
    ),
    row("--no-rope-freq", "", _write_unrotated, _read_unrotated),
)  # fmt: skip
_VOCABULARY = (
    count("--vocab-size", "vocab_size", "", _vocabulary),
    OptionRow({"--padded-vocab-size": ""}, lambda model: {}, known),
)
_LAYERS: tuple[OptionRow, ...] = (
    row(
        "--untie-embeddings-and-output-weights", "", lambda model: not model.tie_word_embeddings,
        lambda options: {"tie_word_embeddings": "--untie-embeddings-and-output-weights" not in options},
    ),
    row(
        "--normalization", "model.normalization", lambda model: _NORMS[model.norm],
        lambda options: {"norm": _norm(options), "norm_bias": True},
    ),
    OptionRow(
        {"--norm-epsilon": "model.layernorm_epsilon", "--layernorm-epsilon": ""},
        lambda model: {"--norm-epsilon": model.norm_eps or 0.0},
        lambda options: {
            "norm_eps": decimal(options, "--norm-epsilon", decimal(options, "--layernorm-epsilon", 1e-5))
        },
    ),
    flag("--apply-layernorm-1p", "zero_centered_norm"),
    row(
        # latent attention norms its latents under the same option
        "--qk-layernorm", "", lambda model: model.qk_norm or model.mla is not None,
        lambda options: {"qk_norm": "--qk-layernorm" in options and "--multi-latent-attention" not in options},
    ),
    OptionRow({"--swiglu": "", "--squared-relu": "", "--quick-geglu": ""}, _write_activation, _read_activation),
    amount("--activation-func-clamp-value", "swiglu_limit", "model.activation_func_clamp_value"),
    amount("--glu-linear-offset", "glu_linear_offset", "model.glu_linear_offset", 0.0),
    OptionRow({"--disable-bias-linear": "", "--add-qkv-bias": "model.add_qkv_bias"}, _write_biases, _read_biases),
)  # fmt: skip
_EXPERTS: tuple[OptionRow, ...] = (
    count("--num-experts", "moe.num_experts", "model.num_moe_experts"),
    # experts are as wide as a dense MLP unless told
    count("--moe-ffn-hidden-size", "moe.moe_intermediate_size", "model.moe_ffn_hidden_size", _width),
    row("--moe-layer-freq", "", _write_expert_layers, _read_expert_layers),
    row("--moe-grouped-gemm", "model.moe_grouped_gemm", lambda model: True),
    row("--moe-permute-fusion", "model.moe_permute_fusion", lambda model: True),
    row(
        "--moe-shared-expert-intermediate-size", "model.moe_shared_expert_intermediate_size",
        lambda model: model.moe.shared_expert_intermediate_size or None,
        lambda options: {
            "moe.shared_expert_intermediate_size": given(options, "--moe-shared-expert-intermediate-size", 0)
        },
    ),
    flag("--moe-shared-expert-gate", "moe.shared_expert_gate", "model.moe_shared_expert_gate"),
    count("--moe-router-topk", "moe.num_experts_per_tok", "model.moe_router_topk", 2),
    row("--moe-router-dtype", "model.moe_router_dtype", lambda model: "fp32"),
    row(
        "--moe-router-score-function", "model.moe_router_score_function",
        lambda model: model.moe.scoring_func or "softmax", _read_scores,
    ),
    row(
        "--moe-router-load-balancing-type", "model.moe_router_load_balancing_type", lambda model: _balance(model.moe),
        known,
    ),
    row(
        "--moe-aux-loss-coeff", "model.moe_aux_loss_coeff", lambda model: model.moe.router_aux_loss_coef or 0.0,
        _read_balance,
    ),
    flag("--moe-router-enable-expert-bias", "moe.balancing_bias", "model.moe_router_enable_expert_bias"),
    row(
        "--moe-router-bias-update-rate", "model.moe_router_bias_update_rate",
        lambda model: (model.moe.bias_update_rate or 0.0) if model.moe.balancing_bias else None, _read_bias_of_router,
    ),
    amount("--moe-z-loss-coeff", "moe.router_z_loss_coef", "model.moe_z_loss_coeff", 0.0),
    row(
        "--moe-router-pre-softmax", "model.moe_router_pre_softmax", lambda model: _scores_before_choice(model.moe),
        known,
    ),
    row("--moe-router-num-groups", "model.moe_router_num_groups", lambda model: model.moe.n_group, _read_router_groups),
    row("--moe-router-group-topk", "model.moe_router_group_topk", lambda model: model.moe.topk_group, known),
    row(
        "--moe-router-topk-scaling-factor", "model.moe_router_topk_scaling_factor",
        lambda model: model.moe.routed_scaling_factor if model.moe.routed_scaling_factor != 1 else None,
        lambda options: {
            "moe.routed_scaling_factor": decimal(options, "--moe-router-topk-scaling-factor") or 1.0
        },
    ),
    flag("--moe-apply-probs-on-input", "moe.scores_on_input", "model.moe_apply_probs_on_input"),
)  # fmt: skip
_FURTHER_TOKENS: tuple[OptionRow, ...] = (
    row("--mtp-num-layers", "model.mtp_num_layers", lambda model: model.num_nextn_predict_layers or None, known),
    row(
        "--mtp-loss-scaling-factor", "model.mtp_loss_scaling_factor",
        lambda model: (model.mtp_loss_scaling_factor or 0.0) if model.num_nextn_predict_layers else None,
        _read_further_tokens,
    ),
)  # fmt: skip
_OF_JOB = {
    "--make-vocab-size-divisible-by": "model.make_vocab_size_divisible_by",
    "--attention-dropout": "model.attention_dropout",
    "--hidden-dropout": "model.hidden_dropout",
}
"""Options that trainer and job decide."""
_OF_MODEL = (*_ATTENTION, *_LATENT, *_HEADS, *_ROTARY, *_VOCABULARY, *_LAYERS, *_EXPERTS, *_FURTHER_TOKENS)
MODEL_OPTIONS = names_read(_OF_MODEL)
"""Options that are read for a model."""
BRIDGE_OF_MODEL = {name: path for option in _OF_MODEL for name, path in option.bridge.items()} | _OF_JOB
"""Megatron-Bridge's field of the same value of every option of a model; an empty one where it says it otherwise."""


def model_arguments(model: ModelSpec, seq_length: int, vocab_divisible_by: int, dropout: bool = False) -> Arguments:
    """All arguments that decide the model's parameters, their shapes, its forward and its losses."""
    model = stated(model)
    learned = model.position_embedding == "learned"
    return {
        **written(_ATTENTION, model),
        **(written(_LATENT, model) if model.mla is not None else {}),
        **written(_HEADS, model),
        # a table of learned positions has the model's rows
        "--max-position-embeddings": (model.max_position_embeddings or 0) if learned else seq_length,
        **(written(_ROTARY, model) if model.position_embedding == "rope" else {}),
        **written(_VOCABULARY, model),
        "--make-vocab-size-divisible-by": vocab_divisible_by,
        **written(_LAYERS, model),
        **(written(_EXPERTS, model) if model.moe is not None else {}),
        **written(_FURTHER_TOKENS, model),
        **({} if dropout else {"--attention-dropout": 0.0, "--hidden-dropout": 0.0}),
    }


def read_model(options: Options) -> dict[str, Any]:
    """Fields of a ModelSpec. Raises SpecError where a size is missing or is no number."""
    rows = [*_ATTENTION, *_HEADS, *_VOCABULARY, *_LAYERS, *_FURTHER_TOKENS]
    if _POSITIONS.get(_kind_of_positions(options)) == "rope":
        rows += _ROTARY
    if "--num-experts" in options:
        rows += _EXPERTS
    if "--multi-latent-attention" in options:
        rows += _LATENT
    return {"name": "imported", **read_fields(rows, options)}
