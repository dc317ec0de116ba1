"""Rules on models that our own runner does not build, whatever the layout."""

from __future__ import annotations

from planner.trainers.rules.common import Rule, model_rule
from planner.trainers.rules.layer_kinds import UNWRITTEN_RULES

TORCH_MODEL_RULES: tuple[Rule, ...] = (
    *UNWRITTEN_RULES,
    model_rule("pre_norms", lambda m: not m.pre_norms, lambda m: "attention and MLP always have a norm before them"),
    model_rule(
        "parallel_residual",
        lambda m: m.parallel_residual is not None,
        lambda m: "its MLP reads what attention adds to, never the layer's input",
    ),
    model_rule(
        "qk_norm_over",
        lambda m: m.qk_norm and m.qk_norm_over != "head_dim",
        lambda m: "norms of queries and keys are over a head there, with one weight for all heads",
    ),
    model_rule("attn_output_gate", lambda m: m.attn_output_gate, lambda m: "it has no gate on attention's output"),
)
