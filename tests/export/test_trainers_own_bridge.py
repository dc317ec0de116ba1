"""The fields of an exported model are those of Megatron-Bridge's own providers, but for differences with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.export.megatron.bridge_files import flag_fields, model_overrides
from planner.export.megatron.model_options import model_arguments
from planner.export.megatron.option_rows import BRIDGE
from planner.export.run_settings import listed
from planner.export.trainer_files import settings
from planner.specs.registry import load_model
from planner.trainers.rules.facts import family_of

OWN = json.loads((Path(__file__).parent / "trainers_own" / "bridge.json").read_text())
_ONE_GROUP = "one group of all experts is no group"
_DENSE = "no layer is dense, and the width of dense layers not read"
_FP32 = "routing in fp32, as recipes of larger mixtures have it"
DIFFERENCES: dict[tuple[str, str], str] = {
    **{
        (f"deepseek-{version}", "kv_channels"): "latent attention does not read it"
        for version in ("v3", "v2", "v2-lite")
    },
    ("deepseek-v3", "mtp_loss_scaling_factor"): "0.3 for the first 10T tokens (arXiv:2412.19437, section 4.2)",
    **{
        (model, field): _ONE_GROUP
        for model in ("deepseek-v2-lite", "moonlight-16b", "glm-4.5", "glm-4.5-air")
        for field in ("moe_router_num_groups", "moe_router_group_topk")
    },
    ("moonlight-16b", "kv_channels"): "latent attention does not read it",
    ("moonlight-16b", "mscale_all_dim"): "a factor of 1 stretches nothing, whatever its weights",
    **{
        (model, "moe_router_topk_scaling_factor"): "a factor of 1 scales nothing"
        for model in ("glm-4.5-air", "deepseek-v2-lite")
    },
    **{
        (model, "moe_router_pre_softmax"): "scores of a sigmoid are the same before and after the choice"
        for model in ("deepseek-v3", "moonlight-16b")
    },
    **{
        (model, field): reason
        for model in ("glm-4.5", "glm-4.5-air")
        for field, reason in (
            ("moe_router_bias_update_rate", "0.001 for the first 15T tokens, 0 after (arXiv:2508.06471, section 2.4)"),
            ("moe_aux_loss_coeff", "0.0001 (arXiv:2508.06471, section 2.4)"),
        )
    },
    **{
        (model, field): reason
        for model in ("gpt-oss-20b", "gpt-oss-120b")
        for field, reason in (
            ("moe_router_dtype", _FP32),
            ("add_qkv_bias", "all linear layers have biases, those of attention too"),
            ("moe_router_load_balancing_type", "without a loss nothing balances a training from scratch"),
            ("moe_aux_loss_coeff", "0.9 of config.json is of no training that was published"),
        )
    },
    ("llama-2-7b", "num_query_groups"): "as many groups as heads, which is the default",
    **{
        (model, field): reason
        for model in ("qwen3-30b-a3b", "qwen3-235b-a22b")
        for field, reason in (("ffn_hidden_size", _DENSE), ("moe_router_dtype", _FP32))
    },
    ("gpt3-175b", "kv_channels"): "hidden_size over heads, which is the default",
    ("gpt3-175b", "layernorm_zero_centered_gamma"): "norms of GPT-3 multiply by their weight",
}
"""Model and field to the reason why its value is not the provider's."""


def exported(name: str) -> dict[str, Any]:
    """The provider's fields after the overrides of an export, beside those that the recipe has."""
    model = load_model(name)
    fields = dict(OWN["defaults"][family_of(model)])
    if family_of(model) == "mla":
        fields |= {path.removeprefix("model."): value for path, value in settings("bridge-unasked-latent").items()}
    arguments = model_arguments(model, 4096, 128)
    fields |= {BRIDGE[option].removeprefix("model."): value for option, value in arguments.items() if option in BRIDGE}
    flags = flag_fields(arguments)
    fields |= {path.removeprefix("model."): flags[path] for path in flags if path.startswith("model.")}
    fields |= {path.removeprefix("model."): value for path, value in model_overrides(model, True).items()}
    pattern = fields.get("moe_layer_freq")
    if isinstance(pattern, list):
        fields["moe_layer_freq"] = 1 if all(pattern) else listed(map(bool, pattern))
    return fields


def differing(recipe: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    ours, theirs = exported(recipe["model"]), recipe["fields"]
    return {name: (ours[name], theirs[name]) for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}


@pytest.mark.parametrize("recipe", OWN["recipes"], ids=lambda recipe: recipe["model"])
def test_fields_are_those_of_the_provider(recipe: dict[str, Any]) -> None:
    found = differing(recipe)
    assert {name: pair for name, pair in found.items() if (recipe["model"], name) not in DIFFERENCES} == {}


def test_every_difference_is_one() -> None:
    """No reason stands for a difference that is gone."""
    found = {(recipe["model"], name) for recipe in OWN["recipes"] for name in differing(recipe)}
    assert DIFFERENCES.keys() - found == set()
