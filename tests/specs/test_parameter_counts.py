"""Parameters of every shipped model: published totals to the digit, and a count of its own beside the operators'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.physics.layers import model_totals
from planner.specs.architectures import from_config
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import MLASpec
from planner.specs.registry import load_model, model_names
from planner.trainers.load import load_runtime

TABLES = yaml.safe_load((Path(__file__).parent / "counts.yaml").read_text())
PUBLISHED: dict[str, int] = TABLES["published"]
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
ROUNDED: dict[str, tuple[float, int]] = TABLES["rounded"]
ACTIVE: dict[str, tuple[float, int, int]] = TABLES["active"]


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
