"""A run as it stands now: one object for the screen, for JSON lines and for Prometheus."""

from __future__ import annotations

from typing import Literal

from planner.answer import Interval
from planner.observe.follow.band import Place
from planner.observe.observation import Cause, Verdict
from planner.specs.base import Spec


class Standing(Spec):
    """A followed run, as its log shows it now; None for what is not known."""

    schema_version: Literal[1] = 1
    source: str
    """The log."""
    final: bool = False
    """True for the last one of a command."""
    step: int | None = None
    """The number of the last step."""
    total_steps: int | None = None
    num_steps: int = 0
    """Steps that were read, those made again included."""
    step_s: float | None = None
    """Seconds of the last step, or the mean of as many as the log's last line covers."""
    window_steps: int = 0
    window_step_s: float | None = None
    """The median of that many last steps."""
    recent_s: tuple[float, ...] = ()
    """Seconds of the last lines of steps, the oldest first."""
    band_s: Interval | None = None
    """The seconds of a step that are as they should be."""
    band_source: str = ""
    """A plan, an earlier run, or the run's own first steps."""
    predicted_step_s: float | None = None
    place: Place = "learning"
    out_steps: int = 0
    """Steps in a row outside of the band, until now."""
    allowed_steps: int = 0
    """As many of them ring the alarm."""
    rings: bool = False
    drift_fraction: float | None = None
    """The median of the last steps beyond that of the first steady ones, as a share of it."""
    tokens_per_s: float | None = None
    predicted_tokens_per_s: float | None = None
    mfu: float | None = None
    """By the planner's definition."""
    predicted_mfu: float | None = None
    printed_mfu: float | None = None
    peak_memory_bytes: int | None = None
    """The highest so far."""
    peak_memory_kind: str | None = None
    predicted_memory_bytes: int | None = None
    memory_bytes_per_step: float | None = None
    """Growth of the memory by its series; 0 where it stays as it is, None where no series is printed."""
    memory_full_step: int | None = None
    """The step at which a growing memory reaches what the GPU has."""
    num_alloc_retries: int | None = None
    num_ooms: int | None = None
    predicted_bubble_fraction: float | None = None
    """The share of a step in which the plan's pipeline waits."""
    waits_fraction: float | None = None
    """By timers: the share of a step in which forward and backward passes do not compute, pipeline waits above all."""
    computing_fraction: float | None = None
    """By timers: the share of a step in which they compute, in the middle between the fastest rank and the slowest."""
    predicted_computing_fraction: float | None = None
    data_fraction: float | None = None
    """By timers: the share of a step in which the slowest rank waits for its batch."""
    checkpoint_step: int | None = None
    """The last step before the last checkpoint."""
    evaluation_step: int | None = None
    num_restarts: int = 0
    lost_steps: int = 0
    """Steps that were made again after them."""
    pace_s: float | None = None
    """Wall seconds per step as it lately goes, with what comes between steps where the log has times."""
    eta_s: float | None = None
    """Seconds until the last step at that pace."""
    silent_s: float = 0.0
    """Seconds since the log last showed a step."""
    verdict: Verdict | None = None
    """By the last steps: as `plan observe` judges them."""
    causes: tuple[Cause, ...] = ()
    """The likely causes by the last steps, the likeliest first."""
    says: str = ""
    """The place of the run in one sentence."""
    notes: tuple[str, ...] = ()
