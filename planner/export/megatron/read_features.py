"""Precision, and the switches, fusions and kernels that Megatron-LM's arguments switch on or off."""

from __future__ import annotations

from typing import Any

from planner.export.common.recipe import canonical
from planner.export.common.spelling import read_switches
from planner.export.megatron.options import Options, text
from planner.export.megatron.switches import SWITCH_OPTIONS, SWITCHING

_OF_MIXTURES = ("dispatcher", "shared_expert_overlap", "fused_experts", "ep_overlap", "token_drop")
_OTHERS: dict[str, tuple[str, Any]] = {
    "--accumulate-allreduce-grads-in-fp32": ("fp32_grad_accum", True),
    "--use-flash-attn": ("flash_attention", True),
    "--no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
    "--fp8-output-proj": ("fp8_output_proj", True),
    "--no-bias-swiglu-fusion": ("activation_fusion", False),
    "--no-bias-gelu-fusion": ("activation_fusion", False),
}
"""Option to the feature it sets, and the value it sets it to."""
FEATURE_OPTIONS = SWITCHING | frozenset(_OTHERS) | {
    "--hidden-dropout", "--attention-backend", "--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp4-format",
    "--fp4-recipe", "--fp8-hybrid", "--fp8-e4m3",
}  # fmt: skip


def options_of_features() -> dict[str, frozenset[str]]:
    """The options that say each feature, in any value."""
    pairs = [(row.switch, option) for row in SWITCH_OPTIONS for option in row.settings]
    pairs += [(feature, option) for option, (feature, _) in _OTHERS.items()]
    pairs.append(("flash_attention", "--attention-backend"))
    return {name: frozenset(option for other, option in pairs if other == name) for name, _ in pairs}


def read_dtype(options: Options) -> str:
    """The dtype that matrix products compute in."""
    if "--fp4-format" in options:
        return "nvfp4"
    if "--fp8-format" in options or "--fp8-hybrid" in options or "--fp8-e4m3" in options:
        return "mxfp8" if options.get("--fp8-recipe") == ["mxfp8"] else "fp8"
    return "fp16" if "--fp16" in options else "bf16"


def read_scales(options: Options) -> str | None:
    """The recipe of 8-bit scales, as a run's `precision_recipe` has it: `fp8-tensorwise`; None for other dtypes.

    Megatron-LM's own, where none is named, is `delayed`.
    """
    return f"fp8-{text(options, '--fp8-recipe', 'delayed')}" if read_dtype(options) == "fp8" else None


def read_features(options: Options) -> dict[str, Any]:
    """A run's features; those that no option names are as Megatron-LM has them unasked."""
    found = {name: words or True for name, words in options.items()}
    features: dict[str, Any] = canonical(read_switches(SWITCH_OPTIONS, found))
    if features.get("cp_comm_type") == "allgather":
        features["cp_comm_type"] = "all_gather"
    if "--num-experts" in options:
        features.setdefault("dispatcher", "allgather")
    else:
        features = {name: value for name, value in features.items() if name not in _OF_MIXTURES}
    if read_dtype(options) == "fp16":
        # gradients of fp16 are 16 bits wide unless they are asked to be 32
        del features["bf16_gradients"]
    # Megatron-LM drops a tenth of the activations unless told otherwise
    features["dropout"] = text(options, "--hidden-dropout", "0.1").strip("0.") != ""
    if "--attention-backend" in options:
        features["flash_attention"] = text(options, "--attention-backend") not in ("unfused", "local")
    return features | {name: value for option, (name, value) in _OTHERS.items() if option in options}
