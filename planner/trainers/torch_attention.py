"""The kernel that computes attention in eager torch: the ranks of a probe and their price both ask here.

A layer takes one of three ways. Ranks call FlashAttention-2 themselves where torch's scaled_dot_product_attention could
not say what the layer needs. Layers with a mask of their own are left to torch, and nothing prices their kernel. All
others are left to torch too, which takes cuDNN's kernel or FlashAttention-2.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import numpy as np

from planner.shape import Number
from planner.specs.hardware import HardwareSpec
from planner.specs.model import LayerKind, ModelSpec

PRICED = ("cudnn", "flash")
"""Kernels that profiles have numbers of, by their names there."""
PREFERS_CUDNN = ("hopper", "blackwell")
"""Silicon on which torch tries cuDNN's kernel first, from cuDNN 9.15.1 on, which torch's wheels have since 2.11. With
older ones, and on all other silicon, FlashAttention-2 comes first (sdp_utils.cpp; pytorch/pytorch#162073, #169849)."""
CUDNN_HEAD_DIM = 128
"""The widest heads that cuDNN's kernel takes in training, beside those of MLA; from cuDNN 9.22 on also 256
(sdp_utils.cpp)."""
MLA_DIMS = (192, 128)


def calls_flash(window: int, has_sinks: bool, cp: Number) -> Any:
    """True where ranks call FlashAttention-2 themselves, if no mask forbids it.

    torch's own attention takes neither windows nor sinks, and aligns a causal mask to the first key, while a part of a
    split sequence needs it aligned to the last.
    """
    return np.logical_or(window > 0 or has_sinks, np.greater(cp, 1))


def needs_mask(model: ModelSpec, kind: LayerKind, seq_length: int) -> bool:
    """True where a layer's scores need a tensor of their own: ALiBi, and chunks shorter than the sequence."""
    if kind.attention == "full":
        return model.position_embedding == "alibi"
    return model.attention_chunk_size is not None and model.attention_chunk_size < seq_length


def torch_choice(hardware: HardwareSpec, qk_dim: int, v_dim: int) -> Literal["cudnn", "flash"]:
    """The kernel that torch is expected to take where the layer leaves it the choice.

    It is an expectation: versions of torch and cuDNN differ, so ranks report what ran.
    """
    fits = max(qk_dim, v_dim) <= CUDNN_HEAD_DIM or (qk_dim, v_dim) == MLA_DIMS
    has_cudnn = hardware.efficiency.cudnn is not None and hardware.architecture in PREFERS_CUDNN
    return "cudnn" if has_cudnn and fits else "flash"


def kernel_of(model: ModelSpec, kind: LayerKind, hardware: HardwareSpec, cp: int, seq_length: int) -> str:
    """The kernel that a layer's attention is expected to take; `mask` where nothing prices it."""
    if needs_mask(model, kind, seq_length):
        return "mask"
    if calls_flash(window_of(model, kind), model.attention_sinks, cp):
        return "flash"
    return torch_choice(hardware, *head_dims(model.of_layer(kind)))


def window_of(model: ModelSpec, kind: LayerKind) -> int:
    """Keys that a query of a sliding layer sees; 0 elsewhere."""
    return model.sliding_window or 0 if kind.attention == "sliding" else 0


def head_dims(model: ModelSpec) -> tuple[int, int]:
    """Widths of one head's keys and values in the core of attention."""
    if model.mla is None:
        return model.head_dim, model.value_head_dim or model.head_dim
    return model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim, model.mla.v_head_dim


def torch_took(kernels: Collection[str]) -> Literal["sdpa", "sdpa-cudnn", "sdpa-flash"]:
    """RuntimeSpec.attention_kernel of ranks that ran these kernels: cuDNN's runs nowhere but where torch chose it."""
    if "cudnn" in kernels:
        return "sdpa-cudnn"
    return "sdpa-flash" if "flash" in kernels else "sdpa"
