"""A standing in Prometheus' text exposition format 0.0.4, as node_exporter's textfile collector reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from planner.observe.follow.state import Standing


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: a gauge or a counter, and its samples."""

    name: str
    kind: str
    help: str
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)


GAUGES = (
    ("planner_step", "step", "Number of the last step."),
    ("planner_total_steps", "total_steps", "Number of the run's last step, as its log or its tokens say it."),
    ("planner_step_seconds", "step_s", "Seconds of the last step."),
    ("planner_median_step_seconds", "window_step_s", "Median seconds of the last steps."),
    ("planner_out_of_band_steps", "out_steps", "Steps in a row outside of the band."),
    ("planner_allowed_out_of_band_steps", "allowed_steps", "Steps in a row outside of the band that ring the alarm."),
    ("planner_drift_ratio", "drift_fraction", "Median of the last steps beyond that of the first steady ones."),
    ("planner_tokens_per_second", "tokens_per_s", "Tokens per second of the job, by the last steps."),
    ("planner_predicted_tokens_per_second", "predicted_tokens_per_s", "Tokens per second as predicted."),
    ("planner_mfu_ratio", "mfu", "Model FLOPs without recompute over the dense bf16 peak."),
    ("planner_predicted_mfu_ratio", "predicted_mfu", "The same as predicted."),
    ("planner_memory_bytes", "peak_memory_bytes", "Highest memory of a rank so far."),
    ("planner_predicted_memory_bytes", "predicted_memory_bytes", "Highest memory that torch allocates, as predicted."),
    ("planner_memory_growth_bytes_per_step", "memory_bytes_per_step", "Growth of memory with a step."),
    ("planner_predicted_bubble_ratio", "predicted_bubble_fraction", "Share of a step in which the pipeline waits."),
    ("planner_waits_ratio", "waits_fraction", "Share of a step in which passes do not compute, by timers."),
    ("planner_computing_ratio", "computing_fraction", "Share of a step in which passes compute, by timers."),
    (
        "planner_data_wait_ratio",
        "data_fraction",
        "Share of a step in which a rank waits for data, by timers.",
    ),
    ("planner_checkpoint_step", "checkpoint_step", "Last step before the last checkpoint."),
    ("planner_pace_seconds", "pace_s", "Wall seconds per step, with what comes between steps."),
    ("planner_eta_seconds", "eta_s", "Seconds until the run's last step."),
    ("planner_silent_seconds", "silent_s", "Seconds since the log last showed a step."),
)
"""Name, field and help of what is one number that may rise and fall."""
COUNTERS = (
    ("planner_steps_total", "num_steps", "Steps that were read, those made again included."),
    ("planner_restarts_total", "num_restarts", "Places where the step number fell back."),
    ("planner_lost_steps_total", "lost_steps", "Steps that were made again after a restart."),
    (
        "planner_allocator_retries_total",
        "num_alloc_retries",
        "Times that the allocator freed its cache.",
    ),
    ("planner_out_of_memory_total", "num_ooms", "Errors of allocations that failed."),
)
"""The same of what only grows."""


def metrics(found: Standing) -> Iterator[Metric]:
    """Every metric whose number is known."""
    log = {"log": found.source}
    for kind, rows in (("gauge", GAUGES), ("counter", COUNTERS)):
        for name, attribute, text in rows:
            value = getattr(found, attribute)
            if value is not None:
                yield Metric(name, kind, text, [(log, float(value))])
    if found.band_s is not None:
        bounds = zip(("low", "high"), found.band_s, strict=True)
        yield Metric(
            "planner_predicted_step_seconds",
            "gauge",
            "Seconds of a step that are as they should be.",
            [({**log, "bound": bound}, seconds) for bound, seconds in bounds],
        )
        inside = found.place in ("in band", "warm-up")
        yield Metric("planner_in_band", "gauge", "1 in the band or warming up, 0 outside.", [(log, float(inside))])
    yield Metric("planner_alarm", "gauge", "1 where it left its band, or is silent.", [(log, float(found.rings))])
    if found.causes:
        likely = {(cause.name, cause.where): cause.likelihood for cause in reversed(found.causes)}
        yield Metric(
            "planner_cause_likelihood",
            "gauge",
            "Probability of a cause by what the last steps show.",
            [({**log, "cause": name, "where": where}, value) for (name, where), value in likely.items()],
        )


def exposition(found: Standing) -> str:
    """The text of all metrics."""
    lines: list[str] = []
    for metric in metrics(found):
        lines += [f"# HELP {metric.name} {_escaped(metric.help)}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in metric.samples:
            words = ",".join(f'{name}="{_label(text)}"' for name, text in labels.items())
            lines.append(f"{metric.name}{{{words}}} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _label(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
