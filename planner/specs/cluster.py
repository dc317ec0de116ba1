"""The cluster: how many GPUs of which kind, in nodes of which size, on which network.

The command line writes a network as `planner.specs.units.EXAMPLE`: its tiers from the inside to the outside.
"""

import re
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, field_validator, model_validator

from planner.errors import SpecError
from planner.specs.base import PositiveInt, Rate, Spec
from planner.specs.hardware import HardwareSpec, LinkTier
from planner.specs.registry import load_hardware
from planner.specs.units import EXAMPLE, parse_number, parse_whole


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
    def _network_widens(self) -> Self:
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

    def changed(self, **changes: Any) -> "ClusterSpec":
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


_ALL = "*"
_MAX_TIERS = 16
_TIER = re.compile(
    r"(?P<name>[\w.-]{1,40}):(?P<gpus>\d{1,9}[kKmM]?|\*):(?P<rate>\d{1,9}(\.\d+)?[\w/]{0,5})(:(?P<shared>\d{1,4}(\.\d+)?)x)?"
)


def parse_tiers(text: str, hardware: HardwareSpec) -> tuple[LinkTier, ...]:
    """The tiers in NAME:GPUS:GB_PER_S[:OVERSUBSCRIPTIONx],…; latency and efficiency are those of the profile's network.

    Raises SpecError naming the part that is no tier, or is out of place.
    """
    network = hardware.tiers[-1]
    parts = [part.strip() for part in text.split(",", _MAX_TIERS)]
    tiers: list[LinkTier] = []
    for place, part in enumerate(parts, start=1):
        match = _TIER.fullmatch(part)
        rate = 0.0 if match is None else _gb_per_s(match["rate"])
        if match is None or rate == 0:
            raise SpecError(
                f"--tier: {part[:60]!r} is no NAME:GPUS:GB_PER_S[:OVERSUBSCRIPTIONx]", f"write --tier {EXAMPLE}"
            )
        if (match["gpus"] == _ALL) != (place == len(parts)):
            says = "joins all GPUs and comes last" if match["gpus"] == _ALL else "is the last and must join all GPUs"
            inner = [other for other in parts if _num_gpus(other) > (hardware.tiers[0].num_gpus or 0)]
            mended = [*sorted(inner, key=_num_gpus), f"spine:{_ALL}:{match['rate']}"]
            raise SpecError(f"--tier: {part[:60]!r} {says}", f"write --tier {','.join(mended)[:200]}")
        shared = float(match["shared"] or 1)
        if not 1 <= shared <= 1000:
            raise SpecError(f"--tier: {part[:60]!r}: {shared:g}x is no oversubscription", "from 1x to 1000x")
        update = {
            "name": match["name"],
            "num_gpus": None if match["gpus"] == _ALL else parse_whole(match["gpus"], "size"),
            "gb_per_s": rate,
            "oversubscription": shared,
            "link_gb_per_s": None,
            "source": f"--tier {part}",
        }
        tiers.append(network.model_copy(update=update))
    _check_order(tiers, parts)
    return tuple(tiers)


def _num_gpus(part: str) -> int:
    """GPUs under an inner tier as it was written; 0 where that is no tier."""
    match = _TIER.fullmatch(part)
    return parse_whole(match["gpus"], "size") if match and match["gpus"] != _ALL else 0


def _gb_per_s(text: str) -> float:
    """The rate of a tier, such as 50 or 400Gb/s; 0 where that is none."""
    try:
        return float(parse_number(text, "gb_per_s"))
    except ValueError:
        return 0.0


def _check_order(tiers: list[LinkTier], parts: list[str]) -> None:
    """Raise SpecError for two tiers of one name, and for one that joins no more GPUs than the one before it."""
    names = [tier.name for tier in tiers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SpecError(f"--tier: {twice}: given twice", "give each tier a name of its own")
    sized = [(tier.num_gpus, part) for tier, part in zip(tiers, parts, strict=True) if tier.num_gpus is not None]
    for (fewer, _), (more, part) in pairwise(sized):
        if more <= fewer:
            ordered = [inner for _, inner in sorted(sized)]
            raise SpecError(
                f"--tier: {part!r} joins no more GPUs than the tier before it, {fewer}",
                f"write them from the inside to the outside, as in --tier {','.join([*ordered, parts[-1]])}",
            )


def tiers_text(tiers: tuple[LinkTier, ...]) -> str:
    """The tiers as `parse_tiers` reads them."""
    return ",".join(
        f"{tier.name}:{tier.num_gpus or _ALL}:{tier.gb_per_s:g}"
        + (f":{tier.oversubscription:g}x" if tier.oversubscription > 1 else "")
        for tier in tiers
    )
