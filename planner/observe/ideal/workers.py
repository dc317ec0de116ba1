"""Seconds of every pipeline's stages, from the passes of those ranks that were seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from planner.layout.candidate import Candidate
from planner.observe.ideal.grid import Grid
from planner.observe.ideal.passes import planned_pass_s
from planner.observe.observation import RankPasses
from planner.shape import FloatArray

FORWARD, BACKWARD = 0, 1

Place = tuple[int, int]
"""(pipeline, stage), by their place in the arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class Workers:
    """Seconds of a micro-batch by pipeline, stage and pass.

    The ranks that share a stage of one pipeline wait for each other in every pass, so that the slowest of them counts.
    """

    passes_s: FloatArray
    """Seconds that are computed; shape (pipelines, stages, 2)."""
    exchanges_s: FloatArray
    """Exchanges inside of passes, beside that; shape (pipelines, stages)."""
    ranks: dict[Place, tuple[RankPasses, ...]]
    """The ranks that were seen."""
    planned_s: FloatArray | None
    """The plan's seconds of what the passes hold; shape (stages, 2)."""
    planned_exchanges_s: FloatArray | None
    holds_exchanges: bool
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, passes: Sequence[RankPasses], grid: Grid | None, candidate: Candidate | None) -> Workers | None:
        """The seconds of all stages of the pipelines that were seen; None where nobody knows the ranks' stages."""
        seen = [one for one in passes if one.stage is not None and one.forward_s is not None and one.backward_s]
        if not seen:
            return None
        ranks = _placed(seen, grid)
        num_stages = grid.pp if grid else 1 + max(stage for _, stage in ranks)
        holds = all(one.holds_exchanges for one in seen)
        planned = exchanges = None
        if candidate is not None:
            planned = np.array([planned_pass_s(candidate, stage, holds) for stage in range(num_stages)])
            full = np.array([planned_pass_s(candidate, stage, True) for stage in range(num_stages)])
            exchanges = (full - planned).sum(axis=1)
        num_pipelines = 1 + max(pipeline for pipeline, _ in ranks)
        passes_s = np.full((num_pipelines, num_stages, 2), np.nan)
        exchanges_s = np.full((num_pipelines, num_stages), np.nan)
        for place, own in ranks.items():
            passes_s[place] = slowest(own)
            exchanges_s[place] = min(one.exchanges_s or 0.0 for one in own)
        found = cls(passes_s, exchanges_s, ranks, planned, exchanges, holds)
        return found._filled()

    def _filled(self) -> Workers:
        """The same with the stages that nobody saw: as in other pipelines, or as the plan has them beside others."""
        middle, notes = self.seen_s, []
        unseen = np.isnan(middle).any(axis=1)
        missing = ", ".join(str(stage) for stage in np.flatnonzero(unseen))
        if unseen.any() and self.planned_s is not None:
            ratio = np.nanmedian(middle / self.planned_s, axis=0)
            middle = np.where(np.isnan(middle), self.planned_s * ratio, middle)
            notes.append(f"no file shows stage {missing}: the plan's seconds of it × what the others take of theirs")
        elif unseen.any():
            middle = np.where(np.isnan(middle), np.nanmedian(middle, axis=0), middle)
            notes.append(f"no file shows stage {missing}: taken to be as the others")
        exchanged = middle_of(self.exchanges_s)
        exchanged = np.where(np.isnan(exchanged), np.nanmedian(exchanged), exchanged)
        return replace(
            self,
            passes_s=np.where(np.isnan(self.passes_s), middle, self.passes_s),
            exchanges_s=np.where(np.isnan(self.exchanges_s), exchanged, self.exchanges_s),
            notes=tuple(notes),
        )

    @property
    def seen_s(self) -> FloatArray:
        """The middle pipeline's seconds of each stage, of pipelines whose rank was seen; shape (stages, 2)."""
        seen = np.full(self.passes_s.shape, np.nan)
        for place in self.ranks:
            seen[place] = self.passes_s[place]
        return middle_of(seen)


def slowest(ranks: Sequence[RankPasses]) -> tuple[float, float]:
    """Seconds of a forward and a backward that several ranks make together."""
    return max(one.forward_s or 0.0 for one in ranks), max(one.backward_s or 0.0 for one in ranks)


def _placed(seen: Sequence[RankPasses], grid: Grid | None) -> dict[Place, tuple[RankPasses, ...]]:
    """The ranks of each pipeline's stages; where the grid is not known, all in one pipeline if it has several stages."""
    numbers = [one.rank for one in seen if one.rank is not None]
    keys = [0] * len(seen) if any(one.stage for one in seen) else list(range(len(seen)))
    if grid and len(numbers) == len(seen):
        keys = [grid.pipeline(rank) // (grid.tp * grid.cp) for rank in numbers]
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    ranks: dict[Place, tuple[RankPasses, ...]] = {}
    for key, one in zip(keys, seen, strict=True):
        place = places[key], one.stage or 0
        ranks[place] = (*ranks.get(place, ()), one)
    return ranks


def middle_of(values: FloatArray) -> FloatArray:
    """Medians over the first axis, nan where nothing is known; of two the less: one of them may be slow."""
    known = ~np.isnan(values).all(axis=0)
    middle = np.full(values.shape[1:], np.nan)
    middle[known] = np.nanquantile(values[:, known], 0.5, axis=0, method="lower")
    return middle


def median_of_others(ranks: Sequence[RankPasses]) -> tuple[float, float]:
    """The middle forward and backward of some ranks."""
    return median(one.forward_s or 0.0 for one in ranks), median(one.backward_s or 0.0 for one in ranks)
