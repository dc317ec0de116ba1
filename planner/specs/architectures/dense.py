"""Architectures whose layers all have attention and a dense MLP."""

from __future__ import annotations

from planner.specs.architectures import derivations as d
from planner.specs.architectures import layer_lists as lists
from planner.specs.architectures.rows import (
    BLOCK,
    DEEPSEEK,
    DENSE,
    GPT,
    LAYERNORM,
    MULTIPLIERS,
    ROTARY,
    Architecture,
    keys,
    sizes,
    without,
)

_NEOX_KEYS = keys(
    "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
    "tie_word_embeddings", rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct",
)  # fmt: skip
_GEMMA_SIZES = {
    "intermediate_size": 9216, "head_dim": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096, "query_pre_attn_scalar": 256,
}  # fmt: skip
_QWEN_WINDOW = {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}
_GPT_SIZES = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
              "activation_function": "gelu_new", "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}  # fmt: skip
_WINDOW_4 = lists.window(lists.every("sliding_window_pattern", 4))

LLAMA = Architecture(
    keys=DENSE | keys("mlp_bias"),
    defaults=sizes(32, 4096, 32, None, 32000, intermediate_size=11008),
    derive=(d.activation, d.attention_bias),
    fixed=ROTARY,
)
_MISTRAL = Architecture(
    keys=DENSE,
    defaults=sizes(32, 4096, 32, 8, 32000, intermediate_size=14336, sliding_window=4096),
    derive=(d.activation, lists.window(lists.never)),
    fixed=ROTARY,
)
_QWEN3 = Architecture(
    keys=DENSE,
    defaults=sizes(32, 4096, 32, 32, 151936, intermediate_size=22016, head_dim=128, **_QWEN_WINDOW),
    derive=(d.activation, d.attention_bias, lists.window(lists.qwen_full)),
    fixed={"qk_norm": True, **ROTARY},
)
_GEMMA2 = Architecture(
    keys=DENSE,
    defaults=sizes(26, 2304, 8, 4, 256000, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, **_GEMMA_SIZES),
    derive=(d.activation, d.attention_bias, lists.window(lists.every("sliding_window_pattern", 2)), d.root_of_hidden),
    fixed={"post_norms": True, "zero_centered_norm": True, **ROTARY},
)
_GLM4 = Architecture(
    keys=DENSE,
    defaults=sizes(40, 4096, 32, 2, 151552, intermediate_size=13696, head_dim=128, attention_bias=True,
                   partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7),
    derive=(d.activation, d.no_output_bias),
    fixed={"post_norms": True, **ROTARY},
)  # fmt: skip
_COHERE = Architecture(
    keys=DENSE | keys(qk_norm="use_qk_norm"),
    defaults=sizes(40, 8192, 64, None, 256000, intermediate_size=22528, rope_theta=5e5, tie_word_embeddings=True,
                   layer_norm_eps=1e-5, rms_norm_eps=None, use_qk_norm=False, logit_scale=0.0625),
    derive=(d.activation, d.attention_bias, d.inverse_logit_scale),
    fixed={"norm": "layernorm", "norm_bias": False, "parallel_residual": "one_norm", "qk_norm_over": "per_head",
           **ROTARY},
)  # fmt: skip
_OLMO2 = LLAMA.like(
    defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5},
    pre_norms=False, post_norms=True, qk_norm=True, qk_norm_over="hidden",
)  # fmt: skip
_GPTJ = Architecture(
    keys=GPT | keys(intermediate_size="n_inner"),
    defaults={"vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
              "activation_function": "gelu_new", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-5},
    derive=(d.gpt2_sizes, d.gpt_rotary),
    fixed={"bias": True, "attention_bias": "none", "parallel_residual": "one_norm", "head_bias": True, **LAYERNORM,
           **ROTARY},
)  # fmt: skip
_GPT2 = Architecture(
    keys=GPT | keys(max_position_embeddings="n_positions"),
    defaults=_GPT_SIZES,
    derive=(d.gpt2_sizes,),
    fixed={"bias": True, "position_embedding": "learned", **LAYERNORM},
)
_LATENT = Architecture(
    keys=without(DEEPSEEK, "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    defaults=sizes(32, 2048, 16, 16, 128256, intermediate_size=6144, q_lora_rank=1536, kv_lora_rank=512,
                   qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, tie_word_embeddings=True),
    derive=(d.activation, d.attention_bias, d.latent_heads),
    fixed=ROTARY,
)  # fmt: skip

DENSE_ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": _MISTRAL.like(
        defaults={"num_hidden_layers": 34, "vocab_size": 131072, "head_dim": 128, "sliding_window": None,
                  "rms_norm_eps": 1e-5}
    ),
    "qwen2": Architecture(
        keys=DENSE,
        defaults=sizes(32, 4096, 32, 32, 151936, intermediate_size=22016, **_QWEN_WINDOW),
        derive=(d.activation, d.qkv_bias, lists.window(lists.qwen_full)),
        fixed=ROTARY,
    ),
    "qwen3": _QWEN3,
    "qwen": Architecture(
        keys=DENSE,
        defaults=sizes(32, 4096, 32, None, 151936, intermediate_size=22016, kv_channels=128, layer_norm_epsilon=1e-6,
                       rotary_emb_base=10000),
        derive=(d.activation, d.qwen1),
        fixed=ROTARY,
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2.like(d.one_key_head, defaults={"activation_function": "gelu_pytorch_tanh"}),
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "gpt_neo": Architecture(
        keys=keys("hidden_size", "vocab_size", "tie_word_embeddings", "max_position_embeddings",
                  num_hidden_layers="num_layers", num_attention_heads="num_heads"),
        defaults={"vocab_size": 50257, "hidden_size": 2048, "num_layers": 24, "num_heads": 16, "window_size": 256,
                  "max_position_embeddings": 2048, "activation_function": "gelu_new", "tie_word_embeddings": True,
                  "attention_types": [[["global", "local"], 12]], "layer_norm_epsilon": 1e-5},
        derive=(d.neo_sizes, lists.local_or_global),
        fixed={"bias": True, "attention_bias": "output", "position_embedding": "learned", **LAYERNORM},
    ),
    "gpt_neox": Architecture(
        keys=_NEOX_KEYS,
        defaults=sizes(44, 6144, 64, None, 50432, intermediate_size=24576, hidden_act="gelu", attention_bias=True,
                       rotary_pct=0.25, layer_norm_eps=1e-5, rms_norm_eps=None),
        derive=(d.activation, d.attention_bias, d.parallel("two_norms")),
        fixed={"bias": True, **LAYERNORM, **ROTARY},
    ),
    "bloom": Architecture(
        keys=GPT,
        defaults={"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "tie_word_embeddings": True,
                  "layer_norm_epsilon": 1e-5},
        derive=(d.four_times,),
        fixed={"bias": True, "embedding_norm": True, "activation": "gelu_tanh", **LAYERNORM,
               "position_embedding": "alibi"},
    ),
    "falcon": Architecture(
        keys=keys("vocab_size", "tie_word_embeddings", "rope_theta", hidden_size=("hidden_size", "n_embed"),
                  num_hidden_layers=("num_hidden_layers", "n_layer"),
                  num_attention_heads=("num_attention_heads", "n_head")),
        defaults={"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
                  "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        derive=(d.falcon,),
        fixed=LAYERNORM,
    ),
    "mpt": Architecture(
        keys=keys("vocab_size", "tie_word_embeddings", num_hidden_layers="n_layers", hidden_size="d_model",
                  num_attention_heads="n_heads"),
        defaults={"vocab_size": 50368, "d_model": 2048, "n_layers": 24, "n_heads": 16, "max_seq_len": 2048,
                  "expansion_ratio": 4, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        derive=(d.mpt,),
        fixed={**LAYERNORM, "activation": "gelu"},
        sections=("attn_config",),
    ),
    "gemma": Architecture(
        keys=DENSE,
        defaults=sizes(28, 3072, 16, 16, 256000, intermediate_size=24576, head_dim=256, tie_word_embeddings=True,
                       hidden_act="gelu_pytorch_tanh"),
        derive=(d.activation, d.attention_bias, d.root_of_hidden),
        fixed={"zero_centered_norm": True, **ROTARY},
    ),
    "gemma2": _GEMMA2,
    "vaultgemma": _GEMMA2.like(post_norms=False),
    "gemma3_text": _GEMMA2.like(
        lists.window(lists.every("sliding_window_pattern", 6)),
        defaults={"vocab_size": 262208, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "attn_logit_softcapping": None,
                  "final_logit_softcapping": None},
        keys=keys("rope_local_base_freq"),
        qk_norm=True,
    ),
    "phi3": Architecture(
        keys=DENSE,
        defaults=sizes(32, 3072, 32, None, 32064, intermediate_size=8192, rms_norm_eps=1e-5),
        derive=(d.activation, lists.window(lists.never)),
        fixed=ROTARY,
    ),
    "phi": Architecture(
        keys=DENSE,
        defaults=sizes(24, 2048, 32, None, 51200, intermediate_size=8192, hidden_act="gelu_new", layer_norm_eps=1e-5,
                       rms_norm_eps=None, partial_rotary_factor=0.5),
        derive=(d.activation, d.no_head_norms),
        fixed={"bias": True, "head_bias": True, "parallel_residual": "one_norm", **LAYERNORM, **ROTARY},
    ),
    "nemotron": Architecture(
        keys=DENSE | keys("mlp_bias"),
        defaults=sizes(32, 6144, 48, None, 256000, intermediate_size=24576, hidden_act="relu2", mlp_bias=False,
                       partial_rotary_factor=0.5, norm_eps=1e-5, rms_norm_eps=None),
        derive=(d.activation, d.attention_bias),
        fixed={**LAYERNORM, "zero_centered_norm": True, **ROTARY},
    ),
    "jais2": Architecture(
        keys=DENSE | keys("mlp_bias"),
        defaults=sizes(32, 3328, 26, None, 150272, intermediate_size=26624, hidden_act="relu2", attention_bias=True,
                       mlp_bias=True, head_dim=128, layer_norm_eps=1e-5, rms_norm_eps=None),
        derive=(d.activation, d.attention_bias),
        fixed={**LAYERNORM, **ROTARY},
    ),
    "glm": _GLM4.like(post_norms=False),
    "glm4": _GLM4,
    "chatglm": Architecture(
        keys=keys("hidden_size", "num_attention_heads", "tie_word_embeddings", num_hidden_layers="num_layers",
                  head_dim="kv_channels", vocab_size=("padded_vocab_size", "vocab_size"),
                  intermediate_size="ffn_hidden_size"),
        defaults={"num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128,
                  "padded_vocab_size": 65024, "ffn_hidden_size": 13696, "tie_word_embeddings": False,
                  "layernorm_epsilon": 1e-5, "partial_rotary_factor": 0.5},
        derive=(d.chatglm,),
        fixed={"partial_rotary_factor": 0.5, **ROTARY},
    ),
    "seed_oss": Architecture(
        keys=DENSE | keys("mlp_bias"),
        defaults=sizes(64, 4096, 80, 8, 155136, intermediate_size=27648, head_dim=128, attention_bias=True),
        derive=(d.activation, d.no_output_bias),
        fixed=ROTARY,
    ),
    "ernie4_5": Architecture(
        keys=DENSE | keys(bias="use_bias"),
        defaults=sizes(18, 1024, 16, 2, 103424, intermediate_size=3072, head_dim=128, rope_theta=5e5, use_bias=False,
                       tie_word_embeddings=True, rms_norm_eps=1e-5),
        derive=(d.activation,),
        fixed={"norm_bias": False, **ROTARY},
    ),
    "smollm3": Architecture(
        keys=DENSE | keys("mlp_bias"),
        defaults=sizes(36, 2048, 16, 4, 128256, intermediate_size=11008, tie_word_embeddings=True, rope_theta=2e6,
                       use_sliding_window=False),
        derive=(d.activation, d.attention_bias, lists.window(lists.qwen_full), lists.rotated_layers),
        fixed=ROTARY,
    ),
    "granite": LLAMA.like(keys=MULTIPLIERS),
    "granite_swa": LLAMA.like(
        lists.window(lists.cwm_full), keys=MULTIPLIERS,
        defaults={"num_hidden_layers": 24, "hidden_size": 2560, "num_attention_heads": 20, "num_key_value_heads": 4,
                  "vocab_size": 100352, "intermediate_size": 8192, "sliding_window": 128, "tie_word_embeddings": True,
                  "rms_norm_eps": 1e-5},
        attention_sinks=True,
    ),
    "hyperclovax": LLAMA.like(keys=MULTIPLIERS | keys(post_norms="use_post_norm"), defaults={"use_post_norm": True}),
    "minicpm": LLAMA.like(d.minicpm, defaults={"tie_word_embeddings": True}),
    "minicpm3": _LATENT.like(
        d.minicpm,
        defaults={"num_hidden_layers": 62, "hidden_size": 2560, "num_attention_heads": 40, "vocab_size": 73448,
                  "intermediate_size": 6400, "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
                  "qk_rope_head_dim": 32, "v_head_dim": 64, "rms_norm_eps": 1e-5, "num_key_value_heads": None},
    ),
    "youtu": _LATENT,
    "cohere": _COHERE,
    "cohere2": _COHERE.like(
        _WINDOW_4, lists.full_unrotated, defaults={"rope_theta": 1e4, "sliding_window": 4096}
    ),
    "olmo": LLAMA.like(defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5}, norm="layernorm", norm_weight=False),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2.like(_WINDOW_4, defaults={"sliding_window": 4096}),
    "exaone4": Architecture(
        keys=DENSE,
        defaults=sizes(32, 4096, 32, 32, 102400, intermediate_size=16384, sliding_window=4096, rms_norm_eps=1e-5),
        derive=(d.activation, _WINDOW_4, lists.full_unrotated),
        fixed={"qk_norm": True, "pre_norms": False, "post_norms": True, **ROTARY},
    ),
    "exaone": Architecture(
        keys=keys(*BLOCK, "intermediate_size", num_hidden_layers=("num_layers", "num_hidden_layers")),
        defaults=sizes(32, 4096, 32, None, 102400, intermediate_size=14336, num_layers=32, layer_norm_epsilon=1e-5,
                       rms_norm_eps=None),
        derive=(),
        fixed=ROTARY,
    ),
    "apertus": LLAMA.like(
        defaults={"vocab_size": 131072, "intermediate_size": 14336, "hidden_act": "xielu", "rope_theta": 12e6,
                  "rms_norm_eps": 1e-5},
        gated_mlp=False, qk_norm=True,
    ),
    "arcee": Architecture(
        keys=DENSE | keys("mlp_bias"),
        defaults=sizes(32, 2560, 32, None, 32000, intermediate_size=18432, hidden_act="relu2", rms_norm_eps=1e-5),
        derive=(d.activation, d.attention_bias),
        fixed={"gated_mlp": False, **ROTARY},
    ),
    "nanochat": LLAMA.like(
        defaults={"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 6, "vocab_size": 50304,
                  "intermediate_size": 8192, "hidden_act": "relu2", "final_logit_softcapping": 15.0},
        gated_mlp=False, norm_weight=False, qk_norm=True,
    ),
    "helium": LLAMA.like(
        d.no_output_bias,
        defaults={"num_hidden_layers": 24, "hidden_size": 2560, "num_attention_heads": 20, "vocab_size": 48000,
                  "intermediate_size": 7040, "head_dim": 128, "rope_theta": 1e5, "rms_norm_eps": 1e-8},
    ),
    "cwm": LLAMA.like(
        lists.window(lists.cwm_full),
        defaults={"num_hidden_layers": 64, "hidden_size": 6144, "num_attention_heads": 48, "num_key_value_heads": 8,
                  "vocab_size": 128256, "intermediate_size": 21504, "head_dim": 128, "sliding_window": 8192,
                  "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
    "hunyuan_v1_dense": LLAMA.like(
        defaults={"vocab_size": 290943, "rms_norm_eps": 1e-5}, qk_norm=True,
    ),
    "internlm": LLAMA.like(d.one_bias),
    "internlm2": LLAMA.like(d.one_bias, defaults={"vocab_size": 103168, "bias": True, "rms_norm_eps": 1e-6}),
    "internlm3": LLAMA.like(
        d.internlm3,
        defaults={"num_hidden_layers": 48, "num_key_value_heads": 2, "vocab_size": 128512, "intermediate_size": 10240,
                  "head_dim": 128, "rms_norm_eps": 1e-5},
    ),
    "baichuan": LLAMA.like(d.baichuan, defaults={"vocab_size": 125696}),
    "starcoder2": Architecture(
        keys=DENSE | keys(bias="use_bias"),
        defaults=sizes(30, 3072, 24, 2, 49152, intermediate_size=12288, hidden_act="gelu_pytorch_tanh", use_bias=True,
                       tie_word_embeddings=True, norm_epsilon=1e-5, rms_norm_eps=None),
        derive=(d.activation, lists.window(lists.never)),
        fixed={**LAYERNORM, **ROTARY},
    ),
    "stablelm": Architecture(
        keys=DENSE,
        defaults=sizes(32, 2560, 32, 32, 50304, intermediate_size=6912, partial_rotary_factor=0.25,
                       layer_norm_eps=1e-5, rms_norm_eps=None),
        derive=(d.activation, d.stablelm_norms, d.parallel("one_norm", default=False)),
        fixed={**LAYERNORM, "gated_mlp": True, **ROTARY},
    ),
    "opt": Architecture(
        keys=keys("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "tie_word_embeddings",
                  intermediate_size="ffn_dim", bias="enable_bias"),
        defaults={"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 50272,
                  "ffn_dim": 3072, "max_position_embeddings": 2048, "activation_function": "relu", "enable_bias": True,
                  "tie_word_embeddings": True},
        derive=(d.opt_sizes,),
        fixed={"position_embedding": "learned", **LAYERNORM},
    ),
}  # fmt: skip
