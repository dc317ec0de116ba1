"""Parameters of every shipped model: published totals to the digit, formulas and rounded totals of papers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.physics.layers import model_totals
from planner.specs.architectures import from_config
from planner.specs.registry import load_model, model_names
from planner.specs.shipped import find, lines
from planner.trainers.load import load_runtime

TABLES = yaml.safe_load((Path(__file__).parent / "counts.yaml").read_text())
PUBLISHED: dict[str, int] = TABLES["published"]
PUBLISHED_CONFIGS: dict[str, dict[str, Any]] = {
    entry["name"]: entry for entry in json.loads((Path(__file__).parent / "published.json").read_text())
}
UNCOMMON = set(model_names()) & set(PUBLISHED_CONFIGS) - set(PUBLISHED)
"""Models that are held against their published config, and against the count of transformers."""
LINES: dict[str, int] = TABLES["lines"]
OF_ANOTHER_SIZE = set(TABLES["of_another_size"])
ROUNDED: dict[str, tuple[float, int]] = TABLES["rounded"]
ACTIVE: dict[str, tuple[float, int, int]] = TABLES["active"]


def totals_of(name: str) -> Any:
    return model_totals(load_model(name), load_runtime("torch-eager"), seq_length=2048)


def test_every_shipped_model_has_a_published_count() -> None:
    assert set(model_names()) == set(PUBLISHED) | set(ROUNDED) | UNCOMMON


@pytest.mark.parametrize("name", sorted(UNCOMMON))
def test_a_model_of_uncommon_layers_is_that_of_its_published_config(name: str) -> None:
    """Held against transformers' counts, and field by field against the config."""
    entry = PUBLISHED_CONFIGS[name]
    own, theirs = load_model(name), from_config(entry["config"], "config.json")
    assert totals_of(name).num_parameters == entry["parameters"]
    other = {"name", "aliases", "source", "training", "intermediate_size", "vision"}
    assert own.model_dump(exclude=other) == theirs.model_dump(exclude=other)


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_equal_the_published_ones_to_the_digit(name: str) -> None:
    assert totals_of(name).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_totals_equal_the_rounded_ones_of_the_papers(name: str) -> None:
    billions, decimals = ROUNDED[name]
    assert round(totals_of(name).num_parameters / 1e9, decimals) == billions


@pytest.mark.parametrize("name", ["megatron-18.4b", "gpt3-175b", "megatron-1t"])
def test_gpt_models_follow_the_formula_of_the_megatron_paper(name: str) -> None:
    """SC'21, equation 2: P = 12·l·h²·(1 + 13/(12·h) + (V + s)/(12·l·h)), to which the final norm adds 2·h."""
    model = load_model(name)
    layers, hidden, vocab, positions = model.num_hidden_layers, model.hidden_size, model.vocab_size, 2048
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + positions) * hidden
    assert totals_of(name).num_parameters == formula + 2 * hidden


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_round_to_the_published_ones(name: str) -> None:
    billions, decimals, left_out = ACTIVE[name]
    model = load_model(name)
    active = totals_of(name).num_active_parameters - left_out * model.vocab_size * model.hidden_size
    assert round(active / 1e9, decimals) == billions


@pytest.mark.parametrize("name", lines())
def test_a_model_of_a_line_has_the_size_in_its_name_and_the_count_of_its_config(name: str) -> None:
    total = totals_of(name).num_parameters
    assert total == PUBLISHED_CONFIGS.get(name, {"parameters": LINES.get(name, total)})["parameters"]
    stated = re.search(r"(?<![a-z\d.])(\d+(?:\.\d+)?)([bmt])(?=\d?(?:-|$))", name)
    if stated is not None and name not in OF_ANOTHER_SIZE:
        assert total == pytest.approx(float(stated[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[stated[2]], rel=0.26)
    found = find("model", load_model(name).source.removeprefix("config.json of "))
    assert found is not None
    assert found.name == name
