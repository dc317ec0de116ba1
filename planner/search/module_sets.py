"""The sets of modules of a layer that are worth recomputing, among those that the trainer can be told.

A trainer names parts of a layer (modules) that it can recompute by themselves. Recomputing a set of them saves some
bytes of a micro-batch and costs some seconds. The search tries every useful set: a set is useful if no other saves as
many bytes for fewer seconds, on the kernels of the job itself. First one bound is worked out for all sets together
(`ModuleSets.together`), since for most shapes no set is fast enough. Then each set gets its own bound, for the shapes
that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from planner.physics.cost import CostTable, PartCost
from planner.physics.pricing import Pricing
from planner.shape import FloatArray, IntArray
from planner.specs.training import Recompute

Modules = tuple[str, ...]

MAX_SETS = 8
"""Most sets that are tried; if there are more, those that lie most evenly between saving nothing and all are tried."""
SAMPLES = (0.0, 0.5, 1.0)
"""Kernels on which sets are compared: those that keep the least, the median and the most bytes of a micro-batch."""
TINY = 1e-9
"""Largest relative difference of two sums that count as equal."""
NEGLIGIBLE = 1e-3
"""Share of a layer's kept bytes below which a module is not worth recomputing."""


def useful_sets(pricing: Pricing, table: CostTable) -> tuple[Modules, ...]:
    """The sets of modules that the search tries, in the trainer's order of modules; the pricing's own set comes first.

    Here the seconds and bytes of a set are taken as the sums over its modules. That decides only which sets are tried,
    not what they cost.
    """
    own = pricing.selective_modules
    if len(pricing.runtime.recomputable_modules) < 2:
        return (own,)
    table = table.take(_samples(pricing, table))
    saved, seconds = [], []
    modules = []
    for module in pricing.runtime.recomputable_modules:
        alone = pricing.recomputing((module,)).selective_table(table)
        saved_bytes, again_s = _changes(pricing, alone, "selective")
        if (saved_bytes > NEGLIGIBLE * _kept_bytes(pricing, table)).any():
            modules.append(module)
            saved.append(saved_bytes)
            seconds.append(again_s)
    sets = [chosen for size in range(1, len(modules) + 1) for chosen in combinations(range(len(modules)), size)]
    if not sets:
        return (own,)
    member = np.array([[index in chosen for index in range(len(modules))] for chosen in sets], dtype=float)
    saved_by_all, again_by_all_s = _changes(pricing, table, "full")
    useful = _undominated(
        np.vstack([member @ np.array(saved), saved_by_all]), np.vstack([member @ np.array(seconds), again_by_all_s])
    )
    names = [tuple(modules[index] for index in sets[number]) for number in useful if number < len(sets)]
    return (own, *(chosen for chosen in _spread(names) if set(chosen) != set(own)))


def _samples(pricing: Pricing, table: CostTable) -> IntArray:
    """Rows of the table to compare sets on."""
    ranked = np.argsort(_kept_bytes(pricing, table), kind="stable")
    return np.array(sorted({int(ranked[round(share * (len(ranked) - 1))]) for share in SAMPLES}))


def _kept_bytes(pricing: Pricing, table: CostTable) -> FloatArray:
    """Bytes of a micro-batch that all layers keep without recomputing."""
    return _over_layers(pricing, table, "none", "live_bytes")


def _changes(pricing: Pricing, table: CostTable, mode: Recompute) -> tuple[FloatArray, FloatArray]:
    """Bytes that all layers save, and seconds that they take longer, in a recompute mode of the table."""
    saved = _over_layers(pricing, table, "none", "live_bytes") - _over_layers(pricing, table, mode, "live_bytes")
    again = _over_layers(pricing, table, mode, "total_s") - _over_layers(pricing, table, "none", "total_s")
    return saved, again


def _over_layers(pricing: Pricing, table: CostTable, mode: Recompute, quantity: str) -> FloatArray:
    parts = [(table.layers[kind, mode], count) for kind, count in pricing.kind_counts.items()]
    return np.atleast_1d(np.asarray(sum(count * getattr(part, quantity) for part, count in parts), dtype=float))


def _undominated(saved: FloatArray, seconds: FloatArray) -> list[int]:
    """Rows (sets) that no other row beats in both bytes and seconds, in at least one column (kernel)."""
    useful = []
    for row in range(len(saved)):
        no_worse = (saved >= saved[row]) & (seconds <= seconds[row])
        better = (saved > saved[row] * (1 + TINY)) | (seconds < seconds[row] * (1 - TINY))
        earlier = np.arange(len(saved))[:, None] < row  # of equal sets the smallest stays
        if not (no_worse & (better | earlier)).any(axis=0).all():
            useful.append(row)
    return sorted(useful, key=lambda row: float(saved[row].sum()))


def _spread(sets: Sequence[Modules]) -> list[Modules]:
    """At most `MAX_SETS` of the sets, chosen evenly over their order."""
    if len(sets) <= MAX_SETS:
        return list(sets)
    return [sets[round(index)] for index in np.linspace(0, len(sets) - 1, MAX_SETS)]


@dataclass(frozen=True)
class ModuleSets:
    """The sets of modules that are tried, each with the prices of all kernels."""

    pricings: dict[Modules, Pricing]
    tables: dict[Modules, CostTable]

    @classmethod
    def of(cls, pricing: Pricing, table: CostTable, sets: Sequence[Modules]) -> ModuleSets:
        """Price the sets; `table` has the kernels in all modes, the selective one for the pricing's own set."""
        pricings = {modules: pricing.recomputing(modules) for modules in sets}
        return cls(pricings, {modules: priced_as.selective_table(table) for modules, priced_as in pricings.items()})

    @cached_property
    def together(self) -> CostTable:
        """A table for one lower bound of all sets: a mixture of its plain and full layers is no dearer than any set.

        A layer in its full mode keeps the least bytes of any set, and each byte saved costs the fewest seconds that
        any set takes for it. So the layers of a set cost no less than some mixture of plain layers with these. A layer
        in its selective mode has the longest backward of any set, and hides the most of an exchange.
        """
        tables = list(self.tables.values())
        layers, mtp, mtp_recomputed = dict(tables[0].layers), tables[0].mtp, tables[0].mtp_recomputed
        for kind in dict.fromkeys(kind for kind, _ in layers):
            plain, sets = layers[kind, "none"], [table.layers[kind, "selective"] for table in tables]
            layers[kind, "full"], layers[kind, "selective"] = _cheapest_mixture(plain, sets), _slowest(plain, sets)
        if mtp is not None and mtp_recomputed:
            sets = [table.mtp_recomputed["selective"] for table in tables]
            mtp_recomputed = {"full": _cheapest_mixture(mtp, sets), "selective": _slowest(mtp, sets)}
        return replace(tables[0], layers=layers, mtp_recomputed=mtp_recomputed)


def _cheapest_mixture(plain: PartCost, sets: Sequence[PartCost]) -> PartCost:
    """A part that keeps the least bytes of any of `sets`, at the fewest seconds per byte saved of any of them."""
    saved = np.array([np.asarray(plain.live_bytes - part.live_bytes, dtype=float) for part in sets])
    again = np.array([np.asarray(part.total_s - plain.total_s, dtype=float) for part in sets])
    s_per_byte = np.where(saved > 0, np.maximum(again, 0.0) / np.where(saved > 0, saved, 1.0), np.inf).min(axis=0)
    most = np.maximum(saved.max(axis=0), 0.0)
    return replace(
        plain,
        input_grad_s=plain.input_grad_s + np.where(np.isfinite(s_per_byte), s_per_byte, 0.0) * most,
        live_bytes=plain.live_bytes - most,
    )


def _slowest(plain: PartCost, sets: Sequence[PartCost]) -> PartCost:
    """A part whose backward is the longest of any of `sets`, and so hides the most of an exchange."""
    longest_s = np.max([np.asarray(part.backward_total_s, dtype=float) for part in sets], axis=0)
    return replace(plain, input_grad_s=plain.input_grad_s + longest_s - plain.backward_total_s)
