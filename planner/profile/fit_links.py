"""The rate and latency of links, fitted to timed exchanges."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.physics.communication import joined_fraction, num_hops
from planner.profile.fitting import Residuals
from planner.profile.record import Record
from planner.profile.tables import Table
from planner.shape import FloatArray
from planner.specs.hardware import HardwareSpec, LinkTier
from planner.specs.units import GB

UNKNOWN_NETWORK = LinkTier(
    name="network", gb_per_s=25.0, latency_us=10.0,
    source="Not measured: only this machine was there. 200 Gb/s a GPU assumed; write what yours has",
)  # fmt: skip


def measured_tiers(
    record: Record, known: HardwareSpec | None
) -> tuple[tuple[LinkTier, ...], list[tuple[str, Residuals]]]:
    """Link tiers fitted to timed exchanges, with their residuals. Tiers without exchanges are those of the known
    device, or assumed."""
    machine, table = record.measured.machine, record.table("exchange", "microseconds")
    if machine.device == "cpu":
        names: tuple[str, ...] = ("gloo",)
        tiers = [LinkTier(name="gloo", gb_per_s=1.0, latency_us=50.0, source="Not measured: one process")]
    elif known is not None:
        tiers = list(known.tiers)
        names = tuple(tier.name for tier in tiers[:2])
    else:
        node = LinkTier(name="node", num_gpus=machine.num_devices, gb_per_s=25.0, latency_us=10.0)
        tiers = [node, UNKNOWN_NETWORK] if machine.num_devices > 1 else [UNKNOWN_NETWORK]
        names = tuple(tier.name for tier in tiers)
    residuals = []
    levels = set(table.number("tier").astype(int).tolist()) if table.num_rows else set()
    for level in sorted(levels):
        number = min(level, len(tiers) - 1)
        rows = table.where(table.number("tier") == level)
        tiers[number], errors = fitted_tier(tiers[number], rows, innermost=level == 0, rated=known is not None)
        if level == 0 and known is None and machine.architecture.startswith("cdna"):  # no switch joins AMD's GPUs
            each_gb_per_s = tiers[number].gb_per_s / (machine.num_devices - 1)
            tiers[number] = tiers[number].model_copy(update={"link_gb_per_s": each_gb_per_s})
        residuals.append((f"exchange {names[number]}", Residuals.of(errors)))
    return tuple(tiers), residuals


def fitted_tier(tier: LinkTier, table: Table, innermost: bool, rated: bool) -> tuple[LinkTier, FloatArray]:
    """The tier with the rate and latency that explain exchanges best: seconds = moved / rate + hops · latency, by
    relative least squares. Also returns the log errors.

    With `rated`, a rate below the tier's own becomes a share of it.
    """
    size, num_bytes, seconds = table.number("size"), table.number("num_bytes"), table.seconds("microseconds")
    reduces = table.text("kind") == "all_reduce"
    moved = np.where(reduces, 2.0, 1.0) * num_bytes * (1 - 1 / size) / joined_fraction(tier, size)
    tree, ring = (num_hops(kind, size, 1, size, innermost) for kind in ("all_reduce", "all_gather"))
    hops = np.where(reduces, tree, ring)
    slowness, latency_s = np.linalg.lstsq(np.stack([moved / seconds, hops / seconds], axis=1), np.ones(len(seconds)))[0]
    if latency_s < 0 or slowness <= 0:  # all of it bandwidth
        slowness, latency_s = float(np.median(seconds / moved)), 0.0
    gb_per_s = 1 / slowness / GB
    share = gb_per_s / tier.gb_per_s if rated and gb_per_s <= tier.gb_per_s else 1.0
    evidence = f"{len(seconds)} exchanges over {size.max():.0f} ranks, {num_bytes.max() / 2**20:g} MiB at most"
    changes: dict[str, Any] = {
        "gb_per_s": tier.gb_per_s if share < 1 else gb_per_s,
        "efficiency_fraction": share,
        "latency_us": 1e6 * float(latency_s),
        "start_us": 0.0,
        "source": f"Measured: {evidence}",
    }
    return tier.model_copy(update=changes), np.asarray(np.log((moved * slowness + hops * latency_s) / seconds))
