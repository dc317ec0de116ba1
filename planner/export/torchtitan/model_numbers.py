"""Numbers of a model in torchtitan's words: rotary frequencies, their scale, and the bias that balances experts."""

from __future__ import annotations

from typing import Any

from planner.export.common.model import BIAS_UPDATE_RATE, stated
from planner.specs.model import ModelSpec
from planner.trainers.rules.facts import rotary_method

_LLAMA3 = {
    "scaling_factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}  # fmt: skip
_YARN = {
    "rope_factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow", "truncate": "truncate",
    "original_seq_len": "original_max_position_embeddings",
}  # fmt: skip
"""Fields of torchtitan's RoPE and of our spec's scaling."""


def rotary_numbers(model: ModelSpec) -> dict[str, Any]:
    """Base and stretching of rotary frequencies; numbers that the model leaves out are torchtitan's, and usual."""
    base, method, scaling = {"theta": float(model.rope_theta or 0)}, rotary_method(model), model.rope_scaling
    if method is None or scaling is None:
        return base
    names = _YARN if method == "yarn" else _LLAMA3
    given = {name: getattr(scaling, field) for name, field in names.items()}
    numbers = {name: value for name, value in given.items() if value is not None}
    return {**base, "scaling": "yarn" if method == "yarn" else "llama", **numbers}


def uses_cos_sin(model: ModelSpec) -> bool:
    """The class of rotary positions that knows no llama3; which pairs it rotates is a matter of checkpoints alone."""
    return rotary_method(model) != "llama3"


def mscale(model: ModelSpec) -> float:
    """The weight of yarn's scale of attention logits, which is squared; yarn alone has one."""
    return (model.rope_scaling.mscale_all_dim or 0.0) if model.rope_scaling is not None else 0.0


def balancing_rate(model: ModelSpec) -> float | None:
    """The step of a balancing bias, with which it balances models whose own way is a loss, too; None for neither."""
    moe = stated(model).moe
    if moe is None:
        return None
    return moe.bias_update_rate or (BIAS_UPDATE_RATE if moe.router_aux_loss_coef and not moe.balancing_bias else None)
