"""Every model file: named as its file, with its source, and trained as published."""

from __future__ import annotations

import pytest

from planner.specs.model import LayerKind
from planner.specs.registry import load_model, model_names

ASKED_FOR = {
    "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-2-7b", "llama-2-13b", "llama-2-70b",
    "gpt3-175b", "megatron-22b", "megatron-530b", "megatron-1t", "bloom-176b", "opt-175b", "gpt-neox-20b",
    "qwen2.5-32b", "qwen2.5-72b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b",
    "mixtral-8x22b", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2", "moonlight-16b", "gpt-oss-20b",
    "gpt-oss-120b", "gemma-3-27b", "nemotron-4-340b",
}  # fmt: skip
FULL_DENSE, FULL_MOE = LayerKind("full", "dense"), LayerKind("full", "moe")
SLIDING_DENSE, SLIDING_MOE = LayerKind("sliding", "dense"), LayerKind("sliding", "moe")


@pytest.mark.parametrize("name", model_names())
def test_a_model_file_is_named_sourced_and_trained(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.source
    assert model.training is not None
    assert model.training.source
    assert model.training.tokens_per_step % model.training.seq_length == 0
    if model.position_embedding == "learned":
        assert model.training.seq_length <= (model.max_position_embeddings or 0)


def test_the_models_people_ask_for_are_there() -> None:
    assert set(model_names()) >= ASKED_FOR


@pytest.mark.parametrize(
    ("name", "seq_length", "sequences"),
    [
        ("llama-3.1-405b", 8192, 2048),
        ("llama-2-70b", 4096, 1024),
        ("deepseek-v3", 4096, 15_360),
        ("kimi-k2", 4096, 16_384),
        ("bloom-176b", 2048, 2048),
        ("gpt-neox-20b", 2048, 1538),
        ("nemotron-4-340b", 4096, 2304),
        ("megatron-1008b", 2048, 3072),
        ("megatron-1t", 2048, 512),
    ],
)
def test_the_published_batch(name: str, seq_length: int, sequences: int) -> None:
    training = load_model(name).training
    assert training is not None
    assert (training.seq_length, training.tokens_per_step) == (seq_length, sequences * seq_length)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("llama-3.1-405b", ((FULL_DENSE, 126),)),
        ("deepseek-v3", ((FULL_DENSE, 3), (FULL_MOE, 58))),
        ("kimi-k2", ((FULL_DENSE, 1), (FULL_MOE, 60))),
        ("mixtral-8x7b", ((FULL_MOE, 32),)),
        ("gpt-oss-20b", ((SLIDING_MOE, 1), (FULL_MOE, 1)) * 12),
        ("gemma-3-27b", ((SLIDING_DENSE, 5), (FULL_DENSE, 1)) * 10 + ((SLIDING_DENSE, 2),)),
    ],
)
def test_the_sequence_of_layer_kinds(name: str, runs: tuple[tuple[LayerKind, int], ...]) -> None:
    assert load_model(name).runs == runs
