"""The options of Megatron-LM that say precision, kernels and fusions that no switch chooses, written and read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.answer import Plan
from planner.export.megatron.option_rows import Fields, OptionRow, row
from planner.export.megatron.option_words import Options, text
from planner.export.trainer_files import Arguments

_PRECISION: dict[str, Arguments] = {
    "bf16": {"--bf16": True},
    "fp16": {"--fp16": True},
    "fp8": {"--bf16": True, "--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "mxfp8": {"--bf16": True, "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--bf16": True, "--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}


_NARROW: dict[str, Arguments] = {
    "fp8": {"--fp8-param-gather": True},
    "mxfp8": {"--fp8-param-gather": True, "--reuse-grad-buf-for-mxfp8-param-ag": True},
    "nvfp4": {"--fp4-param-gather": True},
}
"""Weights of the recipe's own dtype; the tiles of mxfp8 cannot be gathered into a buffer of weights."""


def precision(plan: Plan) -> Arguments:
    """The dtypes of matrix products and of weights, and that of the gradients of fp16."""
    dtype = plan.training.dtype
    runtime = plan.runtime_spec.in_dtype(dtype, plan.cluster.hardware.architecture)
    arguments = dict(_PRECISION[dtype])
    if runtime.narrow_parameters and plan.parallelism.zero_stage >= 1:
        arguments |= _NARROW.get(dtype, {})
    if dtype == "fp16" and runtime.gradient_bytes == 4:
        arguments["--accumulate-allreduce-grads-in-fp32"] = True
    return arguments


PRECISION_OPTIONS = frozenset({
    "--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe", "--fp8-hybrid", "--fp8-e4m3",
})  # fmt: skip
"""Options that are read for the dtype; the first two formats have older names."""


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


def _is_swiglu(plan: Plan) -> bool:
    return plan.model.spec.gated_mlp and plan.model.spec.activation == "silu"


def _says(option: str, feature: str, value: bool) -> Callable[[Options], Fields]:
    """The reader of a bare option that gives a feature a value."""
    return lambda options: {feature: value} if option in options else {}


def _read_attention(options: Options) -> Fields:
    if "--attention-backend" not in options:
        return {}
    return {"flash_attention": text(options, "--attention-backend") not in ("unfused", "local")}


def _nothing(plan: Any) -> None:
    """The writer of an option that is only read."""


KERNELS: tuple[OptionRow, ...] = (
    row("--transformer-impl", "model.transformer_impl", lambda plan: "transformer_engine"),
    row(
        "--attention-backend", "model.attention_backend",
        lambda plan: "auto" if plan.runtime_spec.flash_attention else "unfused", _read_attention,
    ),
    row("--use-flash-attn", "", _nothing, _says("--use-flash-attn", "flash_attention", True)),
    row(
        "--no-gradient-accumulation-fusion", "", lambda plan: not plan.runtime_spec.fused_grad_accumulation,
        _says("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
    ),
    row(
        "--no-rope-fusion", "",
        lambda plan: not plan.runtime_spec.fused_rotary and plan.model.spec.position_embedding == "rope",
    ),
    row(
        "--no-bias-swiglu-fusion", "", lambda plan: not plan.runtime_spec.fused_activation and _is_swiglu(plan),
        _says("--no-bias-swiglu-fusion", "activation_fusion", False),
    ),
    row(
        "--no-bias-gelu-fusion", "", lambda plan: not plan.runtime_spec.fused_activation and not _is_swiglu(plan),
        _says("--no-bias-gelu-fusion", "activation_fusion", False),
    ),
    row(
        "--accumulate-allreduce-grads-in-fp32", "", _nothing,
        _says("--accumulate-allreduce-grads-in-fp32", "fp32_grad_accum", True),
    ),
    row("--fp8-output-proj", "", _nothing, _says("--fp8-output-proj", "fp8_output_proj", True)),
)  # fmt: skip
