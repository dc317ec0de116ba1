"""Layouts of every size and split, by hand and by seed, for models that a target can express."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model, model_names
from planner.specs.training import TrainingSpec
from planner.trainers.rules.rule_rows import Rule

SIZES = (8, 512, 16384)


def expressible(rules: Iterable[Rule]) -> list[str]:
    """Models that break none of a target's rules about models, which read no shape, on short sequences."""
    training = TrainingSpec(seq_length=2048, global_batch_size=1)
    asked, models = tuple(rules), {name: load_model(name) for name in model_names()}
    return [name for name, model in models.items() if all(rule.holds(model, training, Shape()) for rule in asked)]


def some_layout(model: ModelSpec, gpus: int, seed: str) -> dict[str, Any]:
    """A legal layout of `gpus` ranks, with stages of any sizes."""
    rng = random.Random(seed)
    width = model.intermediate_size or (model.moe.moe_intermediate_size if model.moe else 1)
    tps = [tp for tp in (1, 2, 4, 8) if model.num_attention_heads % tp == 0 and width % tp == 0 and tp <= gpus]
    tp = rng.choice([tp for tp in tps if model.num_key_value_heads % tp == 0 or tp % model.num_key_value_heads == 0])
    pp = rng.choice([pp for pp in (1, 2, 4, 8, 16) if tp * pp <= gpus and pp <= model.num_hidden_layers // 2])
    vpp = rng.choice([1, 2]) if pp > 1 else 1
    cuts = sorted(rng.randint(0, model.num_hidden_layers) for _ in range(pp * vpp - 1))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, model.num_hidden_layers], strict=True)]
    layout: dict[str, Any] = {"tp": tp, "pp": pp, "vpp": vpp}
    if rng.random() < 0.7:
        layout["layers_per_stage"] = tuple(counts)
    if model.moe is not None and gpus // pp >= 8 and model.moe.num_experts % 8 == 0:
        layout["ep"] = 8
    return layout
