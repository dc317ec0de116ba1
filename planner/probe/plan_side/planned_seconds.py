"""Seconds that the plan gives each virtual stage, for ranks that sleep and for the replay."""

from __future__ import annotations

from collections.abc import Sequence

from planner.answer import PricedLayout
from planner.probe.run import SleepSeconds
from planner.schedule.actions import Schedule
from planner.schedule.replay import Durations


def planned_seconds(layout: PricedLayout, order: Schedule, stages: Sequence[int]) -> tuple[SleepSeconds, ...]:
    """Planned seconds of every virtual stage, exchanges included. A stage's seconds are divided among its chunks by
    layers."""
    num_chunks_seen = [0] * order.pp
    seconds = []
    for rank in order.stage_to_rank[: order.num_model_stages]:
        stage = layout.stages[stages[rank]]
        layers = [last - first for first, last in stage.chunks]
        has_other_chunks = order.vpp != len(layers)
        share = 1 / order.vpp if has_other_chunks or not sum(layers) else layers[num_chunks_seen[rank]] / sum(layers)
        num_chunks_seen[rank] += 1
        input_grad_s = stage.backward_s - stage.weight_grad_s + stage.backward_comm_s
        seconds.append(
            SleepSeconds(
                share * (stage.forward_s + stage.forward_comm_s), share * input_grad_s, share * stage.weight_grad_s
            )
        )
    return tuple(seconds)


def scaled_seconds(planned: Sequence[SleepSeconds], mean_forward_s: float) -> tuple[SleepSeconds, ...]:
    """The seconds in the same proportions, scaled to a mean forward of `mean_forward_s`."""
    factor = mean_forward_s * len(planned) / sum(seconds.forward_s for seconds in planned)
    return tuple(SleepSeconds(*(factor * s for s in seconds)) for seconds in planned)


def replay_durations(seconds: Sequence[SleepSeconds]) -> Durations:
    """Seconds per virtual stage as the replay takes them."""
    return Durations(
        forward_s=[s.forward_s for s in seconds],
        input_grad_s=[s.input_grad_s for s in seconds],
        weight_grad_s=[s.weight_grad_s for s in seconds],
    )
