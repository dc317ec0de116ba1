"""Calibrations: measurements of a machine, laid over its hardware profile without touching the profile's file."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from planner.specs.base import Fraction, NonNegativeFloat, PositiveFloat, Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec, LinkTier
from planner.trainers.spec import RuntimeSpec


class Factor(Spec):
    """Seconds over those that the profile predicts."""

    value: PositiveFloat
    source: str
    """The measurement."""


class Share(Spec):
    """A measured share."""

    value: Fraction
    source: str


class Quantity(Spec):
    """A measured amount; its unit is in the field's name."""

    value: NonNegativeFloat
    source: str


class Calibration(Spec):
    """Measured numbers; null where the profile and the runtime stay as they are."""

    source: str
    """Device, software and run."""
    gemm_factor: Factor | None = None
    """Factor on seconds of products."""
    attention_factor: dict[str, Factor] = Field(default_factory=dict)
    """Factor on seconds of each kernel of attention that ran, by its name in the profile: flash, cudnn."""
    stream_factor: Factor | None = None
    """Factor on seconds of memory-bound kernels: norms, activations, loss, optimizer."""
    efficiency_fraction: dict[str, Share] = Field(default_factory=dict)
    """Share of a link tier's data-sheet rate that exchanges reach, by the tier's name."""
    context_gib: Quantity | None = None
    """Device memory outside the allocator: context, libraries, communicators of other kinds."""
    fragmentation_fraction: Share | None = None
    """Memory that the allocator holds beyond what is allocated, as a share of what is allocated."""
    microbatch_overhead_s: Quantity | None = None
    """Host time per micro-batch and stage that no kernel hides."""

    def of_cluster(self, cluster: ClusterSpec) -> ClusterSpec:
        """`cluster` with measured numbers in place of its own; its evidence is then `probed`."""
        return cluster.changed(hardware=self.of_hardware(cluster.hardware))

    def of_hardware(self, hardware: HardwareSpec) -> HardwareSpec:
        """The profile with factors multiplied onto its own, measured shares and amounts in place of its own."""
        before = hardware.efficiency
        changes: dict[str, Any] = {"evidence": "probed", "source": f"{before.source} Probed: {self.source}".strip()}
        for name in ("gemm_factor", "stream_factor"):
            factor: Factor | None = getattr(self, name)
            if factor is not None:
                changes[name] = getattr(before, name) * factor.value
        for kernel, factor in self.attention_factor.items():
            timed = getattr(before, kernel)
            changes[kernel] = timed.model_copy(update={"seconds_factor": timed.seconds_factor * factor.value})
        measured = {"context_gib": self.context_gib, "fragmentation_fraction": self.fragmentation_fraction}
        given = {name: number for name, number in measured.items() if number is not None}
        reserved: dict[str, Any] = {name: number.value for name, number in given.items()}
        if given:
            reserved["source"] = "; ".join(number.source for number in given.values())
        return hardware.model_copy(
            update={
                "efficiency": before.model_copy(update=changes),
                "tiers": tuple(map(self._tier, hardware.tiers)),
                "reserved": hardware.reserved.model_copy(update=reserved),
            }
        )

    def _tier(self, tier: LinkTier) -> LinkTier:
        share = self.efficiency_fraction.get(tier.name)
        if share is None:
            return tier
        return tier.model_copy(update={"efficiency_fraction": share.value, "source": f"{tier.source} {share.source}"})

    def of_runtime(self, runtime: RuntimeSpec) -> RuntimeSpec:
        """The runtime with the measured host time per micro-batch."""
        if self.microbatch_overhead_s is None:
            return runtime
        return runtime.model_copy(update={"microbatch_overhead_s": self.microbatch_overhead_s.value})

    def in_words(self) -> list[str]:
        """One line per number, for reports."""
        factors = {"products": self.gemm_factor, "memory-bound": self.stream_factor}
        factors |= {f"attention ({kernel})": factor for kernel, factor in self.attention_factor.items()}
        lines = [f"{name} × {factor.value:.3f} ({factor.source})" for name, factor in factors.items() if factor]
        lines += [f"{name} at {share.value:.0%} of its rate ({share.source})" for name, share in self._links]
        if self.context_gib is not None:
            lines.append(f"{self.context_gib.value:.2f} GiB outside the allocator ({self.context_gib.source})")
        if self.fragmentation_fraction is not None:
            share = self.fragmentation_fraction
            lines.append(f"{share.value:.1%} of allocated memory held beyond it ({share.source})")
        if self.microbatch_overhead_s is not None:
            overhead = self.microbatch_overhead_s
            lines.append(f"{1e6 * overhead.value:.0f} µs of host a micro-batch ({overhead.source})")
        return lines

    @property
    def _links(self) -> list[tuple[str, Share]]:
        return sorted(self.efficiency_fraction.items())
