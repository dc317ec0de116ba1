"""How a published model's weights were learned: the optimizer's settings and the schedule of its rate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.specs.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Spec


class OptimizerDefaults(Spec):
    """AdamW and the schedule of its learning rate, as a model was published with them. They cost no time."""

    learning_rate: PositiveFloat
    """Rate after the warm-up."""
    min_learning_rate: NonNegativeFloat
    """Rate at the end."""
    warmup_steps: PositiveInt
    """Steps over which the rate rises from nothing."""
    decay_style: Literal["cosine", "linear"] = "cosine"
    """Curve on which the rate falls."""
    decay_fraction: Fraction = 1.0
    """Share of the steps, the last ones, over which it falls; before them it is constant."""
    weight_decay: NonNegativeFloat = 0.1
    """Share of the weights, times the rate, that a step takes away."""
    beta1: Fraction = 0.9
    """Share of the mean of gradients that a step keeps."""
    beta2: Fraction = 0.95
    """Share of the mean of squared gradients that a step keeps."""
    epsilon: PositiveFloat = 1e-8
    """Term beside the root of the squared gradients' mean."""
    clip_grad: NonNegativeFloat = 1.0
    """Norm of all gradients above which they are scaled down."""
    init_std: PositiveFloat = Field(default=0.02, le=1)
    """Standard deviation of initial weights."""
    source: str = ""
    """Source of these numbers; the others are defaults."""
