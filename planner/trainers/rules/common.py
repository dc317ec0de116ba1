"""Rules: each says whether a trainer takes a shape and, if not, why with which numbers; and facts that they ask for.

The conditions are plain arithmetic on a `Shape`, so one call judges one shape or an array of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import and_
from typing import Any

import numpy as np

from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.model_parts import SPARSE, MoESpec
from planner.specs.training import TrainingSpec


def has_groups(moe: MoESpec) -> bool:
    """True where tokens choose among groups of experts first."""
    return (moe.n_group or 1) > 1


def query_width(model: ModelSpec) -> int:
    """Width of a query head."""
    return model.head_dim if model.mla is None else model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim


def has_usual_scale(model: ModelSpec) -> bool:
    """Attention logits are divided by the root of a query head's width."""
    given = model.attention_multiplier
    return given is None or math.isclose(given, query_width(model) ** -0.5, rel_tol=1e-6)


def has_local_base(model: ModelSpec) -> bool:
    """Sliding layers have rotary frequencies of their own."""
    given = model.rope_local_base_freq
    return given is not None and given != model.rope_theta and any(kind.attention == "sliding" for kind in model.kinds)


def rotary_method(model: ModelSpec) -> str | None:
    """How rotary frequencies are stretched; None where they are not, or by a factor of 1."""
    scaling = model.rope_scaling
    if scaling is None or model.position_embedding != "rope" or (scaling.factor == 1 and not scaling.short_factor):
        return None
    return scaling.rope_type


def original_length(model: ModelSpec) -> int:
    """Tokens of the sequences that the model was trained on before its positions were stretched; 0 if nothing says."""
    scaling = model.rope_scaling
    return (scaling.original_max_position_embeddings or 0) if scaling is not None else 0


def every_nth(flags: Sequence[bool]) -> int | None:
    """n where every n-th flag is set and no other; None for any other pattern, and where none is."""
    n = list(flags).index(True) + 1 if True in flags else 0
    return n if n and list(flags) == [(i + 1) % n == 0 for i in range(len(flags))] else None


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
    own = [("sliding_heads", sizes) for sizes in (model.sliding_heads,) if sizes]
    own += [(f"layer_sizes[{layer}]", sizes) for layer, sizes in enumerate(model.layer_sizes or ())]
    for where, sizes in own:
        parts = (("num_attention_heads", sizes.num_attention_heads), ("intermediate_size", sizes.intermediate_size))
        widths |= {f"{where}.{name}": width for name, width in parts if width is not None}
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
        "layers_read_the_first_stage",
        lambda model, training, shape: (shape.pp == 1) | (not _reads_before(model)),
        lambda model, training, shape: (
            f"pp {shape.pp}: layers run again, or read embeddings or keys that stages do not send on"
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


def _reads_before(model: ModelSpec) -> bool:
    """Layers read what the first stage has, or keys of a layer further back than the pairs of cross-layer attention."""
    shares = [bool(one.shares_keys) for one in model.layer_sizes or ()]
    is_looped = model.traced is not None and model.traced.is_looped
    return is_looped or model.per_layer_input_size is not None or any(map(all, pairwise(shares)))


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
    ("layer_sizes", lambda m: m.layer_sizes is not None, "sizes of their own for layers"),
    ("per_layer_input_size", lambda m: m.per_layer_input_size is not None, "embeddings of their own for layers"),
    ("value_head_dim", lambda m: m.value_head_dim not in (None, m.head_dim), "values of another width than keys"),
    ("values_are_keys", lambda m: m.values_are_keys, "keys that are values too"),
    ("attn_head_gate", lambda m: m.attn_head_gate, "gates of whole heads"),
    ("query_rank", lambda m: m.query_rank is not None, "low-rank queries beside full keys"),
    ("norm_weight", lambda m: not m.norm_weight, "norms without weights"),
    ("head_bias", lambda m: m.head_bias, "biases in the head"),
    ("activation", lambda m: m.activation in ("xielu", "situ"), "xIELU or SiTU"),
    ("latent_size", lambda m: m.moe is not None and m.moe.latent_size is not None, "experts on latents"),
    ("num_zero_experts", lambda m: m.moe is not None and m.moe.num_zero_experts > 0, "experts that do nothing"),
    ("vision", lambda m: m.vision is not None, "a vision tower: --images 0 plans the language model alone"),
    ("causal", lambda m: not m.causal, "attention that is not causal"),
    ("expert_norms", lambda m: m.moe is not None and (m.moe.expert_norms or m.moe.output_norm), "norms around experts"),
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
"""Fields, their plain values, and the refusal of any other value."""


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
"""Rules of exports that cannot express adapters, frozen weights and other losses."""
