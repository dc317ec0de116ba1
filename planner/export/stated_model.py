"""A model with everything said that a trainer would otherwise decide: exporters write it, and tests read it back."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from planner.specs.model import ModelSpec
from planner.specs.model_parts import MoESpec
from planner.trainers.rules.common import has_groups, has_local_base, has_usual_scale

ROTARY_BASE = 10_000.0
"""Base of rotary frequencies where the model states none: every trainer's."""
NORM_EPS = 1e-5
"""Every trainer's."""
AUX_LOSS = 1e-3
"""Weight of a load-balancing loss that was not published: Megatron-Bridge's for Qwen3, OLMoE and GLM-4.5."""
BIAS_UPDATE_RATE = 1e-3
"""DeepSeek-V3 (arXiv:2412.19437), section 4.2; Megatron-LM's and torchtitan's."""
MTP_LOSS = 0.1
"""DeepSeek-V3 (arXiv:2412.19437), section 4.2, after its first 10T tokens; Megatron-LM's."""


def stated(model: ModelSpec) -> ModelSpec:
    """The same model with a value for each field that the spec leaves to the trainer.

    A mixture without a published loss has `AUX_LOSS`, or none where a bias steers its load.
    """
    rotates = model.position_embedding == "rope"
    return model.model_copy(
        update={
            "norm_eps": NORM_EPS if model.norm_eps is None else model.norm_eps,
            "rope_theta": (model.rope_theta or ROTARY_BASE) if rotates else None,
            "partial_rotary_factor": model.partial_rotary_factor if rotates and model.mla is None else 1.0,
            # latents are expanded to a key and a value for each query head
            "num_key_value_heads": model.num_key_value_heads if model.mla is None else model.num_attention_heads,
            "no_rope_layer_interval": model.no_rope_layer_interval if rotates else None,
            "mtp_loss_scaling_factor": _mtp_loss(model),
            "attention_multiplier": None if has_usual_scale(model) else model.attention_multiplier,
            "rope_local_base_freq": model.rope_local_base_freq if has_local_base(model) else None,
            "moe": None if model.moe is None else _stated_moe(model, model.moe),
        }
    )


def notes_on_model(model: ModelSpec) -> list[str]:
    """The fields that the model's spec leaves open, and what the files say for each."""
    moe, given = model.moe, stated(model)
    open_fields = {
        "rope_theta": model.position_embedding == "rope" and model.rope_theta is None,
        "norm_eps": model.norm_eps is None,
        "mtp_loss_scaling_factor": model.num_nextn_predict_layers > 0 and model.mtp_loss_scaling_factor is None,
    }
    said = [f"{name} {getattr(given, name):g}" for name, is_open in open_fields.items() if is_open]
    if moe is not None and given.moe is not None:
        if moe.router_aux_loss_coef is None:
            said.append(f"router_aux_loss_coef {given.moe.router_aux_loss_coef:g}")
        if model.balances_by_bias and moe.bias_update_rate is None:
            said.append(f"bias_update_rate {given.moe.bias_update_rate:g}")
    return [f"the model's spec does not state these, which are usual: {', '.join(said)}"] if said else []


def _mtp_loss(model: ModelSpec) -> float | None:
    if not model.num_nextn_predict_layers:
        return None
    return MTP_LOSS if model.mtp_loss_scaling_factor is None else model.mtp_loss_scaling_factor


def _stated_moe(model: ModelSpec, moe: MoESpec) -> MoESpec:
    by_bias, grouped = model.balances_by_bias, has_groups(moe)
    unsaid = 0.0 if by_bias else AUX_LOSS
    loss = unsaid if moe.router_aux_loss_coef is None else moe.router_aux_loss_coef
    rate = BIAS_UPDATE_RATE if moe.bias_update_rate is None else moe.bias_update_rate
    return moe.model_copy(
        update={
            "scoring_func": model.scoring_func,
            "balancing_bias": by_bias,
            "bias_update_rate": rate if by_bias else None,
            "router_aux_loss_coef": loss,
            "seq_aux": moe.seq_aux and loss > 0,
            "n_group": moe.n_group if grouped else None,
            "topk_group": (moe.topk_group or 1) if grouped else None,
        }
    )


def listed(flags: Iterable[bool]) -> str:
    """Flags of layers as Megatron's patterns have them: `([0]*3+[1]*58)`."""
    runs = [(int(key), len(list(group))) for key, group in groupby(flags)]
    return "(" + "+".join(f"[{key}]*{length}" for key, length in runs) + ")"
