"""The surroundings of a stage's modules: the rank's peers, the modules to recompute, and postponed weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from planner.probe.model.peers import ExpertPeers, TensorPeers


@dataclass(slots=True)
class Surroundings:
    """The values that all modules of a stage share: peers, modules to recompute, and the list of postponed weight
    gradients."""

    tp: TensorPeers = field(default_factory=TensorPeers)
    ep: ExpertPeers = field(default_factory=ExpertPeers)
    cp: TensorPeers = field(default_factory=TensorPeers)
    """The ranks over which each sequence is split."""
    balanced_routing: bool = False
    """Every expert gets the same number of rows, whatever the router says."""
    recomputed: frozenset[str] = frozenset()
    """Modules of a layer that are recomputed in backward: core_attn, mlp, moe, shared_experts."""
    postponed: list[Callable[[], None]] | None = None
    """The list that collects a backward's weight-gradient products when a schedule splits them off; None: they run at
    once."""

    def weight_gradient(self, weight: Tensor, product: Callable[[], Tensor]) -> Tensor | None:
        """The gradient of `weight`, or None after its computation was put on the list of postponed ones."""
        if self.postponed is None:
            return product()
        self.postponed.append(lambda: accumulate(weight, product()))
        return None


def recomputable(name: str, function: Callable[..., Tensor], around: Surroundings) -> Callable[..., Tensor]:
    """`function` itself, or a version that is recomputed in backward if `name` is among the modules to recompute."""
    if name not in around.recomputed:
        return function
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


def to_fp32(x: Tensor) -> Tensor:
    """x in at least fp32: runs in fp64 stay exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add a gradient to the parameter's main_grad where it has one, else to its grad."""
    main: Any = getattr(parameter, "main_grad", None)
    if main is not None:
        main.add_(grad)
    elif parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)
