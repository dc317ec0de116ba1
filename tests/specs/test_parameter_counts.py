"""Parameters of every shipped model: published totals to the digit, and a count of its own beside the operators'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.physics.layers import model_totals
from planner.specs.architectures import from_config
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import MLASpec
from planner.specs.registry import load_model, model_names
from planner.trainers.load import load_runtime

PUBLISHED = {
    # checkpoint indexes (total_size / 2) and model cards
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "bloom-176b": 176_247_271_424,
    "gpt-neox-20b": 20_554_567_680,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,  # without the multi-token-prediction block
    "kimi-k2": 1_026_408_232_448,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama-4-scout": 107_769_861_120,
    "llama-4-maverick": 400_711_848_960,
    # by the configuration; the checkpoints hold something else besides (rotary tables, a vision encoder)
    "moonlight-16b": 15_960_110_208,
    "gemma-3-27b": 27_009_346_304,
    "seed-oss-36b": 36_151_104_512,
    "glm-4.5-air": 106_852_245_504 + 45 * 128,  # and the router's correction biases; without the prediction block
    "glm-4.5": 352_797_814_784 + 89 * 160,
    # 31,221,488,576 in the checkpoint, with the prediction block and its copies of embedding and head
    "glm-4.7-flash": 31_221_488_576 - 1_278_094_656,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "deepseek-llm-7b": 6_910_365_696,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-2": 122_610_069_504,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "nemotron-3-4b": 4_190_509_056,
}
PUBLISHED_CONFIGS: dict[str, dict[str, Any]] = {
    entry["name"]: entry for entry in json.loads((Path(__file__).parent / "published.json").read_text())
}
UNCOMMON = {
    "qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "minimax-m2", "olmo-3-32b", "deepseek-v3.2", "glm-5",
    "nemotron-3-nano-30b-a3b",
    "granite-4.0-h-small", "falcon-h1-34b", "deepseek-v4-flash", "deepseek-v4-pro",
    "kimi-k3", "minimax-m3",
}  # fmt: skip
"""Models with fields that the closed form below does not know."""
ROUNDED = {
    # SC'21 Table 1 and Korthikanti Table 3, in billions
    "megatron-1.7b": (1.7, 1), "megatron-3.6b": (3.6, 1), "megatron-7.5b": (7.5, 1), "megatron-18.4b": (18.4, 1),
    "megatron-39.1b": (39.1, 1), "megatron-76.1b": (76.1, 1), "megatron-145.6b": (145.6, 1),
    "megatron-310.1b": (310.1, 1), "megatron-529.6b": (529.6, 1), "megatron-1008b": (1008.0, 1),
    "megatron-22b": (22, 0), "gpt3-175b": (175, 0), "megatron-530b": (530, 0), "megatron-1t": (1008, 0),
    "opt-175b": (175, 0), "nemotron-4-340b": (341, 0),
    # Nemotron-4 15B (arXiv:2402.16819): 12.5 billion and 3.1 of embeddings; sizes of NeMo's recipes
    "nemotron-4-15b": (15.6, 1), "nemotron-3-8b": (8.5, 1), "nemotron-3-22b": (21.3, 1),
}  # fmt: skip
ACTIVE = {
    # published billions, decimals, and how many embedding matrices (input, output) the source leaves out
    "mixtral-8x7b": (12.9, 1, 0),
    "mixtral-8x22b": (39, 0, 0),
    "qwen3-30b-a3b": (3, 0, 0),
    "qwen3-235b-a22b": (22, 0, 0),
    "llama-4-scout": (17, 0, 0),
    "llama-4-maverick": (17, 0, 0),
    "gpt-oss-20b": (3.61, 2, 1),
    "gpt-oss-120b": (5.13, 2, 1),
    "deepseek-v2": (21, 0, 1),
    "deepseek-v3": (37, 0, 1),
    "kimi-k2": (32, 0, 1),
    "moonlight-16b": (2.24, 2, 2),
}


def attention(model: ModelSpec) -> int:
    """Projections, biases and inner norms of one attention."""
    hidden, heads, kv_heads, width = (
        model.hidden_size, model.num_attention_heads, model.num_key_value_heads, model.head_dim,
    )  # fmt: skip
    if model.mla is not None:
        return latent_attention(model.mla, hidden, heads)
    inner = width * (heads + 2 * kv_heads)
    count = hidden * inner + heads * width * hidden
    count += (inner if model.qkv_bias else 0) + (hidden if model.output_bias else 0)
    count += 2 * width if model.qk_norm else 0
    return count + (heads if model.attention_sinks else 0)


def latent_attention(mla: MLASpec, hidden: int, heads: int) -> int:
    """DeepSeek-V2 (2024), section 2.1: low-rank queries (or none), low-rank keys and values, and their norms."""
    query_width = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    rank = mla.q_lora_rank
    queries = hidden * query_width if rank is None else hidden * rank + rank + rank * query_width
    keys = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
    keys += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + keys + heads * mla.v_head_dim * hidden


def mlp(model: ModelSpec, width: int) -> int:
    """One MLP: two or three matrices, and their biases."""
    matrices = 3 if model.gated_mlp else 2
    biases = (matrices - 1) * width + model.hidden_size if model.has_mlp_bias else 0
    return matrices * model.hidden_size * width + biases


def layer(model: ModelSpec, kind: LayerKind, num_experts: int | None = None) -> int:
    """One decoder layer, with as many routed experts as said or all."""
    norm = model.hidden_size * (2 if model.has_norm_bias else 1)
    count = attention(model) + norm * (4 if model.post_norms else 2)
    if kind.mlp == "dense":
        return count + mlp(model, model.intermediate_size or 0)
    moe = model.moe
    assert moe is not None
    experts = moe.num_experts if num_experts is None else num_experts
    count += model.hidden_size * moe.num_experts + (moe.num_experts if moe.router_bias else 0)
    count += experts * mlp(model, moe.moe_intermediate_size)
    if moe.shared_expert_intermediate_size:
        count += mlp(model, moe.shared_expert_intermediate_size)
        count += model.hidden_size if moe.shared_expert_gate else 0
    return count


def closed_form(model: ModelSpec, num_experts: int | None = None) -> int:
    """All parameters but those of multi-token prediction."""
    norm = model.hidden_size * (2 if model.has_norm_bias else 1)
    outside = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    outside += model.num_position_parameters + norm * (2 if model.embedding_norm else 1)
    return outside + sum(layer(model, kind, num_experts) for kind in model.layers)


def test_every_shipped_model_has_a_published_count() -> None:
    assert set(model_names()) == set(PUBLISHED) | set(ROUNDED) | UNCOMMON


@pytest.mark.parametrize("name", sorted(UNCOMMON))
def test_a_model_of_uncommon_layers_is_that_of_its_published_config(name: str) -> None:
    """Held against transformers' counts, and field by field against the config."""
    entry = PUBLISHED_CONFIGS[name]
    own, theirs = load_model(name), from_config(entry["config"], "config.json")
    assert model_totals(own, load_runtime("torch-eager"), 4096).num_parameters == entry["parameters"]
    other = {"name", "aliases", "source", "training", "intermediate_size", "vision"}
    assert own.model_dump(exclude=other) == theirs.model_dump(exclude=other)


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_equal_the_published_ones_to_the_digit(name: str) -> None:
    assert closed_form(load_model(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_totals_equal_the_rounded_ones_of_the_papers(name: str) -> None:
    billions, decimals = ROUNDED[name]
    assert round(closed_form(load_model(name)) / 1e9, decimals) == billions


@pytest.mark.parametrize("name", ["megatron-18.4b", "gpt3-175b", "megatron-1t"])
def test_gpt_models_follow_the_formula_of_the_megatron_paper(name: str) -> None:
    """SC'21, equation 2: P = 12·l·h²·(1 + 13/(12·h) + (V + s)/(12·l·h)), to which the final norm adds 2·h."""
    model = load_model(name)
    layers, hidden, vocab, positions = model.num_hidden_layers, model.hidden_size, model.vocab_size, 2048
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + positions) * hidden
    assert closed_form(model) == formula + 2 * hidden


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_round_to_the_published_ones(name: str) -> None:
    billions, decimals, left_out = ACTIVE[name]
    model = load_model(name)
    assert model.moe is not None
    active = closed_form(model, model.moe.num_experts_per_tok) - left_out * model.vocab_size * model.hidden_size
    assert round(active / 1e9, decimals) == billions


@pytest.mark.parametrize("name", [*PUBLISHED, *ROUNDED])
def test_the_operator_list_holds_the_same_parameters(name: str) -> None:
    model = load_model(name)
    totals = model_totals(model, load_runtime("torch-eager"), seq_length=2048)
    num_experts = model.moe.num_experts_per_tok if model.moe else None
    assert totals.num_parameters == closed_form(model)
    assert totals.num_active_parameters == closed_form(model, num_experts)
