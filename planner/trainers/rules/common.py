"""Rules: each says whether a trainer takes a shape and, if not, why and with which numbers.

The conditions are plain arithmetic on a `Shape`, so one call judges one shape or an array of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.rules.facts import original_length


@dataclass(frozen=True, slots=True)
class Rule:
    """One hard constraint of a trainer."""

    reason: str
    """Short name for counts of rejections."""
    holds: Callable[[ModelSpec, TrainingSpec, Shape], Any]
    """True where the shape is legal: a bool, or an array of them; written with `&` and `|`, which arrays know."""
    message: Callable[[ModelSpec, TrainingSpec, Shape], str]
    """A sentence that says why one shape is illegal, with its numbers."""
    stretches: Callable[[ModelSpec], str | None] | None = None
    """For rules about stretched rotary frequencies: why the model's are refused, however long sequences are."""


def model_rule(reason: str, wrong: Callable[[ModelSpec], bool], message: Callable[[ModelSpec], str]) -> Rule:
    """A rule about the model alone, whatever training and layout are."""
    return Rule(reason, lambda model, training, shape: not wrong(model), lambda model, training, shape: message(model))


def stretch_rule(broken: Callable[[ModelSpec], str | None]) -> Rule:
    """A rule about stretched rotary frequencies; `broken` gives the reason why a model's are refused, or None.

    It binds where sequences are longer than those that the model was trained on before its positions were stretched.
    Shorter ones are trained with the frequencies of that time.
    """
    return Rule(
        "rope_scaling",
        lambda model, training, shape: training.seq_length <= original_length(model) or broken(model) is None,
        lambda model, training, shape: broken(model) or "",
        stretches=broken,
    )


def release(version: str) -> tuple[int, ...]:
    """Major and minor of a version, to compare: 0.9 comes before 0.14."""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return tuple(numbers)


BF16_ONLY = Rule(
    "dtype",
    lambda model, training, shape: training.dtype == "bf16",
    lambda model, training, shape: f"{training.dtype} is not exported, only bf16",
)
"""The rule of targets whose recipes know one precision."""


def first_broken(rules: Iterable[Rule], model: ModelSpec, training: TrainingSpec, shape: Shape) -> Rule | None:
    """The first rule that one shape (no arrays) breaks, or None."""
    return next((rule for rule in rules if not rule.holds(model, training, shape)), None)


def no_multiple(name: str, value: Any, axis: str, size: Any) -> str:
    """`name value is no multiple of axis size`."""
    return f"{name} {value} is no multiple of {axis} {size}"


def has_dense_layers(model: ModelSpec) -> bool:
    """True where any decoder layer has a dense MLP."""
    return any(kind.mlp == "dense" for kind in model.layers)


def expert_width(model: ModelSpec) -> int:
    """Width of a routed expert; 0 where there are none."""
    return 0 if model.moe is None else model.moe.moe_intermediate_size


def shared_expert_width(model: ModelSpec) -> int:
    """Width of the shared experts; 0 where there are none."""
    return 0 if model.moe is None else model.moe.shared_expert_intermediate_size


HEADS = Rule(
    "heads_not_divisible_by_tp",
    lambda model, training, shape: model.num_attention_heads % shape.tp == 0,
    lambda model, training, shape: no_multiple("num_attention_heads", model.num_attention_heads, "tp", shape.tp),
)
DENSE_WIDTH = Rule(
    "intermediate_size_not_divisible_by_tp",
    lambda model, training, shape: (not has_dense_layers(model)) | ((model.intermediate_size or 0) % shape.tp == 0),
    lambda model, training, shape: no_multiple("intermediate_size", model.intermediate_size, "tp", shape.tp),
)
SHARED_EXPERT_WIDTH = Rule(
    "shared_expert_not_divisible_by_tp",
    lambda model, training, shape: shared_expert_width(model) % shape.tp == 0,
    lambda model, training, shape: no_multiple(
        "shared_expert_intermediate_size", shared_expert_width(model), "tp", shape.tp
    ),
)
EXPERT_WIDTH = Rule(
    "moe_intermediate_size_not_divisible_by_etp",
    lambda model, training, shape: expert_width(model) % shape.etp == 0,
    lambda model, training, shape: no_multiple("moe_intermediate_size", expert_width(model), "etp", shape.etp),
)
EXPERTS = Rule(
    "experts_not_divisible_by_ep",
    lambda model, training, shape: (shape.ep == 1) | (model.moe is not None and model.moe.num_experts % shape.ep == 0),
    lambda model, training, shape: (
        f"ep {shape.ep} needs experts, the model has none"
        if model.moe is None
        else no_multiple("num_experts", model.moe.num_experts, "ep", shape.ep)
    ),
)
ETP = Rule(
    "etp_without_experts",
    lambda model, training, shape: (model.moe is not None) | (shape.etp == 1) | (shape.etp == shape.tp),
    lambda model, training, shape: f"etp {shape.etp} needs experts, the model has none",
)
"""These rules, from HEADS on, are shared by trainers."""
PAIRS = Rule(
    "micro_batch_splits_pairs",
    lambda model, training, shape: (np.asarray(shape.micro_batch_size) % 2 == 0) | (not training.objective.has_pairs),
    lambda model, training, shape: (
        f"micro_batch_size {shape.micro_batch_size}: both sequences of a {training.objective.name} pair are in one "
        "micro-batch, which holds 2, 4, 6, …"
    ),
)
