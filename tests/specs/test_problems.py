"""A validation error becomes one line a user understands: where, which field, which value, what to write."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from planner.errors import SpecError
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.problems import known_keys, nearest, spec_error
from planner.specs.training import Parallelism, SearchLimits

TINY: dict[str, Any] = {
    "name": "tiny", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4,
    "vocab_size": 100,
}  # fmt: skip
GPU: dict[str, Any] = {
    "name": "gpu", "source": "a data sheet", "architecture": "hopper", "memory_gib": 80, "hbm_gb_per_s": 3000,
    "peak_tflops": {"bf16": 1000}, "num_sms": 132, "tiers": [{"name": "nvlink", "gb_per_s": 400, "latency_us": 3}],
    "efficiency": {},
}  # fmt: skip


def said(model: type[BaseModel], data: dict[str, Any]) -> SpecError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(data)
    error = spec_error(caught.value, "x.yaml", model)
    assert error.message.startswith("x.yaml: ")
    assert error.hint
    assert len(error.message) < 300
    assert "\n" not in error.message + error.hint
    return error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": -3}, "num_hidden_layers: -3 must be greater than 0"),
        ({"hidden_size": 0}, "hidden_size: 0 must be greater than 0"),
        ({"name": "a\x1b[31mb"}, "name: has characters that cannot be printed: 'a\\x1b[31mb'"),
        ({"num_hidden_layers": 20_000}, "num_hidden_layers: 20000 must be at most 10,000"),
        ({"vocab_size": "100"}, "vocab_size: '100' is text, expected an integer"),
        ({"vocab_size": 100.0}, "vocab_size: 100.0 is a number, expected an integer"),
        ({"vocab_size": True}, "vocab_size: True is true or false, expected an integer"),
        ({"vocab_size": None}, "vocab_size: None is nothing, expected an integer"),
        ({"vocab_size": [1]}, "vocab_size: [1] is a list, expected an integer"),
        ({"vocab_size": float("nan")}, "vocab_size: nan is a number, expected an integer"),
        ({"vocab_size": 10**400}, "vocab_size: a huge number"),
        ({"norm": "groupnorm"}, "norm: 'groupnorm' is none of 'rmsnorm' or 'layernorm'"),
        ({"moe": 3}, "moe: 3 is an integer, expected a mapping"),
        ({"moe": {"num_experts": 8, "num_experts_per_tok": 9, "moe_intermediate_size": 4}}, "moe: num_experts_per_tok"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads (4) is no multiple of"),
        ({"hidden_size": 65}, "head_dim is missing and hidden_size (65)"),
        ({"name": ""}, "name: '' is text, expected some text"),
        ({"tie_word_embeddings": "perhaps"}, "tie_word_embeddings: 'perhaps' is text, expected true or false"),
        ({"aliases": "x"}, "aliases: 'x' is text, expected a list"),
    ],
)  # fmt: skip
def test_a_wrong_model_field_is_named_with_its_value(change: dict[str, Any], message: str) -> None:
    assert said(ModelSpec, TINY | change).message.startswith(f"x.yaml: {message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gib": float("inf")}, "memory_gib: inf is not a finite number"),
        ({"memory_gib": float("nan")}, "memory_gib: nan is not a finite number"),
        ({"memory_gib": -80}, "memory_gib: -80 must be greater than 0"),
        ({"memory_gib": 1e300}, "memory_gib: 1e+300 is a number, expected one from 1e-09 to 1e+09"),
        ({"hbm_gb_per_s": 1e-300}, "hbm_gb_per_s: 1e-300 is a number, expected one from 1e-09 to 1e+09"),
        ({"num_sms": 10**14}, "num_sms: 100000000000000 must be at most 1,000,000"),
        (
            {"tiers": [{**GPU["tiers"][0], "efficiency_fraction": 0}]},
            "tiers[0].efficiency_fraction: 0 must be at least",
        ),
        ({"efficiency": {"stream_fraction": 0}}, "efficiency.stream_fraction: 0 must be at least 1e-06"),
        ({"memory_gib": "lots"}, "memory_gib: 'lots' is text, expected a number"),
        ({"peak_tflops": {"bf16": 0}}, "peak_tflops.bf16: 0 must be greater than 0"),
        ({"peak_tflops": {"fp8": 2000}}, "peak_tflops: needs bf16 or fp16"),
        ({"tiers": []}, "tiers: [] is a list, expected a list with at least one entry"),
        ({"tiers": [{"name": "nvlink", "latency_us": 3}]}, "tiers[0].gb_per_s: is missing"),
        ({"tiers": [GPU["tiers"][0], GPU["tiers"][0]]}, "tiers: every tier but the last needs num_gpus"),
        ({"reserved": {"fragmentation_fraction": 1.5}}, "reserved.fragmentation_fraction: 1.5 must be at most 1"),
    ],
)
def test_a_wrong_hardware_field_is_named_with_its_place(change: dict[str, Any], message: str) -> None:
    assert said(HardwareSpec, GPU | change).message.startswith(f"x.yaml: {message}")


@pytest.mark.parametrize(
    ("model", "data", "field", "meant"),
    [
        (ModelSpec, {**TINY, "num_layers": 2}, "num_layers", "num_hidden_layers"),
        (ModelSpec, {**TINY, "num_expert_per_tok": 2}, "num_expert_per_tok", "num_experts_per_tok"),
        (ModelSpec, {**TINY, "mla": {"q_lora": 5}}, "mla.q_lora", "q_lora_rank"),
        (HardwareSpec, {**GPU, "memory_gb": 80}, "memory_gb", "memory_gib"),
        (HardwareSpec, {**GPU, "tiers": [{"latency": 3}]}, "tiers[0].latency", "latency_us"),
        (Parallelism, {"tensor": 8, "micro_batch": 1}, "tensor", "tp"),
    ],
)
def test_an_unknown_key_says_which_one_may_be_meant(
    model: type[BaseModel], data: dict[str, Any], field: str, meant: str
) -> None:
    error = said(model, data)
    assert error.message.startswith(f"x.yaml: {field}: unknown key")
    assert meant in error.hint


def test_the_other_problems_are_counted() -> None:
    assert said(ModelSpec, TINY | {"vocab_size": 0}).message.endswith("0 must be greater than 0")
    assert said(ModelSpec, TINY | {"vocab_size": 0, "norm": "x"}).message.endswith(" (and 1 more problem)")
    assert said(ModelSpec, {"name": "x", "num_hidden_layer": 1}).message.endswith(" more problems)")


def test_a_misspelt_key_comes_before_the_missing_one_it_explains() -> None:
    data = {key: value for key, value in TINY.items() if key != "vocab_size"} | {"vocabulary_size": 100}
    assert "vocabulary_size: unknown key" in said(ModelSpec, data).message


def test_branches_of_a_union_are_no_part_of_the_field() -> None:
    assert said(Parallelism, {"fsdp": []}).message.startswith("x.yaml: fsdp: ")
    assert said(SearchLimits, {"tp": [1, 0]}).message.startswith("x.yaml: tp[1]: 0 must be greater than 0")


def test_a_field_is_shown_as_the_file_spells_it() -> None:
    with pytest.raises(ValidationError) as caught:
        ModelSpec.model_validate(TINY | {"hidden_size": -1})
    error = spec_error(caught.value, "config.json", ModelSpec, {"hidden_size": "n_embd"})
    assert error.message.startswith("config.json: n_embd: -1")


def test_a_key_cannot_smuggle_control_characters_into_the_terminal() -> None:
    assert "\x1b" not in said(ModelSpec, TINY | {"\x1b[2Jevil\n": 1}).message


def test_a_value_nested_without_end_is_shown_briefly() -> None:
    bomb: list[Any] = []
    for _ in range(40):
        bomb = [bomb] * 10
    said(ModelSpec, TINY | {"vocab_size": bomb})
    loop: list[Any] = []
    loop.append(loop)
    said(ModelSpec, TINY | {"vocab_size": loop})


def test_sections_that_may_be_given_flat_count_as_known_keys() -> None:
    assert {"num_experts", "kv_lora_rank", "hidden_size"} <= known_keys(ModelSpec)
    assert "num_experts" not in known_keys(HardwareSpec)


def test_nearest_is_silent_when_nothing_is_near() -> None:
    assert nearest("lama-405b", ["llama-3.1-405b", "gpt2"]) == "; did you mean llama-3.1-405b?"
    assert nearest("zzzz", ["llama-3.1-405b", "gpt2"]) == ""
