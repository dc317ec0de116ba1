"""config.json of every architecture as published: its parameters to the digit, and the layers that it is made of.

`tools/count_models` counts them anew with transformers.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refused
from tables import beside

from planner.errors import SpecError
from planner.physics.layers import model_totals
from planner.specs.architectures import ARCHITECTURES, REFUSED, SAME_AS, WRAPPERS, from_config
from planner.specs.model import ModelSpec
from planner.trainers.load import load_runtime

CASES = beside(__file__)

ENTRIES: dict[str, dict[str, Any]] = {
    entry["name"]: entry for entry in json.loads((Path(__file__).parent / "published.json").read_text())
}
CONFIGS = Path(__file__).parent / "configs"
OTHERS = {"ministral", "internlm", "llama4_text", "mimo", "longcat_flash_ngram", "llada_moe", "grok-2"}
"""Read as an architecture that is held against a published config, or by another name than its own."""
TABLES = yaml.safe_load((Path(__file__).parent / "counts.yaml").read_text())
DEFAULTS: dict[str, int] = TABLES["defaults"]


def model_of(name: str, **changes: Any) -> ModelSpec:
    """The model of a published config with keys of the language model's changed."""
    config = ENTRIES[name]["config"]
    inner = {"text_config": config["text_config"] | changes} if "text_config" in config else changes
    return from_config(config | inner, f"{name}/config.json")


def totals(model: ModelSpec) -> Any:
    """What the language model has in all."""
    return model_totals(model.model_copy(update={"vision": None}), load_runtime("torch-eager"), seq_length=2048)


def count(model: ModelSpec) -> int:
    return totals(model).num_parameters


@pytest.mark.parametrize("name", ENTRIES)
def test_parameters_are_those_that_were_counted(name: str) -> None:
    found = totals(model_of(name))
    assert found.num_parameters == ENTRIES[name]["parameters"]
    assert found.num_active_parameters == TABLES["active_counted"].get(name, found.num_active_parameters)


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_an_absent_key_means_what_transformers_takes_for_it(model_type: str) -> None:
    assert count(from_config({"model_type": model_type}, "config.json")) == DEFAULTS[model_type]


def test_every_architecture_is_held_against_a_config() -> None:
    held = {json.loads(path.read_text())["model_type"] for path in CONFIGS.glob("*.json")}
    held |= {row["config"].get("model_type", "") for row in TABLES["varied"].values()} - {"", "git"}
    for entry in ENTRIES.values():
        held.add(entry["config"].get("text_config", entry["config"])["model_type"])
    assert {(SAME_AS | WRAPPERS).get(kind, kind) for kind in held} | OTHERS | set(DEFAULTS) == set(ARCHITECTURES)


@pytest.mark.parametrize(("name", "kinds"), TABLES["layers"].items())
def test_layers_are_those_of_the_model(name: str, kinds: list[str]) -> None:
    assert [str(kind) for kind in model_of(name).layers[: len(kinds)]] == kinds


@pytest.mark.parametrize(("name", "field", "value"), TABLES["fields"])
def test_operators_of_a_model_are_read(name: str, field: str, value: object) -> None:
    found: Any = model_of(name)
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value


def test_the_inner_config_of_a_wrapper_decides(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        large = model_of("mistral-large-3")
        towers: dict[str, Any] = {"audio_config": {"d_model": 8}, "encoder_config": {"num_layers": 16}}
        from_config(ENTRIES["mistral-large-3"]["config"] | towers, "x/config.json")
    assert large.mla is not None
    assert large.vision is not None
    assert "x/config.json: audio and encoder left out: only the language model is planned" in caplog.text
    dense = {"model_type": "mistral3", "text_config": {"num_hidden_layers": 2}, "vision_config": {}}
    assert from_config(dense, "x").mla is None


@pytest.mark.parametrize("kind", ["Dots1", "GRANITEMOEHYBRID", "Qwen3-Next"])
def test_a_name_is_read_in_any_case(kind: str) -> None:
    given = {"n_routed_experts": 8, "num_experts_per_tok": 2} if kind == "Dots1" else {}
    assert from_config({"model_type": kind, **given}, "x").moe is not None


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_refusal_says_why(kind: str) -> None:
    with refused(f"config.json: model_type: {kind!r} has {REFUSED[kind]}"):
        from_config({"model_type": kind}, "config.json")
    assert kind not in ARCHITECTURES
    assert kind not in WRAPPERS


def test_sections_of_mixers_that_no_layer_has_are_left_out() -> None:
    plain = model_of("granite-4.0-h-micro", layer_types=["attention"] * 40, position_embedding_type="rope")
    assert (plain.mamba, plain.layer_types, plain.position_embedding) == (None, ("full",), "rope")


@pytest.mark.parametrize(
    ("name", "changes", "more"),
    [
        # two of 32 layers' projections to keys and values less; weights of two norms a layer; both with biases
        ("hunyuan-a13b", {"use_cla": True}, -16 * (2 * 8 * 128 * 4096 + 128)),
        ("mpt-7b", {"attn_config": {"qk_ln": True}}, 32 * 2 * 4096),
        ("phi-2", {"qk_layernorm": True}, 32 * 4 * 80),
    ],
)
def test_norms_and_shared_keys_count(name: str, changes: dict[str, Any], more: int) -> None:
    assert count(model_of(name, **changes)) - count(model_of(name)) == more


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        *CASES["a_wrong_or_unknown_value_is_named"],
        ("qwen3-next-80b-a3b", {"layer_types": ["conv"] * 48}, "layer_types: 'conv' is none of"),
    ],
)
def test_a_wrong_or_unknown_value_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with refused(f"{name}/config.json: {message}"):
        model_of(name, **changes)


@pytest.mark.parametrize("value", [None, True, -1, 0, 2.5, "text", [], {}, float("nan"), 10**30])
@pytest.mark.parametrize("name", CASES["no_value_under_any_key_is_a_crash_1"])
def test_no_value_under_any_key_is_a_crash(name: str, value: object) -> None:
    config = ENTRIES[name]["config"]
    for key in config.get("text_config", config):
        try:
            model = model_of(name, **{key: value})
        except SpecError:
            continue
        assert model.num_hidden_layers > 0
