"""Figures for runs of months, each with an interval and its source: `data/facts.yaml`."""

from __future__ import annotations

import math
from functools import cache
from importlib import resources

import numpy as np
import yaml
from pydantic import model_validator

from planner.answer import SIGMAS_TO_END, half_width
from planner.shape import FloatArray
from planner.specs.base import NonNegativeFloat, Spec


class Fact(Spec):
    """A figure with an interval that is meant to hold the truth in 80% of all cases."""

    value: NonNegativeFloat
    low: NonNegativeFloat
    high: NonNegativeFloat
    source: str

    @model_validator(mode="after")
    def _ordered(self) -> Fact:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value:g} is not between {self.low:g} and {self.high:g}")
        if not 0.95 <= self.value / max(math.sqrt(self.low * self.high), 1e-300) <= 1.05 and self.value:
            raise ValueError(f"{self.value:g} is not the middle of {self.low:g} and {self.high:g}, as factors go")
        return self

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm: that of the lognormal through both ends; 0 for what is known."""
        return half_width((self.low, self.high)) / SIGMAS_TO_END if self.low < self.high else 0.0

    def draws(self, normal: FloatArray) -> FloatArray:
        """Draws of the lognormal, from as many of a normal distribution."""
        drawn: FloatArray = self.value * np.exp(self.sigma * normal)
        return drawn

    def times(self, factor: float) -> Fact:
        """The figure and its interval, multiplied."""
        return Fact(value=factor * self.value, low=factor * self.low, high=factor * self.high, source=self.source)


def stated(value: float) -> Fact:
    """A figure that the user gave; it is taken as it is."""
    return Fact(value=value, low=value, high=value, source="given")


class Facts(Spec):
    """All figures of the file; the file says what each of them is."""

    sustained_factor: Fact
    """Seconds of a step over months, over those of a benchmark."""
    jitter_factor: Fact
    """Mean step over median step in runs without failures: the least that a sustained step is longer."""
    failures_per_1000_gpu_days: dict[str, Fact]
    """Unplanned interruptions, by generation of the GPU; `rack` where NVLink joins more than a node."""
    detection_s: Fact
    """Seconds until somebody, or something, notices that the job stands."""
    restart_s: Fact
    """Seconds for a new job of 1,024 GPUs to reach its first step, without reading the checkpoint."""
    standby_restart_s: Fact
    """The same where a spare node waits with the program started."""
    node_loss_fraction: Fact
    """Share of the interruptions after which a node has to be replaced."""
    gpu_fraction: Fact
    """Share of the lost nodes that are lost for a GPU, and not for anything else in them."""
    repair_s: Fact
    """Seconds until a lost node is back."""
    switch_failures_per_year: Fact
    """Failures of one switch in a year."""
    leaf_gpus: Fact
    """GPUs whose ports a leaf switch has."""
    leaf_nodes: Fact
    """Nodes that have a port on the same leaf switch, where each GPU of a node has a leaf of its own."""
    rack_switches: Fact
    """Switches that join the GPUs of a rack by NVLink."""
    storage_gb_per_s_per_gpu: Fact
    """Rate of a cluster's storage, over the number of its GPUs."""
    asynchronous_stall_s: Fact
    """Seconds that training stands still while a checkpoint is copied to host memory, to be written beside it."""
    evaluation_fraction: Fact
    """Share of the time that a run's own evaluations take."""


@cache
def load_facts() -> Facts:
    """The figures that come with the planner."""
    text = (resources.files(__package__) / "data" / "facts.yaml").read_text(encoding="utf-8")
    return Facts.model_validate(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
