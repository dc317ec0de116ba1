"""Signs of the host: gaps in which a GPU has no work, short kernels, waiting for data."""

from __future__ import annotations

from statistics import median

from planner.observe.causes.signs.accounts import Pair
from planner.observe.causes.signs.seen import DATA, Rank, Seen
from planner.observe.causes.signs.sign import Sign, large, sure
from planner.observe.gap.terms import HOST_GAPS
from planner.report.format import seconds

_GAP_FRACTION, _GAP_UNPRICED = 0.03, 0.08
"""Shares of a step from which gaps are worth a word: beside a price of them, and where nothing says what is usual."""
_SHORT_US = 20.0
"""A launch takes 5 to 10 µs of its host: kernels of this length leave it behind."""
_DATA_FRACTION, _DATA_NOISE = 0.03, 0.008


def host_gaps(seen: Seen) -> Sign | None:
    """Time in which no rank's GPU has work because its host has not launched any; waits for data are not counted."""
    if not (seen.on_gpus or seen.earlier_ranks) or seen.step_s is None or not seen.pairs:
        return None
    known = [(_gaps_s(pair), pair.expected.parts.get(HOST_GAPS, 0.0) if pair.expected else 0.0) for pair in seen.pairs]
    found_s, due_s = min(known, key=lambda pair: pair[0] - pair[1])
    found_s = max(0.0, found_s - seen.profiled_extra_s)
    held = f", {seconds(due_s)} expected" if due_s else ""
    says = f"GPUs wait {seconds(found_s)} of a step for their hosts to launch work{held}"
    is_priced = any(pair.expected for pair in seen.pairs)
    share = _GAP_FRACTION if is_priced else _GAP_UNPRICED
    noise = share / 3 + 0.15 * due_s / seen.step_s
    return Sign(sure((found_s - due_s) / seen.step_s, share, noise), says, max(0.0, found_s - due_s))


def _gaps_s(pair: Pair) -> float:
    """Seconds of a rank's host gaps without those that its loader of data covers."""
    waited_s = pair.rank.mean(lambda step: sum(length for name, length in step.waits if DATA.search(name)))
    return pair.found.parts.get(HOST_GAPS, 0.0) - waited_s


def short_kernels(seen: Seen) -> Sign | None:
    """Kernels so short that their launches take as long."""
    lengths = []
    for rank in seen.on_gpus:
        count = rank.middle(lambda step: sum(family.num_kernels for family in step.families))
        if count:
            lengths.append(rank.middle(lambda step: step.compute_s) / count * 1e6)
    if not lengths:
        return None
    middle = median(lengths)
    return Sign(sure(_SHORT_US, middle, 5.0), f"the mean kernel takes {middle:.0f} µs")


def waits_for_data(seen: Seen) -> Sign | None:
    """Annotations of the loader of data that cover gaps."""
    if not seen.ranks or seen.wall_s is None:
        return None
    worst = max(seen.ranks, key=_data_s)
    found_s = _data_s(worst)
    says = f"{worst.name} waits {seconds(found_s)} of a step for data"
    return large(found_s / seen.wall_s, _DATA_FRACTION, _DATA_NOISE, says, found_s, _where(seen, worst))


def _where(seen: Seen, worst: Rank) -> str:
    """The rank where it is alone."""
    others = [_data_s(rank) for rank in seen.ranks if rank is not worst]
    return worst.name if others and max(others) < 0.5 * _data_s(worst) else ""


def _data_s(rank: Rank) -> float:
    """Mean seconds, since data may come late in some steps only."""
    found = [length for step in rank.steps for name, length in step.waits if DATA.search(name)]
    return sum(found) / len(rank.steps)


def data_timer(seen: Seen) -> Sign | None:
    """The trainer's own timer of its batches."""
    found_s, step_s = seen.case.observation.data_s, seen.step_s
    if found_s is None or step_s is None:
        return None
    says = f"the trainer's timer of batches shows {seconds(found_s)} of a step"
    return large(found_s / step_s, _DATA_FRACTION, _DATA_NOISE, says, found_s)


def begins_late(seen: Seen) -> Sign | None:
    """Steps at whose begin no rank works: the next batch is not there. Where no step is marked, a recording begins."""
    marked = [rank for rank in seen.ranks if all(step.number is not None for step in rank.steps)]
    ranks = [rank for rank in marked if rank.stage in (None, 0)]
    if not ranks or seen.wall_s is None:
        return None
    first_s = min(rank.middle(lambda step: step.first_idle_s) for rank in ranks)
    says = f"nothing runs in the first {seconds(first_s)} of a step"
    noise = 0.03 if any(rank.on_host for rank in ranks) else 0.015
    return large(first_s / seen.wall_s, 0.06, noise, says, first_s)
