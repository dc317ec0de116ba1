"""Exported arguments of a model are those of Megatron-LM's own recipes for it, but for differences with a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from samples import differences

from planner.export.megatron.model_options import MODEL_OPTIONS, model_arguments
from planner.export.megatron.option_rows import layer_flags, options_of
from planner.export.trainer_files import argv
from planner.specs.registry import load_model

OWN = json.loads((Path(__file__).parent / "trainers_own" / "megatron.json").read_text())
LEFT_OUT = {"--max-position-embeddings", "--vocab-size", "--padded-vocab-size"}
"""The sequence's length, and the vocabulary, which the tokenizer of a recipe brings."""
OLDER = {"--use-rotary-position-embeddings": ("--position-embedding-type", "rope"), "--no-position-embedding": None}
DEFAULTS: dict[str, Any] = {
    "--norm-epsilon": 1e-5, "--rotary-base": 10_000, "--rotary-percent": 1, "--rotary-scaling-factor": 1,
    "--rotary-seq-len-interpolation-factor": 1, "--mscale": 1, "--mscale-all-dim": 0, "--rope-scaling-factor": 8,
    "--moe-router-score-function": "softmax", "--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 0,
    "--moe-router-bias-update-rate": 1e-3, "--moe-router-topk-scaling-factor": 1, "--moe-layer-freq": 1,
    "--normalization": "LayerNorm", "--mtp-loss-scaling-factor": 0.1, "--softmax-type": "vanilla",
    "--position-embedding-type": "learned_absolute", "--moe-router-topk": 2,
}  # fmt: skip
"""Megatron-LM's values of options that are left out (core 0.20.0)."""

DIFFERENCES = differences("megatron")
"""Model and option to the reason why its value is not the recipe's."""


def plain(option: str, value: Any, num_layers: int) -> Any:
    """A value to compare: number, list of layers, pair or word."""
    if value is True or isinstance(value, (int, float)):
        return value
    text = str(value).strip('"')
    if "[" in text:
        return layer_flags(option, text, num_layers)
    if option == "--moe-layer-freq":
        return [layer % int(text) == 0 for layer in range(num_layers)]
    if option == "--window-size":
        return re.findall(r"\d+", text)
    try:
        return float(text)
    except ValueError:
        return text


def settings(arguments: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Every option of a model with its value, or Megatron-LM's own."""
    known = {**dict.fromkeys(sorted(MODEL_OPTIONS - LEFT_OUT), False), **DEFAULTS}
    for option, value in arguments.items():
        newer = OLDER.get(option, (option, value))
        if newer is not None and option not in LEFT_OUT:
            known[newer[0]] = newer[1]
    sizes = {name: int(float(known[f"--{name}"])) for name in ("hidden-size", "num-attention-heads")}
    known["--ffn-hidden-size"] = known["--ffn-hidden-size"] or 4 * sizes["hidden-size"]
    known["--kv-channels"] = known["--kv-channels"] or sizes["hidden-size"] // sizes["num-attention-heads"]
    if known["--num-experts"]:
        known["--moe-ffn-hidden-size"] = known["--moe-ffn-hidden-size"] or known["--ffn-hidden-size"]
    known["--moe-layer-freq"] = str(known["--moe-layer-freq"])
    return {option: plain(option, value, num_layers) for option, value in known.items() if option not in OLDER}


def differing(recipe: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options of the recipe whose value is another one in ours."""
    model = load_model(recipe["model"])
    words = options_of(argv(model_arguments(model, 4096, 128)))
    ours = settings({option: " ".join(values) or True for option, values in words.items()}, model.num_hidden_layers)
    theirs = settings(recipe["arguments"], model.num_hidden_layers)
    return {name: (ours[name], theirs[name]) for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}


@pytest.mark.parametrize("recipe", OWN["recipes"], ids=lambda recipe: f"{recipe['model']}-{recipe['path'][-30:]}")
def test_arguments_are_those_of_the_recipe(recipe: dict[str, Any]) -> None:
    found = differing(recipe)
    assert {name: pair for name, pair in found.items() if (recipe["model"], name) not in DIFFERENCES} == {}


def test_every_difference_is_one() -> None:
    """No reason stands for a difference that is gone."""
    found = {(recipe["model"], name) for recipe in OWN["recipes"] for name in differing(recipe)}
    assert DIFFERENCES.keys() - found == set()
