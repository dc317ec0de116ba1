"""Packages that Megatron-LM's options need on every node, by the options that were written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from planner.export.common.arguments import Arguments
from planner.export.common.trainer_files import IMAGE_OF_AMD, Requirement

_IMAGE_OF_AMD = f"use the image {IMAGE_OF_AMD}"
_TRANSFORMER_ENGINE = "pip install --no-build-isolation transformer_engine[pytorch]"


class _Need(NamedTuple):
    """A feature of Transformer Engine, the least version that has it, and the options that ask for it."""

    at_least: str
    reason: str
    is_asked: Callable[[Arguments], bool]


def _has(*options: str) -> Callable[[Arguments], bool]:
    return lambda arguments: any(option in arguments for option in options)


def _is(option: str, *values: str) -> Callable[[Arguments], bool]:
    return lambda arguments: arguments.get(option) in values


def _graphs_modules(arguments: Arguments) -> bool:
    return arguments.get("--cuda-graph-impl") == "transformer_engine"


_TRANSFORMER_ENGINE_NEEDS = (
    _Need("1.13", "--transformer-impl transformer_engine", _is("--transformer-impl", "transformer_engine")),
    _Need("2.1", "--moe-permute-fusion", _has("--moe-permute-fusion")),
    _Need("2.1", "moments in 16 bits", _has("--exp-avg-dtype", "--exp-avg-sq-dtype")),
    _Need("2.2", "--fp8-recipe tensorwise", _is("--fp8-recipe", "tensorwise")),
    _Need("2.1", "--fp8-recipe mxfp8", _is("--fp8-recipe", "mxfp8")),
    _Need("2.3", "--fp8-recipe blockwise", _is("--fp8-recipe", "blockwise")),
    _Need("2.7", "--fp4-format", _has("--fp4-format")),
    _Need("2.8", "attention sinks (--softmax-type)", _has("--softmax-type")),
    _Need("2.8", "--delay-wgrad-compute", _has("--delay-wgrad-compute")),
    _Need(
        "2.10", "--delay-wgrad-compute in graphs",
        lambda arguments: "--delay-wgrad-compute" in arguments and _graphs_modules(arguments),
    ),
    _Need("2.14", "--use-transformer-engine-op-fuser", _has("--use-transformer-engine-op-fuser")),
    _Need(
        "2.14", "--fine-grained-activation-offloading in graphs",
        lambda arguments: "--fine-grained-activation-offloading" in arguments and _graphs_modules(arguments),
    ),
)  # fmt: skip
"""From Megatron core's own checks (arguments.py, transformer_config.py, extensions/transformer_engine.py, main)."""


def requirements(arguments: Arguments, is_amd: bool = False) -> Iterator[Requirement]:
    """The packages that the options need; on AMD GPUs they are builds for ROCm under the same names."""
    yield Requirement("torch", "everything", package="torch", at_least="2.4")
    needs = [need for need in _TRANSFORMER_ENGINE_NEEDS if need.is_asked(arguments)]
    if needs:
        highest = max(needs, key=lambda need: tuple(map(int, need.at_least.split("."))))
        yield Requirement(
            "transformer_engine.pytorch",
            highest.reason,
            "transformer_engine",
            highest.at_least,
            f"build ROCm/TransformerEngine, or {_IMAGE_OF_AMD}" if is_amd else _TRANSFORMER_ENGINE,
        )
    if "--no-gradient-accumulation-fusion" not in arguments:
        yield Requirement(
            "fused_weight_gradient_mlp_cuda",
            "fused gradient accumulation, which the output layer takes from apex",
            hint=f"build ROCm/apex with --cpp_ext --cuda_ext, or {_IMAGE_OF_AMD}"
            if is_amd
            else "build NVIDIA/apex with --cpp_ext --cuda_ext, or use NVIDIA's PyTorch container",
        )
    if arguments.get("--moe-token-dispatcher-type") == "flex":
        yield from _dispatcher(arguments, is_amd)


def _dispatcher(arguments: Arguments, is_amd: bool) -> Iterator[Requirement]:
    """DeepEP, or its branch that has HybridEP."""
    if arguments.get("--moe-flex-dispatcher-backend") == "hybridep":
        hint = "install the branch hybrid-ep of deepseek-ai/DeepEP"
        yield Requirement("deep_ep:HybridEPBuffer", "--moe-flex-dispatcher-backend hybridep", hint=hint)
    else:
        hint = "install deepseek-ai/DeepEP, with NVSHMEM where experts span nodes"
        if is_amd:
            hint = "install ROCm/DeepEP, with rocSHMEM where experts span nodes"
        yield Requirement("deep_ep:Buffer", "--moe-flex-dispatcher-backend deepep", hint=hint)
