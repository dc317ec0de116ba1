"""Seconds of every pipeline's stages, from the passes of those ranks that were seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.observe.case import Case
from planner.observe.ideal.grid import Grid
from planner.observe.ideal.reference import Reference, reference_of
from planner.observe.measured import RankPasses
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
    reference: Reference | None
    """Seconds that stages should take, by the plan or the earlier run."""
    holds_exchanges: bool
    sizes: tuple[tuple[float, ...], ...]
    """Relative sizes of each pipeline's micro-batches; empty where they are alike."""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, passes: Sequence[RankPasses], grid: Grid | None, case: Case) -> Workers | None:
        """The seconds of all stages of the pipelines that were seen; None where nobody knows the ranks' stages."""
        seen = [one for one in passes if one.stage is not None and one.forward_s is not None and one.backward_s]
        if not seen:
            return None
        ranks = _placed(seen)
        num_stages = grid.pp if grid else 1 + max(stage for _, stage in ranks)
        holds = all(one.holds_exchanges for one in seen)
        num_pipelines = 1 + max(pipeline for pipeline, _ in ranks)
        passes_s = np.full((num_pipelines, num_stages, 2), np.nan)
        exchanges_s = np.full((num_pipelines, num_stages), np.nan)
        for place, own in ranks.items():
            passes_s[place] = np.max([seconds_of(one) for one in own], axis=0)
            exchanges_s[place] = min(one.exchanges_s or 0.0 for one in own)
        found = cls(
            passes_s, exchanges_s, ranks, reference_of(case, num_stages, holds), holds, _sizes(ranks, num_pipelines)
        )
        return found._filled()

    def _filled(self) -> Workers:
        """The same with the stages that nobody saw: as in other pipelines, or as the plan has them beside others."""
        middle, notes = self.seen_s, []
        unseen = np.isnan(middle).any(axis=1)
        missing = spans(np.flatnonzero(unseen).tolist())
        if unseen.any() and self.reference is not None:
            should_s, source = self.reference.passes_s, self.reference.source
            middle = np.where(np.isnan(middle), should_s * np.nanmedian(middle / should_s, axis=0), middle)
            notes.append(f"no file shows stage {missing}: {source} seconds of it × what the others take of theirs")
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
    def has_peers(self) -> bool:
        """True where something says how long the passes of any rank should be."""
        stages = [stage for (_, stage), own in self.ranks.items() for _ in own[: 1 if self.holds_exchanges else None]]
        return self.reference is not None or len(stages) > len(set(stages))

    @property
    def seen_s(self) -> FloatArray:
        """The middle pipeline's seconds of each stage, of pipelines whose rank was seen; shape (stages, 2)."""
        seen = np.full(self.passes_s.shape, np.nan)
        for place in self.ranks:
            seen[place] = self.passes_s[place]
        return middle_of(seen)


def seconds_of(one: RankPasses) -> FloatArray:
    """Seconds of a rank's forward and backward."""
    return np.array([one.forward_s or 0.0, one.backward_s or 0.0])


def _placed(seen: Sequence[RankPasses]) -> dict[Place, tuple[RankPasses, ...]]:
    """The ranks of each pipeline's stages; if nobody knows those, all are in one of several stages."""
    keys = [one.pipeline for one in seen if one.pipeline is not None]
    if len(keys) < len(seen):
        keys = [0] * len(seen) if any(one.stage for one in seen) else list(range(len(seen)))
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    ranks: dict[Place, tuple[RankPasses, ...]] = {}
    for key, one in zip(keys, seen, strict=True):
        place = places[key], one.stage or 0
        ranks[place] = (*ranks.get(place, ()), one)
    return ranks


def _sizes(ranks: dict[Place, tuple[RankPasses, ...]], num_pipelines: int) -> tuple[tuple[float, ...], ...]:
    """The mean of what each pipeline's ranks show, of those that show any."""
    sizes = []
    for pipeline in range(num_pipelines):
        own = [one.microbatch_sizes for (p, _), held in ranks.items() if p == pipeline for one in held]
        shown = [one for one in own if one]
        alike = len({len(one) for one in shown}) == 1
        sizes.append(tuple(np.mean(shown, axis=0).tolist()) if alike else ())
    return tuple(sizes)


def middle_of(values: FloatArray) -> FloatArray:
    """Medians over the first axis, nan where nothing is known; of two the less: one of them may be slow."""
    known = ~np.isnan(values).all(axis=0)
    middle = np.full(values.shape[1:], np.nan)
    middle[known] = np.nanquantile(values[:, known], 0.5, axis=0, method="lower")
    return middle


def spans(numbers: Sequence[int]) -> str:
    """Whole numbers as text, neighbours together: `1 to 7, 9`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
