"""Fields that configs of every architecture state alike: epsilon of norms, rotary scaling, the router, soft caps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from planner.specs.architectures.derivations import Config, Derived, InexpressibleError
from planner.specs.reading import kind_of

_log = logging.getLogger(__name__)

_EPSILONS = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "layernorm_epsilon",
    "rms_norm_epsilon",
)  # fmt: skip
_ROUTER = {
    "routed_scaling_factor":
        ("routed_scaling_factor", "moe_routed_scaling_factor", "router_scaling_factor", "route_scale",
         "moe_router_scaling_factor"),
    "norm_topk_prob": ("norm_topk_prob", "moe_renormalize", "route_norm"),
    "n_group": ("n_group", "num_expert_group"),
    "topk_group": ("topk_group",),
    "router_aux_loss_coef": ("router_aux_loss_coef", "aux_loss_alpha", "moe_loss_weight", "load_balance_coeff"),
    "router_z_loss_coef": ("router_z_loss_coef", "router_z_loss_coeff"),
    "seq_aux": ("seq_aux",),
}  # fmt: skip
"""Fields of the router and the keys that may hold them, first choice first."""
_SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrtsoftplus", "noaux_tc": "sigmoid"}
_SCALINGS = {
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
_UNSCALED = (None, "default", "none", "mrope", "proportional")
"""Names of rotary positions that stretch no frequency: those of images run along more than one axis."""
_SCALING_NUMBERS = (
    "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "attention_factor", "truncate", "short_factor", "long_factor",
)  # fmt: skip


def _first(config: Config, keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def norm_eps(config: Config) -> Derived:
    """The number under the root of a norm."""
    return {"norm_eps": _first(config, _EPSILONS)}


def soft_caps(config: Config) -> Derived:
    """Caps of logits, and queries that are not scaled by the width of their head."""
    caps = {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping") if config.get(key)}
    scalar = config.get("query_pre_attn_scalar")
    if isinstance(scalar, int | float) and not isinstance(scalar, bool) and scalar > 0:
        caps["attention_multiplier"] = 1 / math.sqrt(scalar)
    return caps


def rotary(config: Config) -> Derived:
    """Rotary settings: rope_scaling as transformers 4 wrote it, rope_parameters as transformers 5 does."""
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(stated, Mapping):
        return {}
    local = stated.get("sliding_attention")
    base = {"rope_local_base_freq": local.get("rope_theta")} if isinstance(local, Mapping) else {}
    whole = stated.get("full_attention", stated)
    if not isinstance(whole, Mapping):
        return base
    if base and base["rope_local_base_freq"] == whole.get("rope_theta", config.get("rope_theta")):
        base = {}
    scaling = _scaling(whole, config)
    return base | ({"rope_scaling": scaling} if scaling else {})


def _scaling(stated: Mapping[str, Any], config: Config) -> Derived | None:
    name = stated.get("rope_type", stated.get("type"))
    if name in _UNSCALED:
        return None
    if not isinstance(name, str):
        raise InexpressibleError(f"rope_scaling: rope_type: {name!r:.60} is {kind_of(name)}, expected text")
    if name not in _SCALINGS:
        _log.warning("rope_scaling: %s is not known and left out: no price depends on it, an export does", name[:60])
        return None
    numbers = {key: stated[key] for key in _SCALING_NUMBERS if stated.get(key) is not None}
    original = config.get("original_max_position_embeddings")
    if original is not None and name != "linear":
        numbers.setdefault("original_max_position_embeddings", original)
    return {"rope_type": _SCALINGS[name], **numbers}


def router(config: Config) -> Derived:
    """How a router scores, groups, scales and balances."""
    fields = {name: _first(config, spellings) for name, spellings in _ROUTER.items()}
    groups = fields["n_group"]
    if groups in (None, 0, 1):
        fields["n_group"] = fields["topk_group"] = None
    scores = _first(
        config, ("scoring_func", "score_function", "score_func", "moe_router_activation_func", "moe_router_activation")
    )
    fields["scoring_func"] = _SCORES.get(scores, scores) if isinstance(scores, str) else scores
    return {name: value for name, value in fields.items() if value is not None}


def warn_of_towers(config: Config, where: str) -> None:
    """Name the parts of a multimodal model that are not planned."""
    towers = [key.removesuffix("_config") for key in _TOWERS if isinstance(config.get(key), Mapping)]
    if towers:
        _log.warning("%s: %s left out: only the language model is planned", where, " and ".join(towers))


_TOWERS = (
    "vision_config", "vit_config", "audio_config", "talker_config", "code2wav_config", "vision_tower_config",
    "img_processor", "embd_layer", "vision_model",
)  # fmt: skip
"""Keys of what a multimodal model has beside its language model."""
