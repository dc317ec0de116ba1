"""The fields of an exported model are those of Megatron-Bridge's own providers, but for differences with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from samples import differences

from planner.export.megatron.bridge_files import flag_fields, model_overrides
from planner.export.megatron.model_options import model_arguments
from planner.export.megatron.option_rows import BRIDGE
from planner.export.run_settings import listed
from planner.export.trainer_files import settings
from planner.specs.registry import load_model
from planner.trainers.rules.facts import family_of

OWN = json.loads((Path(__file__).parent / "trainers_own" / "bridge.json").read_text())
_FP32 = "routing in fp32, as recipes of larger mixtures have it"
DIFFERENCES = differences("bridge")
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
