"""Precision, and the overlaps, fusions and kernels that Megatron-LM's arguments switch on or off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.export.megatron.options import Options, text

_SWITCHES: dict[str, tuple[str, Any]] = {
    "--overlap-grad-reduce": ("overlap_grad_reduce", True),
    "--overlap-param-gather": ("overlap_param_gather", True),
    "--tp-comm-overlap": ("tp_comm_overlap", True),
    "--overlap-moe-expert-parallel-comm": ("ep_overlap", True),
    "--cross-entropy-loss-fusion": ("cross_entropy_fusion", True),
    "--enable-cuda-graph": ("cuda_graph", True),
    "--external-cuda-graph": ("cuda_graph", True),
    "--accumulate-allreduce-grads-in-fp32": ("fp32_grad_accum", True),
    "--grad-reduce-in-bf16": ("fp32_grad_accum", False),
    "--no-overlap-p2p-communication": ("p2p_overlap", False),
    "--use-flash-attn": ("flash_attention", True),
    "--no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
}
"""Option to the feature it sets and the value it sets it to."""
_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--cuda-graph-impl": ("cuda_graph", lambda value: value if value == "transformer_engine" else value != "none"),
    "--cp-comm-type": ("cp_comm_type", lambda value: {"allgather": "all_gather"}.get(value, value)),
    "--moe-token-dispatcher-type": ("dispatcher", str),
    "--attention-backend": ("flash_attention", lambda value: value not in ("unfused", "local")),
}
"""Option to the feature it sets, and the feature's value from the option's."""
FEATURE_OPTIONS = frozenset({*_SWITCHES, *_VALUES}) | {
    "--hidden-dropout", "--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe",
    "--fp8-hybrid", "--fp8-e4m3",
}  # fmt: skip


def read_dtype(options: Options) -> str:
    """The dtype that matrix products compute in."""
    if "--fp4-format" in options:
        return "nvfp4"
    if "--fp8-format" in options or "--fp8-hybrid" in options or "--fp8-e4m3" in options:
        return "mxfp8" if options.get("--fp8-recipe") == ["mxfp8"] else "fp8"
    return "fp16" if "--fp16" in options else "bf16"


def read_features(options: Options) -> dict[str, Any]:
    """A run's features; those that no option names are as Megatron-LM has them unasked."""
    features: dict[str, Any] = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    features["cross_entropy_fusion"] = "--cross-entropy-loss-fusion" in options
    features["tp_comm_overlap"] = features["ep_overlap"] = features["cuda_graph"] = False
    # Megatron-LM drops a tenth of the activations unless told otherwise
    features["dropout"] = text(options, "--hidden-dropout", "0.1").strip("0.") != ""
    if "--num-experts" in options:
        features["dispatcher"] = "allgather"
    features |= {name: value for option, (name, value) in _SWITCHES.items() if option in options}
    features |= {
        name: convert(text(options, option)) for option, (name, convert) in _VALUES.items() if option in options
    }
    return features
