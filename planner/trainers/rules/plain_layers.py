"""Rules on layers and parts that no exporter has words for: mixers other than attention, heads of several kinds."""

from __future__ import annotations

from planner.specs.model import ModelSpec
from planner.trainers.rules.common import Rule, model_rule

_ATTENDING = frozenset({"full", "sliding", "chunked"})


def _other_mixers(model: ModelSpec) -> list[str]:
    """The ways to mix tokens that are not attention to all keys, to a window or to a chunk."""
    return sorted({kind.attention for kind in model.kinds} - _ATTENDING)


PLAIN_LAYERS: tuple[Rule, ...] = (
    model_rule(
        "layer_types",
        lambda m: bool(_other_mixers(m)),
        lambda m: f"layers that attend are exported, not {' and '.join(_other_mixers(m))}",
    ),
    model_rule(
        "mlp_layer_types",
        lambda m: any(kind.mlp == "none" for kind in m.kinds),
        lambda m: "every exported layer has an MLP or experts",
    ),
    model_rule("norm_weight", lambda m: not m.norm_weight, lambda m: "exported norms have weights"),
    model_rule("head_bias", lambda m: m.head_bias, lambda m: "the exported head has no bias"),
    model_rule(
        "value_head_dim",
        lambda m: m.value_head_dim not in (None, m.head_dim),
        lambda m: "values are as wide as keys unless attention is latent",
    ),
    model_rule("values_are_keys", lambda m: m.values_are_keys, lambda m: "values have a projection of their own"),
    model_rule("sliding_heads", lambda m: m.sliding_heads is not None, lambda m: "all layers have the same heads"),
    model_rule("activation", lambda m: m.activation == "xielu", lambda m: "xielu is not exported"),
    model_rule(
        "expert_norms",
        lambda m: m.moe is not None and m.moe.expert_norms,
        lambda m: "experts have no norms of their own",
    ),
    model_rule(
        "num_zero_experts",
        lambda m: m.moe is not None and m.moe.num_zero_experts > 0,
        lambda m: "every expert computes",
    ),
    model_rule(
        "latent_size",
        lambda m: m.moe is not None and m.moe.latent_size is not None,
        lambda m: "tokens are sent to experts as wide as they are",
    ),
)
"""Rules of Megatron-LM's, Megatron-Bridge's and torchtitan's exports."""
