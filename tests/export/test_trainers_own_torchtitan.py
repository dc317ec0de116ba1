"""The model of an exported recipe is the one of torchtitan's own registry, but for differences with a reason.

Exported arguments of a model are those of Megatron-LM's own recipes for it, but for differences with a reason.
The fields of an exported model are those of Megatron-Bridge's own providers, but for differences with a reason.
Optimizer, schedule and dtypes of an export are the recipes' of its trainer, but for differences with a reason.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import types
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from samples import differences
from tables import beside

from planner.answer import Plan
from planner.export.export import bundle_of
from planner.export.megatron.bridge_files import flag_fields, model_overrides
from planner.export.megatron.model_options import MODEL_OPTIONS, model_arguments
from planner.export.megatron.option_rows import BRIDGE, layer_flags, options_of
from planner.export.run_settings import listed
from planner.export.torchtitan_files import model_source
from planner.export.trainer_files import argv, settings
from planner.specs.registry import load_model
from planner.trainers.rules.facts import family_of, is_gpt_oss

TABLES = beside(__file__)

OWN = json.loads((Path(__file__).parent / "trainers_own" / "torchtitan.json").read_text())
DIFFERENCES = differences("torchtitan")
"""Model and field to the reason why its value is not the registry's."""
ROPE = {"scaling": "none"}
LLAMA = TABLES["llama"]
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
        "torchtitan.models.common", "torchtitan.models.common.config_utils", "torchtitan.models.common.param_init",
    )  # fmt: skip
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
        "dim": config.dim, "vocab_size": config.vocab_size, "n_layers": len(layers),
        "enable_weight_tying": config.enable_weight_tying, "norm_eps": config.norm.eps,
        "attention": attention_of(layers[0].attention), "num_dense": len(dense),
        "ffn": dense[0].feed_forward.hidden_dim if dense else None,
        "moe": moe_of(experts[-1].moe) if experts else None,
    }  # fmt: skip


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
        "num_limited_groups": getattr(router, "num_limited_groups", None), "bias": getattr(router, "bias", False),
        "hidden_dim": moe.routed_experts.hidden_dim, "load_balance_coeff": moe.load_balance_coeff,
        "shared": None if moe.shared_experts is None else moe.shared_experts.hidden_dim,
    }  # fmt: skip


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


OWN_OF_TRAINERS_OWN_MEGATRON = json.loads((Path(__file__).parent / "trainers_own" / "megatron.json").read_text())
LEFT_OUT = {"--max-position-embeddings", "--vocab-size", "--padded-vocab-size"}
"""The sequence's length, and the vocabulary, which the tokenizer of a recipe brings."""
OLDER = {"--use-rotary-position-embeddings": ("--position-embedding-type", "rope"), "--no-position-embedding": None}
DEFAULTS: dict[str, Any] = TABLES["defaults"]
"""Megatron-LM's values of options that are left out (core 0.20.0)."""

DIFFERENCES_OF_TRAINERS_OWN_MEGATRON = differences("megatron")
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


def own_settings(arguments: dict[str, Any], num_layers: int) -> dict[str, Any]:
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
    ours = own_settings({option: " ".join(values) or True for option, values in words.items()}, model.num_hidden_layers)
    theirs = own_settings(recipe["arguments"], model.num_hidden_layers)
    return {name: (ours[name], theirs[name]) for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}


OWN_OF_TRAINERS_OWN_BRIDGE = json.loads((Path(__file__).parent / "trainers_own" / "bridge.json").read_text())
_FP32 = "routing in fp32, as recipes of larger mixtures have it"
DIFFERENCES_OF_TRAINERS_OWN_BRIDGE = differences("bridge")
"""Model and field to the reason why its value is not the provider's."""


def exported(name: str) -> dict[str, Any]:
    """The provider's fields after the overrides of an export, beside those that the recipe has."""
    model = load_model(name)
    fields = dict(OWN_OF_TRAINERS_OWN_BRIDGE["defaults"][family_of(model)])
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


def differing_of_trainers_own_bridge(recipe: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    ours, theirs = exported(recipe["model"]), recipe["fields"]
    return {name: (ours[name], theirs[name]) for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}


BOTH = [
    (OWN_OF_TRAINERS_OWN_MEGATRON["recipes"], differing, DIFFERENCES_OF_TRAINERS_OWN_MEGATRON),
    (OWN_OF_TRAINERS_OWN_BRIDGE["recipes"], differing_of_trainers_own_bridge, DIFFERENCES_OF_TRAINERS_OWN_BRIDGE),
]


@pytest.mark.parametrize(("recipes", "differs", "reasons"), BOTH, ids=["arguments", "fields"])
def test_values_are_those_of_the_recipes_but_for_reasons_that_hold(recipes: Any, differs: Any, reasons: Any) -> None:
    """No value differs without a reason, and no reason stands for a difference that is gone."""
    found = {(recipe["model"], name): pair for recipe in recipes for name, pair in differs(recipe).items()}
    assert {key: pair for key, pair in found.items() if key not in reasons} == {}
    assert reasons.keys() - found.keys() == set()


Planned = Callable[..., Plan]
OWN_OF_TRAINERS_OWN_RUNS = json.loads((Path(__file__).parent / "trainers_own" / "runs.json").read_text())
CASES = [(trainer, recipe) for trainer, part in OWN_OF_TRAINERS_OWN_RUNS.items() for recipe in part["recipes"]]
UNASKED = {
    **{f"optimizer.{name}_dtype": "float32" for name in ("exp_avg", "exp_avg_sq", "main_grads", "main_params")},
    "optimizer.use_precision_aware_optimizer": False, "ddp.average_in_collective": False,
}  # fmt: skip
"""Bridge's values of fields that a recipe leaves out."""

_PUBLISHED = "as the model was published (training.optimizer of its spec)"
_BY_SIZE = "nothing is published with AdamW: Llama 3's rates by size and warm-up, where recipes have one for all models"
_MOMENTS = "moments and gradients in 16 bits are the plan's choice (bf16_moments, bf16_gradients)"
_OF_RATE = r"optimizer.(lr|min_lr)|scheduler.lr_.*"
_WITH_OPTIMIZER = "llama-3.1-*|llama-2-*|deepseek-*|gpt3-*"
DIFFERENCES_OF_TRAINERS_OWN_RUNS = (
    ("bridge", "*", r"scheduler.(start|end)_weight_decay", "0.033 would stand in for the optimizer's own 0.1"),
    ("bridge", "*", r"ddp.average_in_collective", "divided before the sum, as Megatron-LM does: in fp32 the same"),
    ("bridge", _WITH_OPTIMIZER, rf"{_OF_RATE}|optimizer.adam_eps", _PUBLISHED),
    ("bridge", "glm-*|kimi-*|qwen*", _OF_RATE, _BY_SIZE),
    ("bridge", "deepseek-v3|moonlight-*", r"optimizer\.(use_pre|exp_avg|main_grads).*|grad_reduce_in_fp32", _MOMENTS),
    ("bridge", "gpt3-*", r"grad_reduce_in_fp32", _MOMENTS),
    ("bridge", "kimi-*", r"optimizer.optimizer", "Muon is the plan's choice (optimizer=muon)"),
    ("bridge", "deepseek-v3|moonlight-*|kimi-*", r"train.manual_gc_interval", "100 steps, as in all other recipes"),
    ("torchtitan", "llama-3.1-*|deepseek-*", r"lr|warmup_steps|decay_.*|min_lr_factor", _PUBLISHED),
    ("torchtitan", "gpt-oss-*|qwen3-*", r"lr|warmup_steps|decay_.*|min_lr_factor", _BY_SIZE),
    ("megatron", "llama-3.1-*|deepseek-*", r"--(min-)?lr|--lr-decay-style|--init-method-std", _PUBLISHED),
    ("megatron", "gpt-oss-*|mixtral-*", r"--(min-)?lr|--lr-warmup-iters", _BY_SIZE),
    ("megatron", "gpt3-*|mixtral-*", r"--init-method-std", "not published: 0.02, as in GPT-2 and in config.json"),
)  # fmt: skip
"""Trainer, models and fields whose value is not the recipe's, and the reason."""


def of_bridge(plan: Plan) -> dict[str, Any]:
    """The fields of a recipe of Bridge after the overrides of an export."""
    data = json.loads(bundle_of(plan, "bridge").files[0].text)
    words = dict(word.split("=", 1) for word in [*data["overrides"], *data["training_run"]])
    fields = UNASKED | OWN_OF_TRAINERS_OWN_RUNS["bridge"]["bases"][data["recipe"]]
    fields |= {path: json.loads(text) for path, text in words.items() if not text.startswith("{")}
    precision = words.get("mixed_precision") or f"grad_reduce_in_fp32:{words['mixed_precision.grad_reduce_in_fp32']}"
    return fields | {"grad_reduce_in_fp32": "grad_reduce_in_fp32:true" in precision}


def of_torchtitan(plan: Plan) -> dict[str, Any]:
    """The keywords of the optimizer's and the scheduler's calls in a recipe, and the norm of gradients."""
    source = bundle_of(plan, "torchtitan").files[0].text
    calls = {ast.unparse(node.func): node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
    called = [calls["default_adamw"], calls["LRSchedulersContainer.Config"]]
    fields = {str(word.arg): ast.literal_eval(word.value) for call in called for word in call.keywords}
    return fields | {"max_norm": float(re.findall(r"max_norm=([\d.]+)", source)[0])}


def of_megatron(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(bundle_of(plan, "megatron").files[0].text)["MODEL_ARGS"]
    return found


EXPORTED = {"bridge": of_bridge, "torchtitan": of_torchtitan, "megatron": of_megatron}


def number(value: Any) -> Any:
    """The number that a text or a float is; other values as they are."""
    if isinstance(value, tuple):
        return list(value)
    try:
        return value if isinstance(value, (bool, list)) else float(value)
    except (TypeError, ValueError):
        return value


def differing_of_trainers_own_runs(
    planned: Planned, trainer: str, recipe: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    ours, theirs = EXPORTED[trainer](planned(recipe["model"], 64, runtime=trainer)), recipe["fields"]
    pairs = {name: (number(ours.get(name)), number(value)) for name, value in theirs.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def reasons(trainer: str, model: str, field: str) -> set[tuple[str, ...]]:
    """The rows that explain a difference."""
    return {
        row for row in DIFFERENCES_OF_TRAINERS_OWN_RUNS
        if row[0] == trainer and any(fnmatch(model, name) for name in row[1].split("|")) and re.fullmatch(row[2], field)
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(planned: Planned) -> list[tuple[str, str, str, tuple[Any, Any]]]:
    """Every difference: trainer, model, field, our value and theirs."""
    rows = [
        (trainer, recipe["model"], differing_of_trainers_own_runs(planned, trainer, recipe))
        for trainer, recipe in CASES
    ]
    return [(trainer, model, field, pair) for trainer, model, pairs in rows for field, pair in pairs.items()]


def test_a_run_is_set_as_recipes_set_it_or_a_row_says_why_not(found: list[tuple[str, str, str, Any]]) -> None:
    assert len({recipe["model"] for _, recipe in CASES}) >= 12
    assert [row for row in found if not reasons(*row[:3])] == []


def test_every_row_explains_a_difference(found: list[tuple[str, str, str, Any]]) -> None:
    used = {reason for row in found for reason in reasons(*row[:3])}
    assert set(DIFFERENCES_OF_TRAINERS_OWN_RUNS) - used == set()
