"""The model of an exported recipe is the one of torchtitan's own registry, but for differences with a reason."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samples import differences

from planner.export.torchtitan_files import model_source
from planner.specs.registry import load_model
from planner.trainers.rules.facts import is_gpt_oss

OWN = json.loads((Path(__file__).parent / "trainers_own" / "torchtitan.json").read_text())
DIFFERENCES = differences("torchtitan")
"""Model and field to the reason why its value is not the registry's."""
ROPE = {"scaling": "none"}
LLAMA = {
    "scaling_factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "original_seq_len": 4096, "truncate": True}


class Recorder:
    """A class or function of torchtitan that keeps what it is called with."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Recorder:
        return self if name == "Config" else Recorder(f"{self.name}.{name}")

    def __call__(self, *values: Any, **fields: Any) -> SimpleNamespace:
        return SimpleNamespace(kind=self.name, **fields)


class Library(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(name)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of which every name is a recorder, in place of torch and torchtitan."""
    for family in ("llama3", "qwen3", "deepseek_v3"):
        for name in (f"torchtitan.models.{family}", f"torchtitan.models.{family}.model"):
            monkeypatch.setitem(sys.modules, name, Library(name))
    common = (
        "torchtitan.models.common",
        "torchtitan.models.common.config_utils",
        "torchtitan.models.common.param_init",
    )
    for name in ("torch", "torchtitan", "torchtitan.models", *common):
        monkeypatch.setitem(sys.modules, name, Library(name))


def built(name: str) -> SimpleNamespace:
    """The configuration that the recipe's functions build."""
    imports, source = model_source(load_model(name), 4096, "flex")
    names: dict[str, Any] = {}
    exec("\n".join([*imports, source]), names)
    names["names"] = lambda config: {"max_context_length"}
    names["replace"] = lambda spec, **fields: fields["model"]
    config = names["model_spec"]()
    assert isinstance(config, SimpleNamespace)
    return config


def facts_of(config: SimpleNamespace) -> dict[str, Any]:
    layers = config.layers
    dense = [layer for layer in layers if getattr(layer, "feed_forward", None) is not None]
    experts = [layer for layer in layers if getattr(layer, "moe", None) is not None]
    return {
        "dim": config.dim,
        "vocab_size": config.vocab_size,
        "n_layers": len(layers),
        "enable_weight_tying": config.enable_weight_tying,
        "norm_eps": config.norm.eps,
        "attention": attention_of(layers[0].attention),
        "num_dense": len(dense),
        "ffn": dense[0].feed_forward.hidden_dim if dense else None,
        "moe": moe_of(experts[-1].moe) if experts else None,
    }


def attention_of(attention: SimpleNamespace) -> dict[str, Any]:
    given = {name: value for name, value in vars(attention.rope).items() if name not in ("kind", "dim")}
    given.pop("max_context_length")
    usual = {"llama": LLAMA, "yarn": YARN}.get(given.get("scaling", ""), {})
    rope = {**ROPE, **usual, **given}
    if hasattr(attention, "kv_lora_rank"):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mscale")
        return {"n_heads": attention.n_heads, "rope": rope, **{name: getattr(attention, name) for name in names}}
    names = ("n_heads", "n_kv_heads", "head_dim")
    return {"rope": rope, "qk_norm": attention.qk_norm is not None, **{n: getattr(attention, n) for n in names}}


def moe_of(moe: SimpleNamespace) -> dict[str, Any]:
    router = moe.router
    names = ("num_experts", "top_k", "score_func", "route_norm", "route_scale")
    return {
        **{name: getattr(router, name) for name in names},
        "num_expert_groups": getattr(router, "num_expert_groups", None),
        "num_limited_groups": getattr(router, "num_limited_groups", None),
        "bias": getattr(router, "bias", False),
        "hidden_dim": moe.routed_experts.hidden_dim,
        "load_balance_coeff": moe.load_balance_coeff,
        "shared": None if moe.shared_experts is None else moe.shared_experts.hidden_dim,
    }


def flat(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, value in facts.items():
        rows |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return rows


RECIPES = [recipe for recipe in OWN["recipes"] if recipe["flavor"][0] != "gpt_oss"]


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe["model"])
def test_the_recipe_builds_what_the_registry_does(recipe: dict[str, Any]) -> None:
    name, ours, theirs = recipe["model"], flat(facts_of(built(recipe["model"]))), flat(recipe["facts"])
    assert ours.keys() == theirs.keys()
    found = {field for field in ours if ours[field] != theirs[field]}
    assert found == {field for model, field in DIFFERENCES if model == name}


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_models_that_are_taken_from_the_registry(name: str) -> None:
    """The exporter names the registry's gpt-oss, so that the registry's numbers must be the model's."""
    model = load_model(name)
    facts = next(recipe["facts"] for recipe in OWN["recipes"] if recipe["model"] == name)
    assert is_gpt_oss(model)
    assert model.moe is not None
    assert model.rope_scaling is not None
    rope, moe = facts["attention"]["rope"], facts["moe"]
    assert (rope["theta"], rope["rope_factor"]) == (model.rope_theta, model.rope_scaling.factor)
    assert rope["original_seq_len"] == model.rope_scaling.original_max_position_embeddings
    assert (rope["beta_fast"], rope["beta_slow"], rope["truncate"]) == (32.0, 1.0, model.rope_scaling.truncate)
    assert (moe["top_k"], moe["swiglu_limit"]) == (model.moe.num_experts_per_tok, model.swiglu_limit)
    assert (facts["norm_eps"], facts["n_layers"]) == (model.norm_eps, model.num_hidden_layers)
