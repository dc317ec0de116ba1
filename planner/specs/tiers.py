"""A network as the command line writes it: `pod:3072:50,spine:*:50:7x`, from the inside to the outside."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from planner.errors import SpecError
from planner.specs.units import parse_number, parse_whole

if TYPE_CHECKING:
    from planner.specs.hardware import HardwareSpec, LinkTier

EXAMPLE = "pod:3072:50,spine:*:50:7x"
_ALL = "*"
_MAX_TIERS = 16
_TIER = re.compile(
    r"(?P<name>[\w.-]{1,40}):(?P<gpus>\d{1,9}[kKmM]?|\*):(?P<rate>\d{1,9}(\.\d+)?[\w/]{0,5})(:(?P<shared>\d{1,4}(\.\d+)?)x)?"
)


def parse_tiers(text: str, hardware: HardwareSpec, option: str = "--tier") -> tuple[LinkTier, ...]:
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
                f"{option}: {part[:60]!r} is no NAME:GPUS:GB_PER_S[:OVERSUBSCRIPTIONx]", f"write {option} {EXAMPLE}"
            )
        if (match["gpus"] == _ALL) != (place == len(parts)):
            says = "joins all GPUs and comes last" if match["gpus"] == _ALL else "is the last and must join all GPUs"
            inner = [other for other in parts if _num_gpus(other) > (hardware.tiers[0].num_gpus or 0)]
            mended = [*sorted(inner, key=_num_gpus), f"spine:{_ALL}:{match['rate']}"]
            raise SpecError(f"{option}: {part[:60]!r} {says}", f"write {option} {','.join(mended)[:200]}")
        shared = float(match["shared"] or 1)
        if not 1 <= shared <= 1000:
            raise SpecError(f"{option}: {part[:60]!r}: {shared:g}x is no oversubscription", "from 1x to 1000x")
        update = {
            "name": match["name"],
            "num_gpus": None if match["gpus"] == _ALL else parse_whole(match["gpus"], "size"),
            "gb_per_s": rate,
            "oversubscription": shared,
            "link_gb_per_s": None,
            "source": f"{option} {part}",
        }
        tiers.append(network.model_copy(update=update))
    _check_order(tiers, parts, option)
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


def _check_order(tiers: list[LinkTier], parts: list[str], option: str) -> None:
    """Raise SpecError for two tiers of one name, and for one that joins no more GPUs than the one before it."""
    names = [tier.name for tier in tiers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SpecError(f"{option}: {twice}: given twice", "give each tier a name of its own")
    sized = [(tier.num_gpus, part) for tier, part in zip(tiers, parts, strict=True) if tier.num_gpus is not None]
    for (fewer, _), (more, part) in pairwise(sized):
        if more <= fewer:
            ordered = [inner for _, inner in sorted(sized)]
            raise SpecError(
                f"{option}: {part!r} joins no more GPUs than the tier before it, {fewer}",
                f"write them from the inside to the outside, as in {option} {','.join([*ordered, parts[-1]])}",
            )


def tiers_text(tiers: tuple[LinkTier, ...]) -> str:
    """The tiers as `parse_tiers` reads them."""
    return ",".join(
        f"{tier.name}:{tier.num_gpus or _ALL}:{tier.gb_per_s:g}"
        + (f":{tier.oversubscription:g}x" if tier.oversubscription > 1 else "")
        for tier in tiers
    )
