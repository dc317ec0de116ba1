"""Laws of one priced layout: its parts add up, and its replay is no shorter than its bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given

from laws.counting import law
from laws.jobs import Job, jobs
from planner.answer import StageMemory, StepBreakdown
from planner.schedule.bounds import any_order_bounds_s, in_flight_bounds_s
from planner.schedule.replay import replay

ITEMS = tuple(
    name for name in StageMemory.model_fields if name.endswith("_bytes") and name.split("_")[0] not in ("total", "peak")
)
"""Items of a stage's memory; frozen weights are a part of the weights, and what is reserved comes beside the peak."""
ROUNDED_BYTES = 8
"""Every item is rounded to whole bytes by itself."""


@law(30)
@given(jobs())
def test_stages_hold_each_layer_once(job: Job) -> None:
    stages, sizes = job.priced.stages, job.priced.parallelism
    assert [stage.stage for stage in stages] == list(range(sizes.pp))
    assert sum(stage.num_layers for stage in stages) == job.model.num_hidden_layers
    chunks = sorted(chunk for stage in stages for chunk in stage.chunks)
    assert (chunks[0][0], chunks[-1][1]) == (0, job.model.num_hidden_layers)
    assert all(before[1] == after[0] for before, after in pairwise(chunks))
    for stage in stages:
        assert len(stage.chunks) == sizes.vpp
        assert sum(last - first for first, last in stage.chunks) == stage.num_layers == sum(stage.recompute.values())
    held = [part for stage in stages for part in stage.holds]
    assert {"embedding", "head"} <= set(held)
    assert held.count("head") == 1


@law(50)
@given(jobs())
def test_parts_of_a_step_and_of_a_stages_memory_add_up(job: Job) -> None:
    step, tokens = job.priced.step, job.training.tokens_per_step
    parts_s = [getattr(step.breakdown, name) for name in StepBreakdown.model_fields]
    assert sum(parts_s) == pytest.approx(step.step_s, rel=1e-9)
    assert min(parts_s) >= -1e-9 * step.step_s
    assert step.tokens_per_s * step.step_s == pytest.approx(tokens, rel=1e-12)
    assert step.tokens_per_s_per_gpu * job.cluster.num_gpus == pytest.approx(step.tokens_per_s, rel=1e-12)
    assert 0 <= step.bubble_fraction < 1
    if step.step_s_interval is not None:
        assert step.step_s_interval[0] <= step.step_s <= step.step_s_interval[1]
    capacity_bytes = job.cluster.hardware.memory_bytes
    for stage in job.priced.stages:
        memory = stage.memory
        parts = [getattr(memory, name) for name in ITEMS if name not in ("frozen_weights_bytes", "reserved_bytes")]
        assert min(parts) >= 0
        assert 0 <= memory.frozen_weights_bytes <= memory.weights_bytes
        assert abs(sum(parts) - memory.peak_allocated_bytes) <= ROUNDED_BYTES
        assert memory.peak_allocated_bytes <= memory.total_bytes
        assert memory.peak_allocated_bytes + memory.reserved_bytes == memory.total_bytes
        if memory.total_bytes_interval is not None:
            assert memory.total_bytes_interval[0] <= memory.total_bytes <= memory.total_bytes_interval[1]
    fullest_bytes = max(stage.memory.total_bytes for stage in job.priced.stages)
    assert job.priced.fits == (fullest_bytes <= capacity_bytes) or abs(fullest_bytes - capacity_bytes) <= ROUNDED_BYTES


@law(30)
@given(jobs())
def test_a_replay_is_no_shorter_than_what_its_ranks_allow(job: Job) -> None:
    order, durations = job.candidate.order, job.candidate.durations
    timeline = replay(order, durations)
    splits = any(action.kind == "I" for actions in order.ranks for action in actions)
    free_s = any_order_bounds_s(durations, order.stage_to_rank, order.num_microbatches, splits_backward=splits)
    held = [int(chunks) for chunks in timeline.peak_in_flight_chunks]
    limited_s = in_flight_bounds_s(durations, order.stage_to_rank, order.num_microbatches, held, splits_backward=splits)
    assert free_s.max() <= limited_s.max() * (1 + 1e-9)
    assert limited_s.max() <= timeline.makespan_s * (1 + 1e-9)
    assert float(timeline.busy_s.max()) <= timeline.makespan_s * (1 + 1e-9)
