"""The cluster: how many GPUs of which kind, in nodes of which size."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator, model_validator

from planner.specs.base import PositiveInt, Rate, Spec
from planner.specs.hardware import HardwareSpec, LinkTier
from planner.specs.registry import load_hardware


class ClusterSpec(Spec):
    """`num_gpus` GPUs of one kind."""

    hardware: HardwareSpec
    """The profile; the name, alias or file of one is loaded."""
    num_gpus: PositiveInt = Field(le=10_000_000)
    """GPUs of the cluster."""
    gpus_per_node: PositiveInt | None = Field(default=None, le=10_000_000)
    """GPUs of a node; given none, the profile's. With another number, tiers as wide as a node shrink or grow too."""
    network_gb_per_s: Rate | None = None
    """Network rate per GPU and direction between nodes; given none, the profile's."""
    network_tiers: tuple[LinkTier, ...] = ()
    """The tiers outside NVLink's domain (racks, pods, a spine), innermost first; given none, the profile's."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            hardware: HardwareSpec | str,
            num_gpus: int,
            gpus_per_node: int | None = None,
            network_gb_per_s: float | None = None,
            network_tiers: tuple[LinkTier, ...] = (),
        ) -> None: ...

    @field_validator("hardware", mode="before")
    @classmethod
    def _named_hardware(cls, hardware: object) -> object:
        return load_hardware(hardware) if isinstance(hardware, str) else hardware

    @model_validator(mode="after")
    def _network_widens(self) -> ClusterSpec:
        if not self.network_tiers:
            return self
        if self.network_gb_per_s is not None:
            raise ValueError("network_gb_per_s and network_tiers: both say how fast the network is")
        *inner, last = [(tier.name, tier.num_gpus) for tier in self.network_tiers]
        if last[1] is not None:
            raise ValueError(f"network_tiers: the last, {last[0]}, joins all GPUs and takes no number of them")
        sizes = [(f"{self.hardware.fabric}'s domain", self.nvlink_domain_size), *inner]
        for (before, fewer), (name, more) in pairwise(sizes):
            if fewer is None or more is None or more <= fewer:
                raise ValueError(f"network_tiers: {name} joins {more} GPUs, no more than {before} with {fewer}")
        return self

    def changed(self, **changes: Any) -> ClusterSpec:
        """A new cluster with some fields changed; a copy would keep the links that were worked out for this one."""
        return ClusterSpec(**{name: getattr(self, name) for name in ClusterSpec.model_fields} | changes)

    @property
    def is_rack(self) -> bool:
        """True where NVLink joins more GPUs than a node has."""
        return self.nvlink_domain_size > self.node_size

    @cached_property
    def node_size(self) -> int:
        return self.gpus_per_node or self.hardware.gpus_per_node

    @property
    def nvlink_domain_size(self) -> int:
        """GPUs of the innermost tier; all where there is only one tier."""
        return self.tiers[0].num_gpus or self.num_gpus

    @cached_property
    def tiers(self) -> tuple[LinkTier, ...]:
        """The links of this cluster, innermost first: the profile's with this cluster's node size and network."""
        tiers = self.hardware.tiers
        if self.node_size != self.hardware.gpus_per_node:
            node = {"num_gpus": self.node_size}
            tiers = tuple(t.model_copy(update=node) if t.num_gpus == self.hardware.gpus_per_node else t for t in tiers)
        if self.network_tiers:
            domain = tiers[0] if tiers[0].num_gpus else tiers[0].model_copy(update={"num_gpus": self.node_size})
            return (domain, *self.network_tiers)
        if self.network_gb_per_s is not None and len(tiers) > 1:
            rate = {"gb_per_s": self.network_gb_per_s}
            tiers = tiers[:1] + tuple(t.model_copy(update=rate) for t in tiers[1:])
        return tiers
