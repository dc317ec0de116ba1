"""Rules on models that exports share: layers that do not attend plainly, fields without a word for them, adapters.

Layers that do not attend, or not in the plain way, are sharded otherwise, and no export builds them. A field that a
trainer has nothing for must have its plain value. Targets that train all weights refuse adapters beside frozen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any

from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.model_parts import SPARSE
from planner.specs.training import TrainingSpec
from planner.trainers.rules.common import Rule, model_rule, no_multiple


def _state_widths(model: ModelSpec) -> dict[str, int]:
    """The numbers of heads or channels of layers with a state that tensor-parallel ranks share evenly, by name."""
    widths: dict[str, int] = {}
    mamba, linear = model.mamba, model.linear_attention
    if mamba is not None:
        name, width = ("num_heads", mamba.num_heads) if mamba.num_heads else ("intermediate_size", None)
        widths[f"mamba.{name}"] = width or mamba.intermediate_size
    if linear is not None:
        widths["linear_attention.num_key_heads"] = linear.num_key_heads
    if model.short_conv_kernel is not None:
        widths["hidden_size"] = model.hidden_size
    if model.sliding_heads is not None and model.sliding_heads.num_attention_heads is not None:
        widths["sliding_heads.num_attention_heads"] = model.sliding_heads.num_attention_heads
    return widths


def _splits_states(model: ModelSpec, shape: Shape) -> Any:
    widths = _state_widths(model).values()
    whole: Any = reduce(and_, (width % shape.tp == 0 for width in widths), True)
    # groups of B and C are split over tp, or each copied
    groups = 1 if model.mamba is None else model.mamba.n_groups
    return whole & ((groups % shape.tp == 0) | (shape.tp % groups == 0))


def _unsplit_state(model: ModelSpec, shape: Shape) -> str:
    for name, width in _state_widths(model).items():
        if width % shape.tp:
            return no_multiple(name, width, "tp", shape.tp)
    groups = 1 if model.mamba is None else model.mamba.n_groups
    return f"mamba.n_groups {groups} and tp {shape.tp}: neither is a multiple of the other"


LAYER_KIND_RULES: tuple[Rule, ...] = (
    Rule(
        "state_heads_not_divisible_by_tp",
        lambda model, training, shape: _splits_states(model, shape),
        lambda model, training, shape: _unsplit_state(model, shape),
    ),
    Rule(
        "cp_with_layer_kind",
        lambda model, training, shape: (shape.cp == 1) | (not (model.state_kinds or _sparse_kinds(model))),
        lambda model, training, shape: (
            f"cp {shape.cp} splits sequences, and layers of {', '.join(_unplain_kinds(model))} are priced on whole ones"
        ),
    ),
    Rule(
        "traced_layers_not_split",
        lambda model, training, shape: (shape.tp == 1) | (model.traced is None or model.traced.is_split),
        lambda model, training, shape: (
            f"tp {shape.tp} splits layers that were traced without a plan of sharding (plan models trace --shard)"
        ),
    ),
)
"""Rules of every trainer. Megatron-LM can split the sequences of Mamba-2 by heads; that is not priced."""


def _sparse_kinds(model: ModelSpec) -> bool:
    return any(kind.attention in SPARSE for kind in model.kinds)


def _unplain_kinds(model: ModelSpec) -> list[str]:
    """Kinds of layers that are no plain layer: attention, full, sliding or in chunks, with an MLP behind it."""
    plain = ("full", "sliding", "chunked")
    kinds = dict.fromkeys(kind.attention for kind in model.kinds if kind.attention not in (*plain, "none"))
    alone = any("none" in kind for kind in model.kinds) and not kinds
    return [*kinds, *(("a mixer or an MLP alone",) if alone else ())]


_UNWRITTEN: tuple[tuple[str, Callable[[ModelSpec], bool], str], ...] = (
    ("sliding_heads", lambda m: m.sliding_heads is not None, "heads of their own on sliding layers"),
    ("value_head_dim", lambda m: m.value_head_dim not in (None, m.head_dim), "values of another width than keys"),
    ("values_are_keys", lambda m: m.values_are_keys, "keys that are values too"),
    ("attn_head_gate", lambda m: m.attn_head_gate, "gates of whole heads"),
    ("query_rank", lambda m: m.query_rank is not None, "low-rank queries beside full keys"),
    ("norm_weight", lambda m: not m.norm_weight, "norms without weights"),
    ("head_bias", lambda m: m.head_bias, "biases in the head"),
    ("activation", lambda m: m.activation in ("xielu", "situ"), "xIELU or SiTU"),
    ("latent_size", lambda m: m.moe is not None and m.moe.latent_size is not None, "experts on latents"),
    ("num_zero_experts", lambda m: m.moe is not None and m.moe.num_zero_experts > 0, "experts that do nothing"),
    ("expert_norms", lambda m: m.moe is not None and m.moe.expert_norms, "norms around experts"),
)
"""Fields of models that no export writes, the models that they are about, and their meaning."""

UNWRITTEN_RULES: tuple[Rule, ...] = (
    model_rule(
        "layer_kind",
        lambda m: bool(_unplain_kinds(m)),
        lambda m: f"no export builds layers of {', '.join(_unplain_kinds(m))}",
    ),
    *(
        model_rule(name, wrong, lambda model, thing=thing: f"no export writes {thing}")  # type: ignore[misc]
        for name, wrong, thing in _UNWRITTEN
    ),
)
"""Rules of every export: what breaks one is priced all the same, with a warning."""


_FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("zero_centered_norm", False, "its norms multiply by the weight, not by 1 + weight"),
    ("pre_norms", True, "attention and MLP always have a norm before them"),
    ("post_norms", False, "it has no second norm after attention and MLP"),
    ("embedding_norm", False, "it has no norm after the embedding"),
    ("parallel_residual", None, "its MLP reads what attention adds to, never the layer's input"),
    ("attn_output_gate", False, "it has no gate on attention's output"),
    ("attn_logit_softcapping", None, "it does not cap attention logits"),
    ("final_logit_softcapping", None, "it does not cap the vocabulary's logits"),
    ("embedding_multiplier", 1, "it does not scale the embedding"),
    ("residual_multiplier", 1, "it adds to the residual stream unscaled"),
    ("logits_scaling", 1, "it does not scale the vocabulary's logits"),
    ("no_rope_layer_interval", None, "it rotates positions on every layer"),
)
"""Fields, their plain values, and what a trainer says of any other."""


def _unlike(field: str, plain: Any, message: str) -> Rule:
    return model_rule(field, lambda m: getattr(m, field) != plain, lambda m: message)


PLAIN = {row[0]: _unlike(*row) for row in _FIELDS}
"""The rules by field; a trainer lists those that it sets."""

HEAD_NORMS = model_rule(
    "qk_norm_over",
    lambda m: m.qk_norm and m.qk_norm_over != "head_dim",
    lambda m: "norms of queries and keys are over a head there, with one weight for all heads",
)


def _adapters(training: TrainingSpec) -> str:
    adapters = training.adapters
    assert adapters is not None
    weights = "" if adapters.base_bits == 16 else f" beside weights of {adapters.base_bits} bits"
    return f"LoRA of rank {adapters.rank}{weights}: what is written trains every weight of the model, in 16 bits"


WHOLE_MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "adapters",
        lambda model, training, shape: training.adapters is None,
        lambda model, training, shape: _adapters(training),
    ),
    Rule(
        "objective",
        lambda model, training, shape: training.objective.name == "lm",
        lambda model, training, shape: f"{training.objective.name}: what is written learns the next token",
    ),
)
"""Rules of exports that have no word for adapters, for weights that stay as they are, and for other losses."""
