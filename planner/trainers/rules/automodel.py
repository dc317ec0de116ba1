"""Rules of NeMo AutoModel (main of August 2026) on shapes."""

from __future__ import annotations

import numpy as np

from planner.trainers.rules.common import EXPERTS, Rule, no_multiple
from planner.trainers.rules.torch import EXPERT_RANKS, FULL_PIPELINE, INTERLEAVED_RULES, TORCH_RULES, UNTIED

AUTOMODEL_RULES: tuple[Rule, ...] = (
    *TORCH_RULES,
    UNTIED,
    EXPERTS,
    EXPERT_RANKS,
    Rule(
        "experts_with_tp",
        # moe/parallelizer.py splits attention alone, and takes no sequence parallelism beside it
        lambda model, training, shape: (model.moe is None) | ((shape.tp == 1) & (shape.etp == 1)),
        lambda model, training, shape: f"tp {shape.tp}, etp {shape.etp}: experts are split over ep alone",
    ),
    Rule(
        "seq_length_not_divisible_by_2cp",
        lambda model, training, shape: shape.seq_length % np.where(shape.cp == 1, 1, 2 * np.asarray(shape.cp)) == 0,
        lambda model, training, shape: no_multiple("seq_length", shape.seq_length, "2cp", 2 * shape.cp),
    ),
    Rule(
        "shard_size_not_dividing_dp_cp",
        lambda model, training, shape: (shape.dp * shape.cp) % shape.shard_size == 0,
        lambda model, training, shape: no_multiple("dp·cp", shape.dp * shape.cp, "shard_size", shape.shard_size),
    ),
    FULL_PIPELINE,
    *INTERLEAVED_RULES,
)
"""Constraints for 1F1B at vpp 1 and interleaved 1F1B above."""
