"""A model as Python source that builds torchtitan's model configuration with torchtitan's own helpers."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from planner.export.stated_model import BIAS_UPDATE_RATE, stated
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
    parts = [_constants(model, seq_length), _HELPERS, _attention(model, attention)]
    if _has_feed_forward(model):
        parts.append(_FEED_FORWARD)
    if model.moe is not None:
        parts.append(_experts(model))
    return _imports(model, family), "\n\n".join([*parts, _block(model, family), _model(model, family)])


def _has_shared(model: ModelSpec) -> bool:
    return model.moe is not None and model.moe.shared_expert_intermediate_size > 0


def _has_feed_forward(model: ModelSpec) -> bool:
    return _has_shared(model) or any(kind.mlp == "dense" for kind in model.layers)


def _is_mixed(model: ModelSpec) -> bool:
    """Some layers are dense and others have experts."""
    return len({kind.mlp for kind in model.layers}) > 1


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


def _constants(model: ModelSpec, seq_length: int) -> str:
    is_moe = ""
    if _is_mixed(model):
        runs = [(key, len(list(group))) for key, group in groupby(kind.mlp == "moe" for kind in model.layers)]
        is_moe = f"IS_MOE = {' + '.join(f'[{key}] * {length}' for key, length in runs)}  # one entry a layer\n"
    return (
        f"DIM, VOCAB_SIZE, SEQ_LENGTH = {model.hidden_size}, {model.vocab_size}, {seq_length}\n{is_moe}"
        'INIT = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}\n'
        f"NORM_EPS = {model.norm_eps!r}\n"
        f"ROPE = dict({', '.join(f'{name}={value!r}' for name, value in rotary_numbers(model).items())})\n"
    )


_HELPERS = (
    """
def names(config):
    return {field.name for field in fields(config)}


def norm(width):
    return RMSNorm.Config(normalized_shape=width, eps=NORM_EPS, param_init={"weight": nn.init.ones_})


def linear(inputs, outputs):
    return Linear.Config(in_features=inputs, out_features=outputs, param_init=INIT)


def rope(dim):
    # the field was called max_seq_len up to 0.3.0
    length = "max_context_length" if "max_context_length" in names(RoPE.Config) else "max_seq_len"
    return RoPE.Config(dim=dim, **ROPE, **{length: SEQ_LENGTH})
""".strip("\n")
    + "\n"
)

_FEED_FORWARD = (
    """
def feed_forward(width):
    return make_ffn_config(dim=DIM, hidden_dim=width, w1_param_init=INIT, w2w3_param_init=INIT)
""".strip("\n")
    + "\n"
)


def _attention(model: ModelSpec, backend: str) -> str:
    if model.mla is not None:
        return _latent(model, backend)
    qk_norm = f"norm({model.head_dim})" if model.qk_norm else "None"
    bias = "    config.qkv_linear.wqkv.bias = True\n" if model.qkv_bias else ""
    return (
        f"""
def attention():
    config = make_gqa_config(
        dim=DIM,
        n_heads={model.num_attention_heads},
        n_kv_heads={model.num_key_value_heads},
        head_dim={model.head_dim},
        fuse_qkv=True,
        wqkv_param_init=INIT,
        wo_param_init=INIT,
        inner_attention=get_attention_config("{backend}"),
        rope=rope({model.head_dim}),
        qk_norm={qk_norm},
    )
{bias}    return config
""".strip("\n")
        + "\n"
    )


def _latent(model: ModelSpec, backend: str) -> str:
    mla, heads = model.mla, model.num_attention_heads
    assert mla is not None
    qk_dim, rank = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.q_lora_rank or 0
    query = (
        f"wq=None,\n        wq_a=linear(DIM, {rank}),\n        wq_b=linear({rank}, {heads * qk_dim}),\n"
        f"        q_norm=norm({rank}),"
        if rank
        else f"wq=linear(DIM, {heads * qk_dim}),\n        wq_a=None,\n        wq_b=None,\n        q_norm=norm(1),"
    )
    return (
        f"""
def attention():
    return Attention.Config(
        dim=DIM,
        n_heads={heads},
        q_lora_rank={rank},
        kv_lora_rank={mla.kv_lora_rank},
        qk_nope_head_dim={mla.qk_nope_head_dim},
        qk_rope_head_dim={mla.qk_rope_head_dim},
        v_head_dim={mla.v_head_dim},
        mscale={mscale(model)},
        {query}
        wkv_a=linear(DIM, {mla.kv_lora_rank + mla.qk_rope_head_dim}),
        kv_norm=norm({mla.kv_lora_rank}),
        wkv_b=linear({mla.kv_lora_rank}, {heads * (mla.qk_nope_head_dim + mla.v_head_dim)}),
        wo=linear({heads * mla.v_head_dim}, DIM),
        inner_attention=get_attention_config("{backend}"),
        rope=rope({mla.qk_rope_head_dim}),
    )
""".strip("\n")
        + "\n"
    )


def _experts(model: ModelSpec) -> str:
    moe = model.moe
    assert moe is not None
    groups = ""
    if moe.n_group is not None:
        groups = f"\n            num_expert_groups={moe.n_group},\n            num_limited_groups={moe.topk_group},"
    if moe.router_bias and not moe.balancing_bias:
        groups += "\n            bias=True,"
    shared = f"feed_forward({moe.shared_expert_intermediate_size})" if _has_shared(model) else "None"
    return (
        f'''
def experts():
    init = {{name: INIT["weight"] for name in ("w1_EFD", "w2_EDF", "w3_EFD")}}
    return make_moe_config(
        num_experts={moe.num_experts},
        router=make_router_config(
            dim=DIM,
            num_experts={moe.num_experts},
            gate_param_init=INIT,
            top_k={moe.num_experts_per_tok},
            score_func="{moe.scoring_func}",
            route_norm={moe.norm_topk_prob},
            route_scale={moe.routed_scaling_factor},{groups}
        ),
        routed_experts=make_routed_experts_config(
            dim=DIM,
            hidden_dim={moe.moe_intermediate_size},
            num_experts={moe.num_experts},
            top_k={moe.num_experts_per_tok},
            param_init=init,
            comm_backend="standard",
        ),
        shared_experts={shared},
        load_balance_coeff={balancing_rate(model)},
    )
'''.strip("\n")
        + "\n"
    )


def _block(model: ModelSpec, family: str) -> str:
    dense, experts = f"feed_forward({model.intermediate_size})", "experts()"
    if _is_mixed(model):
        arguments = "is_moe, "
        mlp = f"feed_forward=None if is_moe else {dense},\n        moe={experts} if is_moe else None,"
    else:
        arguments, mlp = "", f"moe={experts}," if model.layers[0].mlp == "moe" else f"feed_forward={dense},"
    return f"""
def block({arguments}kind={_CLASSES[family][1]}, **more):
    return kind.Config(
        attention_norm=norm(DIM),
        ffn_norm=norm(DIM),
        attention=attention(),
        {mlp}
        **more,
    )
""".lstrip("\n")


def _model(model: ModelSpec, family: str) -> str:
    layers = (
        "block(is_moe) for is_moe in IS_MOE" if _is_mixed(model) else f"block() for _ in range({len(model.layers)})"
    )
    is_moe = "IS_MOE[-1], " if _is_mixed(model) else ""
    embedding_init = "skip_param_init" if model.tie_word_embeddings else "nn.init.normal_"
    mtp = ""
    if model.num_nextn_predict_layers:
        mtp = f"""
    mtp_fields = {{name: norm(DIM) for name in ("enorm", "hnorm", "mtp_norm")}}
    config.mtp_layers = [
        block({is_moe}kind=MTPTransformerBlock, eh_proj=linear(2 * DIM, DIM), **mtp_fields)
        for _ in range({model.num_nextn_predict_layers})
    ]"""
    return (
        f"""
def model_spec():
    config = {_CLASSES[family][0]}.Config(
        dim=DIM,
        vocab_size=VOCAB_SIZE,
        enable_weight_tying={model.tie_word_embeddings},
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB_SIZE, embedding_dim=DIM, param_init={{"weight": {embedding_init}}}
        ),
        norm=norm(DIM),
        lm_head=linear(DIM, VOCAB_SIZE),
        layers=[{layers}],
    ){mtp}
    return replace(model_registry("debugmodel"), flavor="planned", model=config)
""".strip("\n")
        + "\n"
    )
