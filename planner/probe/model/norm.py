"""The normalisation layer of the probe's model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.probe.model.marks import mark_partial
from planner.specs.model import ModelSpec

NORM_EPSILON = 1e-5


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as the model has it."""

    def __init__(self, width: int, model: ModelSpec, per_head: bool = False) -> None:
        super().__init__()
        self.rms = per_head or model.norm == "rmsnorm"
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if model.has_norm_bias and not self.rms else None
        mark_partial(self.weight, always=per_head)
        mark_partial(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        shape = tuple(self.weight.shape)
        if self.rms:
            return functional.rms_norm(x, shape, self.weight, NORM_EPSILON)
        return functional.layer_norm(x, shape, self.weight, self.bias, NORM_EPSILON)
