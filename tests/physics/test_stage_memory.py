"""What a rank holds at its worst, read off a few rounds of a schedule, is what it holds over the whole step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toys import toy_model, toy_problem

from planner.layout.activations import activation_peaks_bytes, peaks_of_schedule
from planner.physics.stage_memory import fixed_workspace_bytes, stage_memory
from planner.schedule.orders import SCHEDULES, build_schedule, violation
from planner.shape import Shape

PP, NUM_MICROBATCHES = 4, 48


TRAINING = [name for name, kind in SCHEDULES.items() if kind.trains_one_copy]


@pytest.mark.parametrize(
    ("schedule", "vpp"),
    [(name, vpp) for name in TRAINING for vpp in (1, 2) if not violation(name, PP, vpp, NUM_MICROBATCHES)],
)
def test_a_few_rounds_hold_what_the_whole_step_holds(schedule: str, vpp: int) -> None:
    problem = toy_problem(toy_model(8), runtime="torch-eager", pp=(PP,))
    table, *_ = (table for table, *_ in problem.nodes())
    table = replace(table, shape=replace(table.shape, vpp=vpp, num_microbatches=NUM_MICROBATCHES))
    live_bytes = [float(stage + 1) for stage in range(PP * vpp)]
    whole = build_schedule(schedule, PP, vpp, NUM_MICROBATCHES)
    assert peaks_of_schedule(table.shape, schedule, live_bytes) == activation_peaks_bytes(whole, live_bytes)


@pytest.mark.parametrize(("pp", "vpp", "buffers"), [(1, 1, 0), (2, 1, 12), (4, 1, 24), (4, 2, 48)])
def test_torch_s_stages_have_buffers_for_every_micro_batch(pp: int, vpp: int, buffers: int) -> None:
    """Of 12: inputs and gradients of outputs, 2 B · 64 tokens · hidden size each; others reuse one."""
    problem = toy_problem(toy_model(8), runtime="torchtitan", pp=(1,))
    shape = Shape(pp=pp, vpp=vpp, dp=1, num_microbatches=12, seq_length=64, zero_stage=1)
    table, sent = problem.pricing.table(shape), 2 * 64 * problem.model.hidden_size
    assert fixed_workspace_bytes(problem.pricing, table) == buffers * sent
    runtime = problem.pricing.runtime.model_copy(update={"has_torch_stages": False})
    assert fixed_workspace_bytes(replace(problem.pricing, runtime=runtime), table) == (sent if pp > 1 else 0)


def test_unpipelined_fsdp_holds_two_layers_and_gradients_to_be_scattered() -> None:
    problem = toy_problem(toy_model(8), runtime="torchtitan", pp=(1,))
    table = problem.pricing.table(Shape(dp=4, num_microbatches=12, seq_length=64, zero_stage=3, shard_size=4))
    layer = max(part.parameters for part in table.layers.values())
    assert fixed_workspace_bytes(problem.pricing, table) == 2 * 2 * layer + 4 * max(layer, table.head.parameters)


def test_narrow_gradients_are_copied_for_the_optimizer() -> None:
    """Megatron-LM's takes fp32 ones: of two ranks' shards, once nothing else is held."""
    problem = toy_problem(toy_model(8), pp=(1,))
    table = problem.pricing.table(Shape(dp=2, num_microbatches=4, seq_length=16, zero_stage=1, shard_size=2))
    layer = table.layers[problem.model.kinds[0], "none"].times(8)
    narrow = problem.pricing.runtime.model_copy(update={"gradient_bytes": 2})
    held = {
        runtime.gradient_bytes: stage_memory(replace(problem.pricing, runtime=runtime), table, layer, 1000.0)
        for runtime in (problem.pricing.runtime, narrow)
    }
    copied = 4 * float(layer.parameters) / 2
    beside = held[2].activations_bytes + held[2].logits_bytes + held[2].workspace_bytes
    assert beside == pytest.approx(copied)
    assert held[4].activations_bytes + held[4].logits_bytes + held[4].workspace_bytes < copied
