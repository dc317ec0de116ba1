"""A model as Python source that builds torchtitan's model configuration with torchtitan's own helpers."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from planner.export.stated_model import BIAS_UPDATE_RATE, stated
from planner.export.templating import rendered
from planner.specs.model import ModelSpec
from planner.trainers.rules.facts import rotary_method

_LLAMA3 = {
    "scaling_factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}  # fmt: skip
_YARN = {
    "rope_factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow", "truncate": "truncate",
    "original_seq_len": "original_max_position_embeddings",
}  # fmt: skip
"""Fields of torchtitan's RoPE and of our spec's scaling."""


def rotary_numbers(model: ModelSpec) -> dict[str, Any]:
    """Base and stretching of rotary frequencies; numbers that the model leaves out are torchtitan's, and usual."""
    base, method, scaling = {"theta": float(model.rope_theta or 0)}, rotary_method(model), model.rope_scaling
    if method is None or scaling is None:
        return base
    names = _YARN if method == "yarn" else _LLAMA3
    given = {name: getattr(scaling, field) for name, field in names.items()}
    numbers = {name: value for name, value in given.items() if value is not None}
    return {**base, "scaling": "yarn" if method == "yarn" else "llama", **numbers}


def uses_cos_sin(model: ModelSpec) -> bool:
    """The class of rotary positions that knows no llama3; which pairs it rotates is a matter of checkpoints alone."""
    return rotary_method(model) != "llama3"


def mscale(model: ModelSpec) -> float:
    """The weight of yarn's scale of attention logits, which is squared; yarn alone has one."""
    return (model.rope_scaling.mscale_all_dim or 0.0) if model.rope_scaling is not None else 0.0


def balancing_rate(model: ModelSpec) -> float | None:
    """The step of a balancing bias, with which it balances models whose own way is a loss, too; None for neither."""
    moe = stated(model).moe
    if moe is None:
        return None
    return moe.bias_update_rate or (BIAS_UPDATE_RATE if moe.router_aux_loss_coef and not moe.balancing_bias else None)


_CLASSES = {
    "llama3": ("Llama3Model", "Llama3TransformerBlock"),
    "qwen3": ("Qwen3Model", "Qwen3TransformerBlock"),
    "deepseek_v3": ("DeepSeekV3Model", "DeepSeekV3TransformerBlock"),
}


def _family_of(model: ModelSpec) -> str:
    """torchtitan's module whose blocks are made of the same parts."""
    if model.attention_sinks:
        return "gpt_oss"
    if model.mla is not None:
        return "deepseek_v3"
    return "qwen3" if model.qk_norm or model.moe is not None else "llama3"


def model_source(model: ModelSpec, seq_length: int, attention: str) -> tuple[list[str], str]:
    """Imports, and the source of a function `model_spec()`; `attention` is torchtitan's name of a backend."""
    model, family = stated(model), _family_of(model)
    if family == "gpt_oss":
        flavor = {24: "20b", 36: "120b"}[model.num_hidden_layers]
        body = f'def model_spec():\n    return model_registry("{flavor}", attn_backend="{attention}")\n'
        return ["from torchtitan.models.gpt_oss import model_registry"], body
    runs = [(key, len(list(group))) for key, group in groupby(kind.mlp == "moe" for kind in model.layers)]
    body = rendered(
        "torchtitan_model.py",
        model=model,
        mla=model.mla,
        moe=model.moe,
        heads=model.num_attention_heads,
        seq_length=seq_length,
        attention=attention,
        is_mixed=len({kind.mlp for kind in model.layers}) > 1,
        runs_of_experts=" + ".join(f"[{key}] * {length}" for key, length in runs),
        rotary=rotary_numbers(model),
        mscale=mscale(model),
        has_feed_forward=_has_feed_forward(model),
        has_shared=_has_shared(model),
        balancing_rate=balancing_rate(model),
        model_class=_CLASSES[family][0],
        block_class=_CLASSES[family][1],
    )
    return _imports(model, family), body


def _has_shared(model: ModelSpec) -> bool:
    return model.moe is not None and model.moe.shared_expert_intermediate_size > 0


def _has_feed_forward(model: ModelSpec) -> bool:
    return _has_shared(model) or any(kind.mlp == "dense" for kind in model.layers)


def _imports(model: ModelSpec, family: str) -> list[str]:
    helpers = ["get_attention_config"]
    helpers += [] if model.mla is not None else ["make_gqa_config"]
    helpers += ["make_ffn_config"] if _has_feed_forward(model) else []
    helpers += ["make_moe_config", "make_routed_experts_config", "make_router_config"] if model.moe else []
    rope = "CosSinRoPE" if family == "qwen3" and uses_cos_sin(model) else "ComplexRoPE"
    names = [*(("MTPTransformerBlock",) if model.num_nextn_predict_layers else ()), "model_registry"]
    classes = [*(("Attention",) if model.mla is not None else ()), *_CLASSES[family]]
    return [
        "from dataclasses import fields, replace",
        "from functools import partial",
        "from torch import nn",
        f"from torchtitan.models.common import {rope} as RoPE, Embedding, Linear, RMSNorm",
        f"from torchtitan.models.common.config_utils import {', '.join(sorted(helpers))}",
        *(["from torchtitan.models.common.param_init import skip_param_init"] if model.tie_word_embeddings else []),
        f"from torchtitan.models.{family} import {', '.join(names)}",
        f"from torchtitan.models.{family}.model import {', '.join(classes)}",
    ]
