"""The options of Megatron-LM that say a model: how each is written, and read with Megatron's defaults."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any

from planner.errors import SpecError
from planner.export.megatron.option_rows import (
    Codec,
    Fields,
    Options,
    decimal,
    given,
    known,
    layer_flags,
    number,
    read_fields,
    sections_of,
    size,
    text,
)
from planner.export.named_models import vocabulary_of
from planner.export.run_settings import ROTARY_BASE, listed, stated
from planner.export.trainer_files import Arguments
from planner.specs.architectures.derivations import InexpressibleError
from planner.specs.architectures.layer_lists import block_pattern
from planner.specs.model import ModelSpec
from planner.specs.units import is_count
from planner.trainers.rules.common import every_nth, rotary_method

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


def _write_groups(model: ModelSpec) -> Arguments:
    if model.num_key_value_heads == model.num_attention_heads:
        return {}
    return {"--group-query-attention": True, "--num-query-groups": model.num_key_value_heads}


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


def _write_positions(model: ModelSpec) -> Arguments:
    """The kind of positions; yarn is one of its own where attention is not latent."""
    if model.position_embedding == "rope" and rotary_method(model) == "yarn" and model.mla is None:
        return {"--position-embedding-type": "yarn"}
    kind: str = model.position_embedding
    return {"--position-embedding-type": "learned_absolute" if kind == "learned" else kind}


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


def _read_norm(options: Options) -> Fields:
    return {"norm": "rmsnorm" if options.get("--normalization") == ["RMSNorm"] else "layernorm", "norm_bias": True}


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


def _write_balance(model: ModelSpec) -> Arguments:
    """A loss of each sequence, of the batch, or none, and its weight."""
    assert model.moe is not None
    weight = model.moe.router_aux_loss_coef or 0.0
    kind = "none" if not weight else "seq_aux_loss" if model.moe.seq_aux else "aux_loss"
    return {"--moe-router-load-balancing-type": kind, "--moe-aux-loss-coeff": weight}


def _read_balance(options: Options) -> Fields:
    """The first of the balancing losses; Megatron-LM's weight is 0 unless it is told."""
    kind = (options.get("--moe-router-load-balancing-type") or ["aux_loss"])[0]
    weight = decimal(options, "--moe-aux-loss-coeff", 0.0) if kind.endswith("aux_loss") else 0.0
    return {"moe.router_aux_loss_coef": weight, "moe.seq_aux": kind == "seq_aux_loss" and weight > 0}


def _write_router_bias(model: ModelSpec) -> Arguments:
    assert model.moe is not None
    if not model.moe.balancing_bias:
        return {}
    return {
        "--moe-router-enable-expert-bias": True,
        "--moe-router-bias-update-rate": model.moe.bias_update_rate or 0.0,
    }


def _read_router_bias(options: Options) -> Fields:
    by_bias = "--moe-router-enable-expert-bias" in options
    return {
        "moe.balancing_bias": by_bias,
        "moe.router_bias": _has_bias(options) or by_bias,
        "moe.bias_update_rate": decimal(options, "--moe-router-bias-update-rate", 1e-3) if by_bias else None,
    }


def _scores_before_choice(model: ModelSpec) -> bool:
    """Scores that are not normed over the chosen; of a single one the softmax would be 1."""
    moe = model.moe
    assert moe is not None
    return moe.scoring_func == "softmax" and (not moe.norm_topk_prob or moe.num_experts_per_tok == 1)


def _read_scores(options: Options) -> Fields:
    """A softmax over the chosen is the whole one divided by their sum; others are divided where there are several."""
    score = text(options, "--moe-router-score-function", "softmax")
    several = given(options, "--moe-router-topk", 2) > 1
    normed = "--moe-router-pre-softmax" not in options if score == "softmax" else several
    return {"moe.scoring_func": score, "moe.norm_topk_prob": normed}


_GROUPS = {"moe.n_group": "--moe-router-num-groups", "moe.topk_group": "--moe-router-group-topk"}


def _write_router_groups(model: ModelSpec) -> dict[str, Any]:
    return {option: attrgetter(field)(model) for field, option in _GROUPS.items()}


def _read_router_groups(options: Options) -> Fields:
    if not all(name in options for name in _GROUPS.values()):
        return {}
    return {field: size(options, name) for field, name in _GROUPS.items()}


def _write_further_tokens(model: ModelSpec) -> Arguments:
    if not model.num_nextn_predict_layers:
        return {}
    return {
        "--mtp-num-layers": model.num_nextn_predict_layers,
        "--mtp-loss-scaling-factor": model.mtp_loss_scaling_factor or 0.0,
    }


def _read_further_tokens(options: Options) -> Fields:
    if not given(options, "--mtp-num-layers", 0):
        return {}
    return {
        "num_nextn_predict_layers": size(options, "--mtp-num-layers"),
        "mtp_loss_scaling_factor": decimal(options, "--mtp-loss-scaling-factor", 0.1),
    }


_NUMBERS = {
    "head_dim": _head_dim,
    # experts are as wide as a dense MLP unless told
    "width": _width,
    "vocabulary": _vocabulary,
}
CODECS = {
    "width": Codec(_write_width, _read_width),
    "groups": Codec(_write_groups, _read_groups),
    "sinks": Codec(
        lambda model: "learnable" if model.attention_sinks else None,
        lambda options: {"attention_sinks": options.get("--softmax-type") == ["learnable"]},
    ),
    "windows": Codec(_write_windows, _read_windows),
    "positions": Codec(_write_positions, _read_positions),
    # Megatron-LM reads a whole number
    "base": Codec(lambda model: round(model.rope_theta or ROTARY_BASE), _read_base),
    "rotated_share": Codec(
        lambda model: model.partial_rotary_factor if model.partial_rotary_factor < 1 else None, _read_share
    ),
    "scaling": Codec(_write_scaling, _read_scaling),
    "unrotated": Codec(_write_unrotated, _read_unrotated),
    "tied": Codec(
        lambda model: not model.tie_word_embeddings,
        lambda options: {"tie_word_embeddings": "--untie-embeddings-and-output-weights" not in options},
    ),
    "norm": Codec(lambda model: _NORMS[model.norm], _read_norm),
    "epsilon": Codec(
        lambda model: {"--norm-epsilon": model.norm_eps or 0.0},
        lambda options: {
            "norm_eps": decimal(options, "--norm-epsilon", decimal(options, "--layernorm-epsilon", 1e-5))
        },
    ),
    # latent attention norms its latents under the same option
    "qk_norm": Codec(
        lambda model: model.qk_norm or model.mla is not None,
        lambda options: {"qk_norm": "--qk-layernorm" in options and "--multi-latent-attention" not in options},
    ),
    "activation": Codec(_write_activation, _read_activation),
    "biases": Codec(_write_biases, _read_biases),
    "expert_layers": Codec(_write_expert_layers, _read_expert_layers),
    "shared_experts": Codec(
        lambda model: model.moe.shared_expert_intermediate_size or None,
        lambda options: {
            "moe.shared_expert_intermediate_size": given(options, "--moe-shared-expert-intermediate-size", 0)
        },
    ),
    "scores": Codec(lambda model: model.moe.scoring_func or "softmax", _read_scores),
    "balance": Codec(_write_balance, _read_balance),
    "router_bias": Codec(_write_router_bias, _read_router_bias),
    "pre_softmax": Codec(_scores_before_choice, known),
    "router_groups": Codec(_write_router_groups, _read_router_groups),
    "routed_scale": Codec(
        lambda model: model.moe.routed_scaling_factor if model.moe.routed_scaling_factor != 1 else None,
        lambda options: {
            "moe.routed_scaling_factor": decimal(options, "--moe-router-topk-scaling-factor") or 1.0
        },
    ),
    "further_tokens": Codec(_write_further_tokens, _read_further_tokens),
}  # fmt: skip
_SECTIONS = sections_of("model", CODECS, _NUMBERS)
MODEL_OPTIONS = frozenset[str]().union(*(section.names_read() for section in _SECTIONS.values()))
"""Options that are read for a model."""


def model_arguments(model: ModelSpec, seq_length: int, vocab_divisible_by: int, dropout: bool = False) -> Arguments:
    """All arguments that decide the model's parameters, their shapes, its forward and its losses."""
    model = stated(model)
    learned = model.position_embedding == "learned"
    said = {name: section.written(model) for name, section in _SECTIONS.items() if _has(model, name)}
    return {
        **said["attention"],
        **said.get("latent", {}),
        **said["heads"],
        # a table of learned positions has the model's rows
        "--max-position-embeddings": (model.max_position_embeddings or 0) if learned else seq_length,
        **said.get("rotary", {}),
        **said["vocabulary"],
        "--make-vocab-size-divisible-by": vocab_divisible_by,
        **said["layers"],
        **said.get("experts", {}),
        **said["further_tokens"],
        **({} if dropout else {"--attention-dropout": 0.0, "--hidden-dropout": 0.0}),
    }


def _has(model: ModelSpec, section: str) -> bool:
    """The model has the part that a section is about."""
    parts = {
        "latent": model.mla is not None, "rotary": model.position_embedding == "rope", "experts": model.moe is not None,
    }  # fmt: skip
    return parts.get(section, True)


PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_SCANS = {"--mamba-state-dim": 128, "--mamba-head-dim": 64, "--mamba-num-groups": 8}
"""Options of scans, and their values unasked (core/transformer/transformer_config.py)."""
HYBRID_OPTIONS = frozenset({*PATTERNS, *_SCANS, "--mamba-num-heads"})
_CHUNK_SIZE = 128
"""Tokens of a chunk of core's scan (core/ssm/mamba_mixer.py)."""


def _pattern(options: Options) -> list[str]:
    """Letters of a hybrid's layers, with bars between stages, then those of each prediction; [""] for no hybrid."""
    return next((text(options, name) for name in PATTERNS if name in options), "").strip("\"'").split("/")


def with_pattern(options: Options) -> Options:
    """The options with the layers, stages and predictions that a hybrid's pattern says."""
    main, *predicted = _pattern(options)
    if not main:
        return options
    stages = main.split("|")
    said = {"--num-layers": [str(sum(map(len, stages)))]}
    if len(stages) > 1:
        letters = "|".join("t" * len(stage) for stage in stages)
        said["--pipeline-model-parallel-layout"] = [f"E{letters}{'m' * len(predicted)}L"]
    return {**options, **said, **({"--mtp-num-layers": [str(len(predicted))]} if predicted else {})}


def _hybrid(options: Options, fields: Fields) -> Fields:
    """The layers of a hybrid, each a mixer or an MLP alone, in place of those that other options say."""
    main = _pattern(options)[0]
    if not main:
        return {}
    try:
        found: Fields = dict(block_pattern({"hybrid_override_pattern": main}))
    except InexpressibleError as error:
        raise SpecError(str(error), "give a pattern of M, *, - and E") from None
    state, head_dim, groups = (number(options, name, unasked) or unasked for name, unasked in _SCANS.items())
    heads = number(options, "--mamba-num-heads") or 2 * fields["hidden_size"] // head_dim
    if "M" in main:
        found["mamba"] = {
            "state_size": state, "intermediate_size": heads * head_dim, "num_heads": heads, "n_groups": groups,
            "chunk_size": _CHUNK_SIZE,
        }  # fmt: skip
    moe = fields.get("moe") if "E" in main else None
    found["moe"] = moe and {**moe, "moe_layer_freq": 1, "first_k_dense_replace": 0}
    return {**found, "intermediate_size": _width(options) if "-" in main else None}


def read_model(options: Options) -> dict[str, Any]:
    """Fields of a ModelSpec. Raises SpecError where a size is missing or is no number."""
    absent = {
        "rotary": _POSITIONS.get(_kind_of_positions(options)) != "rope",
        "experts": "--num-experts" not in options,
        "latent": "--multi-latent-attention" not in options,
    }
    fields = read_fields((section for name, section in _SECTIONS.items() if not absent.get(name)), options)
    return {"name": "imported", **fields, **_hybrid(options, fields)}
