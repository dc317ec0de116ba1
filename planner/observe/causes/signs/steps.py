"""Signs in the steps' own seconds: how long, how uneven, and when they are longer.

Healthy runs set the thresholds: over 42 of MLPerf's the mean step is 1.004 times the median (at most 1.026), and 8 of
10 steps lie within 2% (docs/OBSERVE.md).
"""

from __future__ import annotations

from planner.observe.causes.signs.seen import Seen
from planner.observe.causes.signs.sign import Sign, sure
from planner.observe.measured import Outlier
from planner.report.format import seconds

_LEAST_STEPS = 20
"""Fewer say nothing of what happens now and then."""


def slower(seen: Seen) -> Sign | None:
    """The step beyond the upper end of its predicted interval."""
    return _beyond(seen, "was predicted") if _kind(seen) == "plan" else None


def slower_run(seen: Seen) -> Sign | None:
    """The step beyond what steps of the earlier run took."""
    return _beyond(seen, "in the earlier run") if _kind(seen) == "run" else None


def _kind(seen: Seen) -> str:
    return "" if seen.case.prediction is None else seen.case.prediction.kind


def _beyond(seen: Seen, held: str) -> Sign | None:
    prediction, step_s = seen.case.prediction, seen.step_s
    if prediction is None or step_s is None:
        return None
    high_s = (prediction.step_s_interval or (0.0, prediction.step_s))[1]
    noise_s = step_s * (0.01 + seen.case.observation.step_s_precision_fraction)
    gap_s = step_s - prediction.step_s
    more = f"{abs(gap_s) / prediction.step_s:.0%} {'more' if gap_s > 0 else 'less'} than {held}"
    return Sign(sure(step_s, high_s, noise_s), f"a step takes {seconds(step_s)}, {more}", max(0.0, gap_s))


def uneven(seen: Seen) -> Sign | None:
    """Steps that differ: the 10th and the 90th percentile far apart."""
    observation = seen.case.observation
    spread, step_s = observation.step_s_spread, seen.step_s
    if spread is None or step_s is None or observation.num_steps < _LEAST_STEPS:
        return None
    apart = (spread[1] - spread[0]) / step_s
    says = f"8 of 10 steps lie {apart:.0%} of the median apart"
    return Sign(sure(apart, 0.15, 0.04), says, max(0.0, (spread[1] - step_s) / 2))


def drifting(seen: Seen) -> Sign | None:
    """Steps that get longer from the begin to the end."""
    drift, step_s = seen.case.observation.drift_fraction, seen.step_s
    if drift is None or step_s is None:
        return None
    says = f"steps get {drift:.0%} longer from the begin to the end"
    return Sign(sure(drift, 0.06, 0.02), says, max(0.0, drift) * step_s / 2)


def spells(seen: Seen) -> Sign | None:
    """Spells of slow steps, one behind the other."""
    return _outliers(seen, "slow_spell", "in spells", 0.015)


def at_times(seen: Seen) -> Sign | None:
    """Single slow steps that nothing in the log explains."""
    return _outliers(seen, "unexplained", "now and then", 0.04)


def regularly(seen: Seen) -> Sign | None:
    """Slow steps at equal distances, which no checkpoint, evaluation or garbage collection of the log explains."""
    return _outliers(seen, "periodic", "regularly", 0.02, lambda outlier: not outlier.likely)


def collecting(seen: Seen) -> Sign | None:
    """Steps that the log's garbage collection makes longer."""
    return _outliers(seen, "periodic", "where garbage is collected", 0.01, lambda outlier: "garbage" in outlier.likely)


def saving(seen: Seen) -> Sign | None:
    """Time that checkpoints take: between steps, in them, and in the step after them."""
    observation, wall = seen.case.observation, seen.case.observation.wall
    found = _outliers(seen, "checkpoint", "after checkpoints", 0.03)
    between_s = wall.checkpoint_s if wall else 0.0
    if found is None or found.seconds is None:
        return None
    extra_s = found.seconds + between_s / observation.num_steps
    share = extra_s / (seen.step_s or 1.0)
    says = f"checkpoints take {seconds(extra_s)} of a mean step, {share:.1%} beside the median one"
    return Sign(sure(share, 0.03, 0.01), says, extra_s)


def _outliers(seen: Seen, kind: str, when: str, share: float, chosen: object = None) -> Sign | None:
    """Slow steps of one kind; they are worth a word from a share of all seconds on, known to a quarter of it."""
    observation, step_s = seen.case.observation, seen.step_s
    if step_s is None or observation.num_steps < _LEAST_STEPS or not observation.series.steps:
        return None
    wanted = chosen if callable(chosen) else lambda outlier: True
    rows: list[Outlier] = [row for row in observation.outliers if row.kind == kind and wanted(row)]
    extra_s = sum(row.extra_s for row in rows) / observation.num_steps
    count = sum(row.num_steps for row in rows)
    period = f", every {rows[0].period_steps:,} steps" if rows and rows[0].period_steps else ""
    says = f"{count:,} of {observation.num_steps:,} steps are longer {when}{period}, {seconds(extra_s)} of a mean step"
    return Sign(sure(extra_s / step_s, share, share / 4), says, extra_s)
