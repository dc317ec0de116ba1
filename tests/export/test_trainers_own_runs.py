"""Optimizer, schedule and dtypes of an export are the recipes' of its trainer, but for differences with a reason."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.answer import Plan
from planner.export.export import bundle_of

Planned = Callable[..., Plan]
OWN = json.loads((Path(__file__).parent / "trainers_own" / "runs.json").read_text())
CASES = [(trainer, recipe) for trainer, part in OWN.items() for recipe in part["recipes"]]
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
DIFFERENCES = (
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
    fields = UNASKED | OWN["bridge"]["bases"][data["recipe"]]
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


def differing(planned: Planned, trainer: str, recipe: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    ours, theirs = EXPORTED[trainer](planned(recipe["model"], 64, runtime=trainer)), recipe["fields"]
    pairs = {name: (number(ours.get(name)), number(value)) for name, value in theirs.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def reasons(trainer: str, model: str, field: str) -> set[tuple[str, ...]]:
    """The rows that explain a difference."""
    return {
        row for row in DIFFERENCES
        if row[0] == trainer and any(fnmatch(model, name) for name in row[1].split("|")) and re.fullmatch(row[2], field)
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(planned: Planned) -> list[tuple[str, str, str, tuple[Any, Any]]]:
    """Every difference: trainer, model, field, our value and theirs."""
    rows = [(trainer, recipe["model"], differing(planned, trainer, recipe)) for trainer, recipe in CASES]
    return [(trainer, model, field, pair) for trainer, model, pairs in rows for field, pair in pairs.items()]


def test_a_run_is_set_as_recipes_set_it_or_a_row_says_why_not(found: list[tuple[str, str, str, Any]]) -> None:
    assert len({recipe["model"] for _, recipe in CASES}) >= 12
    assert [row for row in found if not reasons(*row[:3])] == []


def test_every_row_explains_a_difference(found: list[tuple[str, str, str, Any]]) -> None:
    used = {reason for row in found for reason in reasons(*row[:3])}
    assert set(DIFFERENCES) - used == set()
