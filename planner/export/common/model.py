"""Properties of a model that trainers name and a model spec implies."""

from __future__ import annotations

from planner.specs.model import ModelSpec


def has_balancing_bias(model: ModelSpec) -> bool:
    """The router adds a number per expert that steers the load without a gradient (DeepSeek-V3).

    The bias of a router that is a linear layer with a bias is none.
    """
    return model.moe is not None and model.moe.router_bias and not model.has_mlp_bias
