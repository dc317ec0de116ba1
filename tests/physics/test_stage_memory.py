"""What a rank holds at its worst, read off a few rounds of a schedule, is what it holds over the whole step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toys import toy_cluster, toy_model, toy_problem, toy_training

from planner.layout.candidate import Candidate, Split, activation_peaks_bytes, even_counts, peaks_of_schedule
from planner.physics.layers import padded_vocab
from planner.physics.stage_memory import (
    fixed_bytes,
    fixed_workspace_bytes,
    relaxed_peak_bytes,
    stage_memory,
    static_bytes,
)
from planner.schedule.orders import SCHEDULES, build_schedule, chunks_in_flight, violation
from planner.shape import Shape
from planner.specs.training import ObjectiveSpec
from planner.trainers.load import RUNTIMES, has_dtype, load_runtime

PP, NUM_MICROBATCHES = 4, 48


TRAINING = [name for name, kind in SCHEDULES.items() if kind.trains_one_copy]

IN_DTYPES = [(dtype, name) for dtype in ("bf16", "fp8") for name in RUNTIMES if has_dtype(load_runtime(name), dtype)]
"""Every trainer in every dtype that it has."""


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


@pytest.mark.parametrize("alone", [False, True])
def test_log_probabilities_need_their_logits_when_nothing_else_is_held(alone: bool) -> None:
    """10 bytes of each, on the rank with the head, less what is on the host meanwhile."""
    problem = toy_problem(toy_model(8), pp=(1,))
    table = problem.pricing.table(Shape(dp=2, num_microbatches=4, seq_length=16, zero_stage=1, shard_size=2))
    objective = ObjectiveSpec(scored_tokens=10**6, scored_alone=alone)
    training = problem.pricing.training.model_copy(update={"objective": objective})
    pricing = replace(problem.pricing, training=training)
    layer = table.layers[problem.model.kinds[0], "none"]
    whole, beside = layer + table.head, []
    for part in (layer, whole):
        held = stage_memory(pricing, table, part, 1000.0)
        beside.append(held.activations_bytes + held.logits_bytes + held.workspace_bytes)
    freed = alone * float(whole.optimizer_bytes)  # Megatron's gradients stay
    assert beside[1] == pytest.approx(
        10 * 10**6 * float(padded_vocab(problem.model, table.shape, pricing.runtime)) - freed
    )
    assert beside[0] < beside[1]


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("dtype", "trainer"), IN_DTYPES)
def test_the_relaxation_is_never_above_the_exact_peak(trainer: str, dtype: str) -> None:
    """With the micro-batches that an order certainly holds, and any transient that the rank certainly needs."""
    problem = toy_problem(
        toy_model(8), toy_cluster(8), toy_training(16, dtype=dtype), trainer, cp=(1,), tp=(1, 2), micro_batch_size=(1,)
    )
    compared = 0
    for table, schedule, choice in list(problem.nodes())[::7]:
        shape, base = table.shape, choice.mode
        pp, vpp, microbatches = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
        candidate = Candidate(problem.pricing, table, Split(even_counts(8, pp * vpp), base), schedule)
        if base == "full":
            continue
        for rank, (cost, stage) in enumerate(zip(candidate.rank_costs, candidate.memory, strict=True)):
            chunks = [part for part, at in zip(candidate.costs, candidate.placement, strict=True) if at == rank]
            held = chunks_in_flight(schedule, pp, vpp, microbatches)[rank]
            live = sum(count * float(part.live_bytes) for count, part in zip(held, chunks, strict=True))
            relaxed = relaxed_peak_bytes(float(cost.static_bytes), live, float(cost.transient_bytes))
            assert relaxed + fixed_bytes(problem.pricing, table) <= stage.peak_allocated_bytes + 8
            compared += 1
    assert compared


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("dtype", "trainer"), IN_DTYPES)
def test_static_bytes_of_a_part_are_those_it_is_priced_with(trainer: str, dtype: str) -> None:
    """Weights that stay in 16 bits under 8-bit recipes too: the head, the embedding."""
    problem = toy_problem(toy_model(4, vocab_size=64_000), toy_cluster(8), toy_training(16, dtype=dtype), trainer)
    pricing = problem.pricing
    for shape in problem.shapes()[::17]:
        table = pricing.table(shape)
        for part in (table.embedding, table.head, *table.layers.values()):
            assert float(static_bytes(part, shape, pricing.runtime, dtype)) == pytest.approx(float(part.static_bytes))
