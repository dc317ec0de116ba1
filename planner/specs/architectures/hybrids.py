"""Architectures whose layers scan, or convolve, beside those that attend."""

from __future__ import annotations

from planner.specs.architectures import derivations as d
from planner.specs.architectures import layer_lists as lists
from planner.specs.architectures import sections
from planner.specs.architectures.dense import LLAMA
from planner.specs.architectures.mixtures import GRANITE_MOE, MIXTURE_ARCHITECTURES
from planner.specs.architectures.rows import (
    BLOCK,
    DENSE,
    MOE,
    NORMED,
    ROTARY,
    ROUTED,
    Architecture,
    keys,
    sizes,
    without,
)

_MAMBA_D = {
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
_DELTA_SIZES = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "full_attention_interval": 4,
}  # fmt: skip
_QWEN_LAYERS = lists.mixers("gated_delta", lists.every("full_attention_interval", 4))
_QWEN_FIXED = {"qk_norm": True, "attn_output_gate": True, "zero_centered_norm": True, **ROTARY}

_QWEN_MTP = keys(num_nextn_predict_layers="mtp_num_hidden_layers")
_QWEN3_5 = Architecture(
    keys=DENSE | _QWEN_MTP,
    defaults=sizes(32, 4096, 16, 4, 248320, intermediate_size=12288, head_dim=256, partial_rotary_factor=0.25,
                   **_DELTA_SIZES),
    derive=(d.activation, d.attention_bias, sections.gated_delta, _QWEN_LAYERS),
    fixed=_QWEN_FIXED,
)  # fmt: skip
_QWEN3_NEXT = Architecture(
    keys=DENSE | MOE | keys("shared_expert_intermediate_size"),
    defaults=sizes(48, 2048, 16, 2, 151936, intermediate_size=5632, head_dim=256, partial_rotary_factor=0.25,
                   num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, decoder_sparse_step=1,
                   shared_expert_intermediate_size=512, router_aux_loss_coef=0.001, **NORMED, **_DELTA_SIZES),
    derive=(d.activation, d.attention_bias, sections.gated_delta, _QWEN_LAYERS, lists.moe_layers(lists.qwen_moe)),
    fixed={"shared_expert_gate": True, **_QWEN_FIXED},
)  # fmt: skip
_MAMBA = Architecture(
    keys=keys("num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings"),
    defaults=sizes(32, 768, 24, None, 50280, state_size=16, expand=2, conv_kernel=4, use_bias=False, use_conv_bias=True,
                   tie_word_embeddings=True, layer_norm_epsilon=1e-5, rms_norm_eps=None),
    derive=(sections.pure_mamba,),
    fixed={"layer_types": ("mamba",), "mlp_layer_types": ("none",), "position_embedding": "none"},
)  # fmt: skip
_BAMBA = LLAMA.like(
    sections.mamba2_d, lists.mixers("mamba2", lists.among("attn_layer_indices")),
    defaults={"num_key_value_heads": 8, "vocab_size": 128000, "intermediate_size": 14336, "rms_norm_eps": 1e-5,
              "partial_rotary_factor": 0.5, **_MAMBA_D},
)  # fmt: skip
_LFM2 = Architecture(
    keys=without(DENSE, "intermediate_size") | keys(short_conv_kernel="conv_L_cache"),
    defaults=sizes(32, 2560, 32, 8, 65536, intermediate_size=12288, conv_L_cache=3, rope_theta=1e6, norm_eps=1e-5,
                   tie_word_embeddings=True, rms_norm_eps=None),
    derive=(lists.mixers("conv", lists.lfm2_full), sections.lfm2_mlp, sections.tied, sections.conv_bias),
    fixed={"qk_norm": True, "attention_bias": "none", "mlp_bias": False, **ROTARY},
)  # fmt: skip

HYBRID_ARCHITECTURES: dict[str, Architecture] = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_NEXT.like(
        keys=_QWEN_MTP,
        defaults={"num_hidden_layers": 40, "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8,
                  "intermediate_size": None},
    ),
    "olmo_hybrid": LLAMA.like(
        sections.gated_delta, lists.mixers("gated_delta", lists.every("full_attention_interval", 4)),
        defaults={"vocab_size": 100352, "hidden_size": 3840, "num_attention_heads": 30,
                  "linear_conv_kernel_dim": 4, "linear_key_head_dim": 96, "linear_value_head_dim": 192,
                  "linear_num_key_heads": 30, "linear_num_value_heads": 30, "full_attention_interval": 4},
        qk_norm=True, qk_norm_over="hidden",
    ),
    "kimi_linear": MIXTURE_ARCHITECTURES["deepseek_v3"].like(
        d.shared_experts("num_shared_experts"), sections.kimi_delta, sections.kimi_k3,
        lists.mixers("kimi_delta", lists.kimi_full),
        keys=keys(num_experts="num_experts", num_experts_per_tok=("num_experts_per_token", "num_experts_per_tok")),
        defaults={"num_hidden_layers": 27, "hidden_size": 2304, "num_attention_heads": 32, "vocab_size": 163840,
                  "intermediate_size": 9216, "moe_intermediate_size": 1024, "q_lora_rank": None, "num_experts": 256,
                  "num_experts_per_token": 8, "num_shared_experts": 1, "routed_scaling_factor": 2.446, "n_group": 1,
                  "topk_group": 1, "first_k_dense_replace": 1, "linear_head_dim": 128, "linear_num_heads": 32,
                  "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-5},
        position_embedding="none",
    ).inside("linear_attn_config"),
    "minimax": Architecture(
        keys=keys(*BLOCK) | MOE | keys(moe_intermediate_size="intermediate_size"),
        defaults=sizes(32, 4096, 32, 8, 32000, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
                       rope_theta=1e6, block_size=256, router_aux_loss_coef=0.001, rms_norm_eps=1e-5, **NORMED),
        derive=(d.activation, sections.lightning, lists.mixers("lightning", lists.minimax_full), d.minimax_rotary,
                d.shared_width("shared_intermediate_size")),
        fixed=ROTARY,
    ),
    "nemotron_h": Architecture(
        keys=without(DENSE, "num_hidden_layers")
        | keys("mlp_bias", "num_nextn_predict_layers", head_dim=("head_dim", "attention_head_dim")),
        defaults=sizes(52, 4096, 32, 8, 131072, intermediate_size=21504, head_dim=128, mlp_hidden_act="relu2",
                       mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4,
                       chunk_size=128, use_conv_bias=True, mamba_proj_bias=False, layer_norm_epsilon=1e-5,
                       rms_norm_eps=None, num_experts_per_tok=2, n_routed_experts=8, n_shared_experts=1,
                       moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688,
                       layers_block_type=["mamba", "moe", "attention", "mlp"], **ROUTED),
        derive=(d.nemotron_activation, d.attention_bias, sections.nemotron_mamba, sections.nemotron_experts,
                lists.block_pattern),
        fixed={"gated_mlp": False, "position_embedding": "none"},
    ),
    "falcon_h1": LLAMA.like(
        sections.mamba2_d, d.falcon_h1,
        defaults={"num_key_value_heads": 8, "vocab_size": 128000, "intermediate_size": 14336, "rms_norm_eps": 1e-5,
                  "mamba_d_ssm": 1024, "mamba_rms_norm": False, **_MAMBA_D},
        keys=keys("embedding_multiplier"),
        layer_types=("full_mamba2",),
    ),
    "bamba": _BAMBA,
    "granitemoehybrid": GRANITE_MOE.like(
        sections.mamba2_d, sections.granite_mlp, sections.granite_positions,
        lists.mixers("mamba2", lists.never),
        defaults={"shared_intermediate_size": 1024, **_MAMBA_D},
    ).less("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": Architecture(
        keys=keys("num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings"),
        defaults=sizes(64, 4096, 128, None, 32768, num_heads=128, head_dim=64, state_size=128, n_groups=8, expand=2,
                       conv_kernel=4, chunk_size=256, use_bias=False, use_conv_bias=True, layer_norm_epsilon=1e-5,
                       rms_norm_eps=None),
        derive=(sections.pure_mamba2,),
        fixed={"layer_types": ("mamba2",), "mlp_layer_types": ("none",), "position_embedding": "none"},
    ),
    "jamba": Architecture(
        keys=DENSE | MOE | keys(moe_intermediate_size="intermediate_size"),
        defaults=sizes(32, 4096, 32, 8, 65536, intermediate_size=14336, num_experts=16, num_experts_per_tok=2,
                       expert_layer_period=2, expert_layer_offset=1, attn_layer_period=8, attn_layer_offset=4,
                       mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank="auto",
                       mamba_conv_bias=True, mamba_proj_bias=False, router_aux_loss_coef=0.001, norm_topk_prob=False),
        derive=(d.activation, sections.jamba_mamba, lists.mixers("mamba", lists.periodic("attn")), lists.jamba_moe),
        fixed={"position_embedding": "none"},
    ),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2.like(
        lists.moe_layers(lists.after_dense("num_dense_layers")),
        keys=MOE | keys("intermediate_size", router_bias="use_expert_bias"),
        defaults={"hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32,
                  "num_experts_per_tok": 4, "num_dense_layers": 2, "use_expert_bias": True, "scoring_func": "sigmoid",
                  "block_auto_adjust_ff_dim": False, **NORMED},
    ),
}  # fmt: skip
