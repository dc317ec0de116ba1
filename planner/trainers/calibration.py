"""Calibrations: measurements of a machine, laid over its hardware profile without touching the profile's file.

The days on which the shipped numbers were fitted to measurements stand here too.
"""

from __future__ import annotations

import datetime
import math
from functools import cache

from pydantic import Field

from planner.specs.base import Fields, Fraction, NonNegativeFloat, PositiveFloat, Spec, Texts
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import By, Correction, HardwareSpec, LinkTier, Unit, Verdict
from planner.specs.problems import checked
from planner.specs.reading import load_yaml
from planner.trainers.shipped import FITS
from planner.trainers.spec import RuntimeSpec

UNPROBED_MEMORY_WIDTH = 0.04
"""Half-width that a rank's memory keeps where a probe gave kernels their speed and no memory to go by: that of a GPU
whose kernels were measured (`layout.risk`)."""
MEASURED_BY: dict[By, str] = {"probe": "Probed", "run": "By an observed run", "history": "By runs that were kept"}
"""The words that name a measurement in the source of what it corrected."""


class Measured(Spec):
    """A measured number and the verdict on it."""

    source: str
    """The measurement."""
    verdict: Verdict = "corrected"
    reason: str = ""
    """The reason why the profile's own number stays; empty where it is corrected."""

    @property
    def is_applied(self) -> bool:
        return self.verdict == "corrected"


class Factor(Measured):
    """Seconds over those that the profile predicts."""

    value: PositiveFloat


class Share(Measured):
    """A measured share."""

    value: Fraction


class Quantity(Measured):
    """A measured amount; its unit is in the field's name."""

    value: NonNegativeFloat


class Calibration(Spec):
    """Measured numbers; null where the profile and the runtime stay as they are."""

    source: str
    """Device, software and run."""
    by: By = "probe"
    kernels_factor: Factor | None = None
    """Factor on seconds of all kernels alike, where only whole steps were measured."""
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
    step_width: PositiveFloat | None = None
    """Half-width of a dense model's step, in natural logarithms, by what the kernels' factors leave unexplained."""
    warnings: Texts = ()
    """Sentences on what was left out of the measurements, and on how poorly they fit."""
    memory_width: NonNegativeFloat | None = None
    """Half-width of a rank's memory that its numbers above leave; null where nothing gives one."""

    @property
    def explains_kernels(self) -> bool:
        """True if plans rest on measured seconds of kernels, corrected by them or confirmed."""
        factors = (self.kernels_factor, self.gemm_factor, self.stream_factor, *self.attention_factor.values())
        return any(factor is not None and factor.verdict != "refused" for factor in factors)

    def of_cluster(self, cluster: ClusterSpec) -> ClusterSpec:
        """`cluster` with measured numbers in place of its own; its evidence is then `probed`, unless what was
        measured of kernels was refused."""
        return cluster.changed(
            hardware=self._of_hardware(cluster.hardware, cluster.tiers),
            network_tiers=tuple(map(self._tier, cluster.network_tiers)),
        )

    def of_hardware(self, hardware: HardwareSpec) -> HardwareSpec:
        """The profile with factors multiplied onto its own, measured shares and amounts in place of its own."""
        return self._of_hardware(hardware, hardware.tiers)

    def _of_hardware(self, hardware: HardwareSpec, tiers: tuple[LinkTier, ...]) -> HardwareSpec:
        before = hardware.efficiency
        changes: Fields = {} if self.step_width is None else {"step_width": self.step_width}
        if self.explains_kernels:
            changes |= {
                "evidence": "probed",
                "source": f"{before.source} {MEASURED_BY[self.by]}: {self.source}".strip(),
            }
        for name in ("gemm_factor", "attention_factor", "stream_factor"):
            own = None if name == "attention_factor" else getattr(self, name)
            for factor in (self.kernels_factor, own):
                if factor is not None and factor.is_applied:
                    changes[name] = changes.get(name, getattr(before, name)) * factor.value
        for kernel, factor in self.attention_factor.items():
            if factor.is_applied:
                timed = getattr(before, kernel)
                changes[kernel] = timed.model_copy(update={"seconds_factor": timed.seconds_factor * factor.value})
        return hardware.model_copy(
            update={
                "efficiency": before.model_copy(update=changes),
                "tiers": tuple(map(self._tier, hardware.tiers)),
                "reserved": hardware.reserved.model_copy(update=self._reserved(hardware)),
                "corrections": (*hardware.corrections, *self.corrections(hardware, tiers)),
            }
        )

    def _tier(self, tier: LinkTier) -> LinkTier:
        share = self.efficiency_fraction.get(tier.name)
        if share is None or not share.is_applied:
            return tier
        return tier.model_copy(update={"efficiency_fraction": share.value, "source": f"{tier.source} {share.source}"})

    def _reserved(self, hardware: HardwareSpec) -> Fields:
        """The fields of the profile's reserved memory that change."""
        measured = {"context_gib": self.context_gib, "fragmentation_fraction": self.fragmentation_fraction}
        given = {name: number for name, number in measured.items() if number is not None and number.is_applied}
        reserved: Fields = {name: number.value for name, number in given.items()}
        if given:
            reserved["source"] = "; ".join(number.source for number in given.values())
        if self.memory_width is not None:
            reserved["width"] = self.memory_width
        elif self.explains_kernels:
            reserved["width"] = math.hypot(hardware.reserved.width, UNPROBED_MEMORY_WIDTH)
        return reserved

    def of_runtime(self, runtime: RuntimeSpec) -> RuntimeSpec:
        """The runtime with the measured host time per micro-batch."""
        if self.microbatch_overhead_s is None or not self.microbatch_overhead_s.is_applied:
            return runtime
        return runtime.model_copy(update={"microbatch_overhead_s": self.microbatch_overhead_s.value})

    def corrections(self, hardware: HardwareSpec, tiers: tuple[LinkTier, ...]) -> tuple[Correction, ...]:
        """Every number measured, with the profile's own beside it. `tiers` are the links of the cluster at hand."""
        own = hardware.efficiency
        rows: list[tuple[str, Unit, float, Factor | Share | Quantity | None]] = [
            ("all kernels", "factor", 1.0, self.kernels_factor),
            ("products", "factor", own.gemm_factor, self.gemm_factor),
            *(
                (f"attention ({kernel})", "factor", getattr(own, kernel).seconds_factor, factor)
                for kernel, factor in self.attention_factor.items()
            ),
            ("memory-bound kernels", "factor", own.stream_factor, self.stream_factor),
            *(
                (f"{tier.name}'s share of its rate", "fraction", tier.efficiency_fraction, share)
                for tier in tiers
                if (share := self.efficiency_fraction.get(tier.name)) is not None
            ),
            ("memory outside the allocator", "gib", hardware.reserved.context_gib, self.context_gib),
            (
                "memory that the allocator holds beyond what is allocated",
                "fraction",
                hardware.reserved.fragmentation_fraction,
                self.fragmentation_fraction,
            ),
            ("host per micro-batch", "s", 0.0, self.microbatch_overhead_s),  # no trainer states one
        ]
        return tuple(_correction(*row[:3], row[3], self.by) for row in rows if row[3] is not None)


def _correction(name: str, unit: Unit, before: float, number: Factor | Share | Quantity, by: By) -> Correction:
    measured = before * number.value if isinstance(number, Factor) else number.value
    return Correction(
        name=name,
        unit=unit,
        before=before,
        measured=measured,
        after=measured if number.is_applied else before,
        source=number.source,
        verdict=number.verdict,
        reason=number.reason,
        by=by,
    )


class Fit(Spec):
    """One fit: its day, the numbers that it changed, and the command and page that have it."""

    date: datetime.date
    numbers: str
    source: str


class Fits(Spec):
    """All fits that the shipped numbers come from."""

    fingerprint: str
    """Digest of the fitted values as they ship."""
    fits: tuple[Fit, ...]
    """The newest last."""


@cache
def shipped_fits() -> Fits:
    """The fits behind the profiles and trainers of this version."""
    return checked(Fits, load_yaml(FITS), FITS.name)
