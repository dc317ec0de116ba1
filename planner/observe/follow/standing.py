"""Works out where a followed run stands, from its last rows and from what was counted over all of them."""

from __future__ import annotations

import math
from statistics import median

from planner.observe.describe import memory_series
from planner.observe.follow.follower import Follower
from planner.observe.follow.state import Standing
from planner.observe.judge import verdict_of, with_mfu
from planner.observe.measured import MemorySeries, Timer
from planner.observe.observation import Cause, Observation, Prediction
from planner.observe.record import Record

SHOWN_ROWS = 60
_LEAST_FOR_PACE, _LEAST_FOR_GROWTH = 10, 12
_LEAST_GROWTH_FRACTION = 0.01
"""Memory that grows by less over its whole series is taken to stay as it is."""


def standing(
    follower: Follower,
    *,
    total_tokens: float | None = None,
    silent_s: float = 0.0,
    causes: tuple[Cause, ...] = (),
    final: bool = False,
    is_silent: bool = False,
) -> Standing:
    """The run as it stands. `total_tokens` of the whole run say its last step where the log does not."""
    watch, totals, prediction = follower.watch, follower.totals, follower.prediction
    record = follower.record()
    common = {"source": follower.where, "final": final, "silent_s": silent_s, "allowed_steps": watch.allowed_steps}
    if not record.numbers:
        return Standing(**common, says="no line of a step yet")  # type: ignore[arg-type]
    seen = follower.window(record)
    if follower.plan is not None:
        seen = with_mfu(seen, follower.plan)
    step, window_s, pace_s = record.numbers[-1], seen.step_s, _pace_s(record, seen.step_s)
    last = follower.last_step(total_tokens)
    total = None if last is None else last[1]
    left = None if total is None else max(0, total - step)
    found = Standing(
        **common,  # type: ignore[arg-type]
        step=step,
        total_steps=total,
        num_steps=totals.steps,
        step_s=record.seconds[-1],
        window_steps=seen.num_steps,
        window_step_s=window_s,
        recent_s=tuple(record.seconds[-SHOWN_ROWS:]),
        band_s=None if watch.band is None else (watch.band.low_s, watch.band.high_s),
        band_source="" if watch.band is None else watch.band.source,
        predicted_step_s=None if prediction is None else prediction.step_s,
        place=watch.place,
        out_steps=watch.out_steps,
        rings=watch.rings or is_silent,
        drift_fraction=window_s / totals.first_steady_s - 1 if window_s and totals.first_steady_s else None,
        tokens_per_s=seen.tokens_per_s,
        predicted_tokens_per_s=prediction.tokens_per_s or None if prediction else None,
        mfu=seen.mfu,
        predicted_mfu=prediction.mfu or None if prediction else None,
        printed_mfu=seen.printed_mfu,
        peak_memory_bytes=seen.peak_memory_bytes,
        peak_memory_kind=seen.peak_memory_kind,
        predicted_memory_bytes=prediction.peak_memory_bytes or None if prediction else None,
        num_alloc_retries=seen.num_alloc_retries,
        num_ooms=seen.num_ooms,
        checkpoint_step=totals.checkpoint_step,
        evaluation_step=totals.evaluation_step,
        num_restarts=totals.restarts,
        lost_steps=totals.lost_steps,
        pace_s=pace_s,
        eta_s=None if left is None or pace_s is None else left * pace_s,
        verdict=None if prediction is None or follower.is_own else verdict_of(seen, prediction)[0],
        causes=causes,
        notes=seen.notes,
        **_growth(follower, record, step),  # type: ignore[arg-type]
        **_shares(seen, prediction),  # type: ignore[arg-type]
    )
    said = f"no step for {silent_s / 60:.0f} minutes, where one takes {window_s or 0:.4g} s" if is_silent else None
    return found.model_copy(update={"says": said or sentence(found)})


def sentence(found: Standing) -> str:
    """The place of a run to its band, in words."""
    if found.band_s is None:
        return "learning the run's own band from its first steady steps: nothing was predicted"
    low_s, high_s = found.band_s
    band = f"the band of {low_s:.4g} to {high_s:.4g} s ({found.band_source})"
    if found.place == "in band":
        return f"in {band}"
    if found.place == "warm-up":
        return f"warm-up, held against {band}"
    return f"{found.place} {band} for {found.out_steps:,} steps"


def _pace_s(record: Record, window_s: float | None) -> float | None:
    """Wall seconds per step: the median of the last steps, and what all since the last start took beyond theirs.

    That is what comes between steps where lines have times, and long steps; None for too few.
    """
    first = record.backs[-1].row if record.backs else 0
    seconds, covers = record.seconds[first + 1 :], record.covers[first + 1 :]
    if window_s is None or len(seconds) < _LEAST_FOR_PACE:
        return None
    wall_s, steps = record.ends[-1] - record.ends[first], sum(covers)
    if not (math.isfinite(wall_s) and wall_s > 0):
        wall_s = math.fsum(s * n for s, n in zip(seconds, covers, strict=True))
    return window_s + max(0.0, wall_s / steps - median(seconds))


def _growth(follower: Follower, record: Record, step: int) -> dict[str, float | int | None]:
    """Growth of the memory by its series of the whole run, and the step at which it reaches the GPU's."""
    series = next(iter(memory_series(record)), None)
    per_step = None if series is None else growth_per_step(series)
    if not per_step or series is None:
        return {"memory_bytes_per_step": per_step}
    memory = follower.plan.cluster.hardware.memory_bytes if follower.plan else None
    if memory is None or series.num_bytes[-1] >= memory:
        return {"memory_bytes_per_step": per_step}
    return {
        "memory_bytes_per_step": per_step,
        "memory_full_step": step + math.ceil((memory - series.num_bytes[-1]) / per_step),
    }


def growth_per_step(series: MemorySeries) -> float | None:
    """Bytes by which memory grows with a step: from the middle of a series to its end, 0 where it stays as it is.

    The medians of the last two quarters are held against each other, so that neither the first steps, in which
    optimizer states and buffers are made, nor a single peak count. None where there are too few values.
    """
    quarter = len(series.steps) // 4
    if quarter * 4 < _LEAST_FOR_GROWTH:
        return None
    parts = [slice(len(series.steps) - 2 * quarter, len(series.steps) - quarter), slice(-quarter, None)]
    (early_step, late_step), (early, late) = (
        [median(column[part]) for part in parts] for column in (series.steps, series.num_bytes)
    )
    grown, third = late - early, median(series.num_bytes[quarter : 2 * quarter])
    is_steady = early - third > 0.25 * grown  # it grew before, too
    if late_step <= early_step or grown <= _LEAST_GROWTH_FRACTION * early or not is_steady:
        return 0.0
    return grown / (late_step - early_step)


def _shares(seen: Observation, prediction: Prediction | None) -> dict[str, float | None]:
    """Shares of a step: of computing and of waits, as predicted and by timers."""
    timers = {timer.name: timer for timer in seen.timers}
    shares: dict[str, float | None] = {}
    if prediction is not None and prediction.kind == "plan":
        shares["predicted_bubble_fraction"] = prediction.breakdown.get("bubble_s", 0.0) / prediction.step_s
        shares["predicted_computing_fraction"] = prediction.breakdown.get("compute_s", 0.0) / prediction.step_s
    forward, backward, both = (
        _middle(timers.get(name)) for name in ("forward-compute", "backward-compute", "forward-backward")
    )
    if seen.step_s and forward is not None and backward is not None and forward + backward <= seen.step_s:
        shares["computing_fraction"] = (forward + backward) / seen.step_s
        if both is not None and forward + backward <= both <= seen.step_s:
            shares["waits_fraction"] = (both - forward - backward) / seen.step_s
    if seen.step_s and seen.data_s is not None:
        shares["data_fraction"] = seen.data_s / seen.step_s
    return shares


def _middle(timer: Timer | None) -> float | None:
    return None if timer is None else (timer.min_s + timer.max_s) / 2
