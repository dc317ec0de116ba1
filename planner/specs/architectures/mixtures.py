"""Architectures with experts whose layers all attend."""

from __future__ import annotations

from planner.specs.architectures import derivations as d
from planner.specs.architectures import layer_lists as lists
from planner.specs.architectures import sections
from planner.specs.architectures.dense import DENSE_ARCHITECTURES
from planner.specs.architectures.rows import (
    BLOCK,
    DEEPSEEK,
    DEEPSEEK_RANKS,
    DENSE,
    LAYERNORM,
    MOE,
    MULTIPLIERS,
    NORMED,
    ROTARY,
    ROUTED,
    Architecture,
    keys,
    sizes,
    without,
)

_QWEN_WINDOW = {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}
_EXPERT_WIDTH = keys(*BLOCK) | MOE | keys(moe_intermediate_size="intermediate_size")
_SHARED = d.shared_experts("n_shared_experts")
_DEEPSEEK_MOE = lists.moe_layers(lists.deepseek_moe)
_GQA_DEEPSEEK = DENSE | without(DEEPSEEK, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                                "v_head_dim")  # fmt: skip

_DEEPSEEK_V3 = Architecture(
    keys=DEEPSEEK,
    defaults=sizes(61, 7168, 128, None, 129280, intermediate_size=18432, moe_intermediate_size=2048,
                   n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
                   **DEEPSEEK_RANKS, **ROUTED | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}),
    derive=(d.activation, d.attention_bias, _SHARED, d.latent_heads, _DEEPSEEK_MOE),
    fixed={"router_bias": True, **ROTARY},
)  # fmt: skip
_GLM4_MOE = Architecture(
    keys=DENSE | MOE | keys("num_nextn_predict_layers", num_experts="n_routed_experts", qk_norm="use_qk_norm"),
    defaults=sizes(46, 4096, 96, 8, 151552, intermediate_size=10944, moe_intermediate_size=1408,
                   n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1,
                   num_nextn_predict_layers=1, use_qk_norm=False, partial_rotary_factor=0.5, rms_norm_eps=1e-5,
                   **ROUTED),
    derive=(d.activation, d.no_output_bias, d.whole_heads, _SHARED,
            lists.moe_layers(lists.after_dense("first_k_dense_replace"))),
    fixed={"router_bias": True, **ROTARY},
)  # fmt: skip
_OLMOE = Architecture(
    keys=_EXPERT_WIDTH,
    defaults=sizes(16, 2048, 16, 16, 50304, intermediate_size=2048, num_experts=64, num_experts_per_tok=8,
                   norm_topk_prob=False, router_aux_loss_coef=0.01, rms_norm_eps=1e-5),
    derive=(d.activation, d.attention_bias),
    fixed={"qk_norm": True, "qk_norm_over": "hidden", **ROTARY},
)  # fmt: skip
GRANITE_MOE = Architecture(
    keys=_EXPERT_WIDTH | MULTIPLIERS,
    defaults=sizes(32, 4096, 32, None, 32000, intermediate_size=11008, num_local_experts=8, num_experts_per_tok=2,
                   router_aux_loss_coef=0.001, **NORMED),
    derive=(d.activation, d.attention_bias),
    fixed=ROTARY,
)  # fmt: skip
_HUNYUAN = Architecture(
    keys=DENSE | keys(head_dim=("head_dim", "attention_head_dim")),
    defaults=sizes(32, 4096, 32, None, 290943, intermediate_size=11008, num_experts=1, moe_topk=1, rms_norm_eps=1e-5,
                   moe_layer_num_skipped=0,
                   **NORMED),
    derive=(d.activation, d.attention_bias, d.hunyuan_experts,
            lists.moe_layers(lists.after_dense("moe_layer_num_skipped"))),
    fixed=ROTARY,
)  # fmt: skip
_DSA = _DEEPSEEK_V3.like(
    sections.indexer, lists.index_layers,
    defaults={"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
)  # fmt: skip
_STEP3 = Architecture(
    keys=keys(*BLOCK, "intermediate_size", "moe_intermediate_size", num_key_value_heads="num_attention_groups",
              num_experts=("moe_num_experts", "n_routed_experts"), query_rank="share_q_dim",
              num_experts_per_tok=("moe_top_k", "num_experts_per_tok"),
              shared_expert_intermediate_size=("share_expert_dim", "share_expert_dims")),
    defaults=sizes(61, 7168, 64, None, 128815, intermediate_size=18432, num_attention_groups=1, head_dim=256,
                   share_q_dim=2048, moe_intermediate_size=5120, moe_num_experts=48, moe_top_k=3,
                   share_expert_dim=5120, first_k_dense_replace=4, rope_theta=5e5, rms_norm_eps=1e-5,
                   norm_topk_prob=False),
    derive=(d.activation, sections.step_layers),
    fixed=ROTARY,
)  # fmt: skip

MIXTURE_ARCHITECTURES: dict[str, Architecture] = {
    "llama4_text": Architecture(
        keys=keys(*BLOCK, intermediate_size="intermediate_size_mlp") | MOE
        | keys(moe_intermediate_size="intermediate_size"),
        defaults=sizes(48, 5120, 40, 8, 202048, intermediate_size=8192, intermediate_size_mlp=16384, head_dim=128,
                       num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1,
                       attention_chunk_size=8192, rms_norm_eps=1e-5, rope_theta=5e5, scoring_func="sigmoid",
                       norm_topk_prob=False, router_aux_loss_coef=0.001),
        derive=(d.activation, d.attention_bias, lists.window(lists.unrotated, "attention_chunk_size"),
                d.llama4_shared, lists.moe_layers(lists.llama4_moe), lists.rotated_layers),
        fixed={"scores_on_input": True, **ROTARY},
    ),
    "mixtral": Architecture(
        keys=_EXPERT_WIDTH,
        defaults=sizes(32, 4096, 32, 8, 32000, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
                       rms_norm_eps=1e-5, **NORMED),
        derive=(d.activation, lists.window(lists.never)),
        fixed=ROTARY,
    ),
    "qwen2_moe": Architecture(
        keys=DENSE | MOE | keys("shared_expert_intermediate_size"),
        defaults=sizes(24, 2048, 16, 16, 151936, intermediate_size=5632, num_experts=60, num_experts_per_tok=4,
                       moe_intermediate_size=1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1,
                       norm_topk_prob=False, router_aux_loss_coef=0.001, **_QWEN_WINDOW),
        derive=(d.activation, d.qkv_bias, lists.window(lists.qwen_full), lists.moe_layers(lists.qwen_moe)),
        fixed={"shared_expert_gate": True, **ROTARY},
    ),
    "qwen3_moe": Architecture(
        keys=DENSE | MOE,
        defaults=sizes(24, 2048, 32, 4, 151936, intermediate_size=6144, num_experts=128, num_experts_per_tok=8,
                       moe_intermediate_size=768, decoder_sparse_step=1, norm_topk_prob=False,
                       router_aux_loss_coef=0.001, **_QWEN_WINDOW),
        derive=(d.activation, d.attention_bias, lists.window(lists.qwen_full), lists.moe_layers(lists.qwen_moe)),
        fixed={"qk_norm": True, **ROTARY},
    ),
    "deepseek_v2": Architecture(
        keys=DEEPSEEK,
        defaults=sizes(32, 4096, 32, None, 102400, intermediate_size=11008, moe_intermediate_size=1407,
                       n_routed_experts=64, n_shared_experts=2, first_k_dense_replace=0, norm_topk_prob=False,
                       **DEEPSEEK_RANKS),
        derive=(d.activation, d.attention_bias, _SHARED, d.latent_heads, _DEEPSEEK_MOE),
        fixed=ROTARY,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DSA,
    "glm_moe_dsa": _DSA.like(
        defaults={"num_hidden_layers": 78, "hidden_size": 6144, "num_attention_heads": 64, "vocab_size": 154880,
                  "intermediate_size": 12288, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256,
                  "n_group": 1, "topk_group": 1, "index_n_heads": 32, "rms_norm_eps": 1e-5},
    ),
    "deepseek": Architecture(
        keys=_GQA_DEEPSEEK,
        defaults=sizes(30, 4096, 32, None, 102400, intermediate_size=11008, moe_intermediate_size=1407,
                       n_shared_experts=0, first_k_dense_replace=0, norm_topk_prob=False),
        derive=(d.activation, d.attention_bias, _SHARED, _DEEPSEEK_MOE),
        fixed=ROTARY,
    ),
    "dots1": Architecture(
        keys=_GQA_DEEPSEEK,
        defaults=sizes(62, 4608, 32, 32, 152064, intermediate_size=10944, moe_intermediate_size=1408,
                       n_shared_experts=0, first_k_dense_replace=0, sliding_window=4096, max_window_layers=62,
                       use_sliding_window=True, **ROUTED | {"norm_topk_prob": False}),
        derive=(d.activation, d.attention_bias, _SHARED, _DEEPSEEK_MOE, lists.window(lists.qwen_full)),
        fixed={"router_bias": True, "qk_norm": True, **ROTARY},
    ),
    "gpt_oss": Architecture(
        keys=keys(*BLOCK, "swiglu_limit", num_experts=("num_local_experts", "num_experts"),
                  moe_intermediate_size="intermediate_size",
                  num_experts_per_tok=("num_experts_per_tok", "experts_per_token")),
        defaults=sizes(36, 2880, 64, 8, 201088, intermediate_size=2880, head_dim=64, num_local_experts=128,
                       num_experts_per_tok=4, sliding_window=128, attention_bias=True, rms_norm_eps=1e-5,
                       swiglu_limit=7.0, rope_theta=150000.0, router_aux_loss_coef=0.001, **NORMED),
        derive=(d.attention_bias, lists.window(lists.every("sliding_window_pattern", 2))),
        fixed={"mlp_bias": True, "router_bias": True, "attention_sinks": True, "activation": "quick_gelu",
               "glu_linear_offset": 1.0, "router_aux_loss_coef": None, **ROTARY},
    ),
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_lite": Architecture(
        keys=DEEPSEEK,
        defaults=sizes(47, 2048, 20, 20, 154880, intermediate_size=10240, moe_intermediate_size=1536,
                       n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4, first_k_dense_replace=1,
                       q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
                       rms_norm_eps=1e-5, **ROUTED | {"routed_scaling_factor": 1.8}),
        derive=(d.activation, d.attention_bias, _SHARED, d.latent_heads,
                lists.moe_layers(lists.after_dense("first_k_dense_replace"))),
        fixed={"router_bias": True, **ROTARY},
    ),
    "ernie4_5_moe": Architecture(
        keys=DENSE | keys("moe_intermediate_size", bias="use_bias", num_experts="moe_num_experts",
                          num_experts_per_tok="moe_k"),
        defaults=sizes(28, 2560, 20, 4, 103424, intermediate_size=12288, moe_intermediate_size=1536, moe_k=6,
                       moe_num_experts=64, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1,
                       moe_layer_interval=1, rope_theta=5e5, use_bias=False, tie_word_embeddings=True,
                       rms_norm_eps=1e-5, router_aux_loss_coef=0.001, scoring_func="softmax", **NORMED),
        derive=(d.activation, d.shared_experts("moe_num_shared_experts"), lists.moe_layers(lists.ernie_moe)),
        fixed={"router_bias": True, "norm_bias": False, **ROTARY},
    ),
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE.like(d.shared_width("shared_intermediate_size")),
    "olmoe": _OLMOE,
    "flex_olmo": _OLMOE.like(
        defaults={"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32,
                  "vocab_size": 100352, "intermediate_size": 11008, "num_experts": 7, "num_experts_per_tok": 5,
                  "rope_theta": 5e5, "rms_norm_eps": 1e-6},
        pre_norms=False, post_norms=True,
    ),
    "minimax_m2": Architecture(
        keys=_EXPERT_WIDTH | keys(qk_norm="use_qk_norm", router_bias="use_routing_bias"),
        defaults=sizes(62, 3072, 48, 8, 200064, intermediate_size=1536, head_dim=128, num_local_experts=256,
                       num_experts_per_tok=8, rope_theta=5e6, use_qk_norm=True, use_routing_bias=True,
                       scoring_func="sigmoid", router_aux_loss_coef=0.001, **NORMED),
        derive=(d.activation, d.attention_bias, d.minimax_rotary),
        fixed={"qk_norm_over": "hidden", **ROTARY},
    ),
    "phimoe": Architecture(
        keys=_EXPERT_WIDTH | keys(head_bias="lm_head_bias"),
        defaults=sizes(32, 4096, 32, 8, 32064, intermediate_size=6400, num_local_experts=16, num_experts_per_tok=2,
                       rope_theta=1e6, rms_norm_eps=1e-5, lm_head_bias=False, norm_topk_prob=False,
                       router_aux_loss_coef=0.001),
        derive=(d.activation, d.attention_bias, lists.window(lists.never)),
        fixed={**LAYERNORM, "gated_mlp": True, **ROTARY},
    ),
    "dbrx": Architecture(
        keys=keys("vocab_size", "tie_word_embeddings", "rope_theta", num_hidden_layers="n_layers",
                  hidden_size="d_model", num_attention_heads="n_heads", num_key_value_heads="kv_n_heads",
                  num_experts="moe_num_experts", num_experts_per_tok="moe_top_k",
                  moe_intermediate_size="ffn_hidden_size"),
        defaults={"d_model": 2048, "n_heads": 16, "n_layers": 24, "vocab_size": 32000, "kv_n_heads": 1,
                  "ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1, "tie_word_embeddings": False,
                  "moe_loss_weight": 0.01, "layer_norm_eps": 1e-5, **NORMED},
        derive=(),
        fixed={"norm": "layernorm", "norm_bias": False, **ROTARY},
        sections=("attn_config", "ffn_config"),
    ),
    "grok-1": Architecture(
        keys=_EXPERT_WIDTH,
        defaults=sizes(64, 6144, 48, 8, 131072, intermediate_size=32768, num_experts=8, num_experts_per_tok=2,
                       tie_word_embeddings=True, rms_norm_eps=1e-5, norm_topk_prob=False),
        derive=(d.grok_scales,),
        fixed={"activation": "gelu", "post_norms": True, **ROTARY},
    ),
    "hunyuan_v1_moe": _HUNYUAN,
    "exaone_moe": Architecture(
        keys=DENSE | MOE | keys("num_nextn_predict_layers"),
        defaults=sizes(32, 4096, 32, 32, 102400, intermediate_size=16384, moe_intermediate_size=1024, num_experts=64,
                       num_experts_per_tok=8, num_shared_experts=1, first_k_dense_replace=1, sliding_window=4096,
                       rms_norm_eps=1e-5, **ROUTED | {"routed_scaling_factor": 2.5}),
        derive=(d.activation, d.shared_experts("num_shared_experts"),
                lists.window(lists.every("sliding_window_pattern", 4)), lists.full_unrotated,
                lists.moe_layers(lists.after_dense("first_k_dense_replace"))),
        fixed={"qk_norm": True, "router_bias": True, **ROTARY},
    ),
    "solar_open": Architecture(
        keys=_GQA_DEEPSEEK,
        defaults=sizes(48, 4096, 64, 8, 196608, moe_intermediate_size=1280, n_routed_experts=128, n_shared_experts=1,
                       num_experts_per_tok=8, head_dim=128, rope_theta=1e6, rms_norm_eps=1e-5,
                       first_k_dense_replace=0, **ROUTED),
        derive=(d.activation, d.no_output_bias, _SHARED, _DEEPSEEK_MOE),
        fixed={"router_bias": True, **ROTARY},
    ),
    "bailing_moe": Architecture(
        keys=DENSE | MOE | keys("num_nextn_predict_layers"),
        defaults=sizes(24, 2048, 16, None, 126464, intermediate_size=11008, moe_intermediate_size=1408, num_experts=64,
                       num_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=0, **NORMED),
        derive=(d.activation, d.bailing, lists.moe_layers(lists.after_dense("first_k_dense_replace"))),
        fixed=ROTARY,
    ),
    "hy_v3": Architecture(
        keys=DENSE | MOE,
        defaults=sizes(80, 4096, 64, 8, 120832, intermediate_size=13312, moe_intermediate_size=1536, num_experts=192,
                       num_shared_experts=1, num_experts_per_tok=8, head_dim=128, rms_norm_eps=1e-5,
                       router_scaling_factor=2.826, first_k_dense_replace=1, **NORMED),
        derive=(d.activation, d.attention_bias, d.shared_experts("num_shared_experts"),
                lists.moe_layers(lists.after_dense("first_k_dense_replace"))),
        fixed={"qk_norm": True, "router_bias": True, **ROTARY},
    ),
    "afmoe": Architecture(
        keys=DENSE | MOE,
        defaults=sizes(32, 2048, 16, None, 200192, intermediate_size=6144, moe_intermediate_size=1408, num_experts=64,
                       num_experts_per_tok=6, num_shared_experts=2, num_dense_layers=1, head_dim=128,
                       global_attn_every_n_layers=4, sliding_window=1024, rms_norm_eps=1e-5, score_func="sigmoid",
                       **NORMED),
        derive=(d.activation, d.attention_bias, d.shared_experts("num_shared_experts"), d.afmoe,
                lists.window(lists.every("global_attn_every_n_layers", 4)), lists.full_unrotated,
                lists.moe_layers(lists.after_dense("num_dense_layers"))),
        fixed={"qk_norm": True, "post_norms": True, "router_bias": True, "attn_output_gate": True, **ROTARY},
    ),
    "aria_text": DENSE_ARCHITECTURES["llama"].like(
        d.shared_experts("moe_num_shared_experts", "intermediate_size"),
        keys=keys(num_experts="moe_num_experts", num_experts_per_tok="moe_topk",
                  moe_intermediate_size="intermediate_size"),
        defaults={"intermediate_size": 4096, "moe_num_experts": 8, "moe_topk": 2,
                  "moe_num_shared_experts": 2, **NORMED},
    ),
    "longcat_flash": Architecture(
        keys=without(DEEPSEEK, "num_hidden_layers") | keys(
            intermediate_size="ffn_hidden_size", num_experts="n_routed_experts", num_zero_experts="zero_expert_num",
            num_experts_per_tok="moe_topk", moe_intermediate_size="expert_ffn_hidden_size"),
        defaults=sizes(28, 6144, 64, None, 131072, ffn_hidden_size=12288, expert_ffn_hidden_size=2048,
                       n_routed_experts=512, zero_expert_num=256, moe_topk=12, rope_theta=1e7, rms_norm_eps=1e-5,
                       routed_scaling_factor=6.0, num_layers=28, norm_topk_prob=False, scoring_func="softmax",
                       **DEEPSEEK_RANKS),
        derive=(d.attention_bias, d.longcat),
        fixed={"router_bias": True, **ROTARY},
    ),
    "mimo_v2_flash": Architecture(
        keys=DENSE | MOE | keys(num_experts=("n_routed_experts", "num_local_experts")),
        defaults=sizes(48, 4096, 64, 4, 152576, intermediate_size=16384, moe_intermediate_size=2048,
                       n_routed_experts=256, num_experts_per_tok=8, head_dim=192, v_head_dim=128, sliding_window=129,
                       partial_rotary_factor=0.334, rope_theta=5e6, rms_norm_eps=1e-5, first_k_dense_replace=1,
                       **ROUTED),
        derive=(d.activation, d.no_output_bias, lists.window(lists.mimo_full), sections.mimo_heads, d.mimo_rotary,
                lists.moe_layers(lists.mimo_moe)),
        fixed={"router_bias": True, **ROTARY},
    ),
    "deepseek_v4": Architecture(
        keys=without(DENSE, "intermediate_size") | MOE | keys(
            "sliding_window", "swiglu_limit", "num_nextn_predict_layers", num_residual_streams="hc_mult",
            num_experts=("n_routed_experts", "num_local_experts")),
        defaults=sizes(43, 4096, 64, 1, 129280, head_dim=512, moe_intermediate_size=2048, n_routed_experts=256,
                       n_shared_experts=1, num_experts_per_tok=6, q_lora_rank=1024, o_groups=8, o_lora_rank=1024,
                       qk_rope_head_dim=64, sliding_window=128, swiglu_limit=10.0, hc_mult=4, index_n_heads=64,
                       index_head_dim=128, index_topk=512, rope_theta=1e4, num_nextn_predict_layers=1,
                       scoring_func="sqrtsoftplus", **ROUTED | {"routed_scaling_factor": 1.5}),
        derive=(d.activation, d.attention_bias, _SHARED, sections.indexer, sections.compressed_attention),
        fixed={"router_bias": True, "attention_sinks": True, **ROTARY},
    ),
    "step3_text": _STEP3,
    "step3p5": _STEP3.like(
        sections.step_layers,
        keys=keys("head_dim", num_key_value_heads=("num_attention_groups", "num_key_value_heads")),
        defaults={"num_hidden_layers": 45, "hidden_size": 4096, "intermediate_size": 11264, "num_attention_groups": 8,
                  "head_dim": 128, "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280,
                  "share_expert_dim": 1280, "first_k_dense_replace": 3, "share_q_dim": None, "rope_theta": 1e4,
                  **NORMED},
        router_bias=True, qk_norm=True, attn_head_gate=True, zero_centered_norm=True,
    ),
    "gemma4_text": DENSE_ARCHITECTURES["gemma3_text"].like(
        lists.window(lists.gemma4_full), sections.gemma4_heads,
        defaults={"num_hidden_layers": 30, "vocab_size": 262144, "sliding_window": 512, "query_pre_attn_scalar": 1,
                  "hidden_size_per_layer_input": 256, **NORMED},
        zero_centered_norm=False,
    ),
}  # fmt: skip
MIXTURE_ARCHITECTURES["gemma4_unified_text"] = MIXTURE_ARCHITECTURES["gemma4_text"].like(
    defaults={"hidden_size_per_layer_input": 0}
)
