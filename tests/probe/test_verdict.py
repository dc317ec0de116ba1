"""From measurements to a result: what is compared with the plan, what is only shown, what ranks did with their time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from probes import probe_result, probe_run

from planner.answer import Plan
from planner.probe.compare import bubble_fraction, run_checks
from planner.probe.result import RankResult, StepSeconds, TimedAction
from planner.specs.registry import load_model

pytest.importorskip("torch", reason="needs the probe extra (torch)")

from small_plans import SMALL, plan_of, small_plan

from planner.probe.compare import compare_exchanges, replayed_step_s
from planner.probe.plan_runs import PlannedRun, ranks_run
from planner.probe.plan_slice import RankGrid
from planner.probe.probe import ProbeOptions, judge_ranks
from planner.probe.result import ChunkSeconds, MeasuredRun, ProbedExchange, ProbedMemory, ProbeResult, RankOutOfMemory
from planner.probe.run_price import in_eager_torch, repriced
from planner.specs.model import ModelSpec


def test_what_ran_out_of_memory_is_held_against_the_stage_it_stands_for() -> None:
    plan = plan_of(load_model("8b"), 4, 8192, 64, pp=4)
    planned = ranks_run(plan, GPUS, 2)
    memory = RankOutOfMemory(rank=1, stage=1, phase="warm-up", message="")
    measured = MeasuredRun(run=planned.run, ranks=(), out_of_memory=memory)
    result = judge_ranks(plan, GPUS, planned, measured)
    assert result.predicted_bytes == plan.stages[3].memory.total_bytes != plan.stages[1].memory.total_bytes


GPUS = ProbeOptions(device="cuda")


def judged(plan: Plan, ran: ProbeResult, grid: RankGrid, stages: Sequence[int] = (0, 1)) -> ProbeResult:
    measured = MeasuredRun(run=ran.run, ranks=ran.ranks)
    return judge_ranks(plan, GPUS, PlannedRun(plan, ran.run, grid, stages), measured)


def compared_memory(plan: Plan, grid: RankGrid, stages: Sequence[int]) -> tuple[ProbeResult, dict[Any, Any]]:
    """What ranks that hold just what the plan says of them are said to hold."""
    run = ranks_run(plan, GPUS, grid.num_ranks).run
    memory = ProbedMemory(static_bytes=1, peak_allocated_bytes=1, peak_reserved_bytes=1, device_used_bytes=1)
    ran = probe_result(plan, lambda j: (1e-3, 2e-3), stages=range(grid.pp), mode="ranks", run=run, memory=memory)
    ranks = tuple(rank.model_copy(update={"steps": rank.steps * run.num_steps}) for rank in ran.ranks)
    result = judged(plan, ran.model_copy(update={"ranks": ranks}), grid, stages)
    return result, {(row.name, row.stage): row for row in result.comparisons}


def test_a_slice_with_less_dp_holds_what_the_plan_says() -> None:
    plan = plan_of(load_model("8b"), 16, 8192, 64, pp=4, dp=4)
    _, run, grid, stages, _ = ranks_run(plan, GPUS, 15)
    assert (grid, run.dp_stands_for) == (RankGrid(pp=4, dp=2, cp=1, tp=1, ep=1), 2)
    _, found = compared_memory(plan, grid, stages)
    planned = plan.stages[1].memory
    static, peak = found["static memory", 1], found["peak allocated", 1]
    assert static.predicted == planned.weights_bytes + planned.gradients_bytes + planned.optimizer_bytes
    assert peak.predicted == planned.peak_allocated_bytes
    assert (static.agrees, peak.agrees) == (False, False)


def test_before_a_step_under_zero_3_there_are_neither_gathered_weights_nor_gradients() -> None:
    plan = plan_of(load_model("8b"), 16, 8192, 64, runtime="torchtitan", pp=2, dp=8, zero_stage=3)
    _, found = compared_memory(plan, RankGrid(2, 8, 1, 1, 1), [0, 1])
    fp32_weights_and_moments = 3 * 4
    static = found["static memory", 0]
    assert static.predicted == pytest.approx(plan.stages[0].num_parameters / 8 * fp32_weights_and_moments)
    assert static.agrees is None


def test_a_slice_with_fewer_stages_holds_fewer_micro_batches_and_no_peak_is_judged() -> None:
    plan = plan_of(load_model("8b"), 16, 8192, 64, pp=4, dp=4)
    result, found = compared_memory(plan, RankGrid(2, 1, 1, 1, 1), [0, 3])
    assert (found["static memory", 0].agrees, found["peak allocated", 0].agrees) == (False, None)
    assert any("in flight as planned" in what for what in result.slice.extrapolated)


@pytest.mark.parametrize("exchange", ["p2p", "all_gather"])
def test_a_plans_ring_is_named_among_what_was_not_measured(exchange: str) -> None:
    plan = small_plan(cp=2)
    assert plan.runtime_spec.cp_comm_type == "all_gather", "as the probe's ranks do"
    runtime = plan.runtime_spec.model_copy(update={"cp_comm_type": exchange})
    plan = plan.model_copy(update={"runtime_spec": runtime})
    ran = probe_result(plan, lambda stage: (1e-3, 2e-3), mode="ranks", run=probe_run(plan, num_steps=1))
    result = judged(plan, ran, RankGrid(pp=2, dp=1, cp=2, tp=1, ep=1))
    assert any("by p2p" in what for what in result.slice.extrapolated) == (exchange == "p2p")


@pytest.mark.parametrize("loss", [2.5, float("nan")])
def test_ranks_on_gpus_are_compared_in_time_memory_and_loss(loss: float, capsys: pytest.CaptureFixture[str]) -> None:
    from planner.cli.output import show
    from planner.report.machines import render_probe as render

    plan = small_plan()
    memory = ProbedMemory(static_bytes=1, peak_allocated_bytes=2, peak_reserved_bytes=3, device_used_bytes=4)
    ran = probe_result(plan, lambda stage: (1e-3, 2e-3), mode="ranks", run=probe_run(plan, num_steps=1), memory=memory)
    step = StepSeconds(**{**ran.ranks[0].steps[0].model_dump(), "loss": loss})
    ranks = tuple(rank.model_copy(update={"steps": (step,)}) for rank in ran.ranks)
    result = judged(plan, ran.model_copy(update={"ranks": ranks}), RankGrid(pp=2, dp=1, cp=1, tp=1, ep=1))
    found = {(row.name, row.stage): row for row in result.comparisons}
    for name in ("forward", "backward", "optimizer", "wait for messages", "static memory", "peak allocated"):
        assert {(name, 0), (name, 1)} <= found.keys()
    assert found["peak reserved", 0].measured == 3
    # the first stage waits in the middle and at the end of 1f1b, the last one for its first micro-batch
    assert found["wait for messages", 0].predicted > found["wait for messages", 1].predicted > 0
    assert found["bubble", None].predicted == pytest.approx(1 / 3, abs=0.2)
    (finite,) = [check for check in result.checks if check.name == "finite"]
    assert finite.passed == (loss == 2.5)
    show(render(result))
    printed = " ".join(capsys.readouterr().out.split())
    assert ("(median of 1); loss 2.5000" if loss == 2.5 else "FAILED finite loss not finite") in printed


def test_exchanges_are_shown_beside_what_the_links_say() -> None:
    plan = small_plan(tp=2, pp=2, dp=2)
    ran = probe_result(plan, lambda stage: (1e-3, 2e-3), mode="ranks", run=probe_run(plan, num_steps=1))
    size = 2**30
    timed = [
        ProbedExchange(name=name, size=2, num_bytes=size, seconds=seconds, bus_gb_per_s=1.0)
        for name, seconds in (("tp all-reduce", 1e-3), ("gradient reduce-scatter", 2e-3))
    ]
    slow = timed[0].model_copy(update={"seconds": 5e-3})
    ranks = [
        rank.model_copy(update={"exchanges": (slow if number else timed[0], timed[1])})
        for number, rank in enumerate(ran.ranks)
    ]
    found = {one.name: one for one in compare_exchanges(plan.cluster, ran.run, ranks)}
    inner = plan.cluster.tiers[0]
    assert found["tp all-reduce"].measured == 5e-3
    # half of the bytes twice, or once, and a latency for each pass
    assert found["tp all-reduce"].predicted == pytest.approx(size / inner.bytes_per_s + 2 * inner.latency_s)
    scatter_s = size / 2 / inner.bytes_per_s + inner.latency_s
    assert found["gradient reduce-scatter"].predicted == pytest.approx(scatter_s)
    assert all(one.agrees is None for one in found.values())


STEP = StepSeconds(pipeline_s=1.0, reduce_s=0.0, optimizer_s=0.0, step_s=1.0, loss=1.0, gradient_norm=1.0)
FIRST = (("0F0", 0.5, 0.5, 2.0), ("0F1", 2.1, 2.1, 3.6), ("0B0", 3.6, 8.0, 9.0), ("0B1", 9.0, 12.0, 13.0))
LAST = (("1F0", 0.0, 3.0, 5.0), ("1B0", 5.0, 5.0, 7.5), ("1F1", 7.5, 7.5, 9.0), ("1B1", 9.0, 9.2, 11.0))
"""Action, ready, start, end: 1F1B of two stages and two micro-batches."""


def rank_of(stage: int, timed: Any, dp: int = 0, slower: float = 1.0) -> RankResult:
    actions = tuple(
        TimedAction(action=name, ready_s=slower * ready, start_s=slower * start, end_s=slower * end)
        for name, ready, start, end in timed
    )
    return RankResult(
        rank=2 * stage + dp, stage=stage, dp=dp, tp=0, torch_version="", device_name="cpu", num_parameters=1,
        steps=(STEP,), actions=actions, peak_in_flight_chunks=2 - stage,
    )  # fmt: skip


def test_a_slow_replica_counts_in_the_bubble() -> None:
    usual, slow = ([rank_of(0, FIRST, dp, slower), rank_of(1, LAST, dp, slower)] for dp, slower in ((0, 1.0), (1, 1.5)))
    assert bubble_fraction([*usual, *slow]) > bubble_fraction(slow)


def test_what_one_replica_did_otherwise_fails(make_run: Any) -> None:
    run = make_run(("1f1b", 2, 1, 2), dp=2, num_steps=1)
    ranks = [rank_of(stage, timed, dp) for dp in (0, 1) for stage, timed in enumerate((FIRST, LAST))]
    order, _, in_flight = run_checks(run, ranks)
    assert order.passed
    assert in_flight.passed
    ranks[2] = ranks[2].model_copy(update={"actions": ranks[2].actions[::-1], "peak_in_flight_chunks": 3})
    order, _, in_flight = run_checks(run, ranks)
    assert not order.passed
    assert in_flight.detail == "[3, 1] chunks at most, planned [2, 1]"


MODEL = ModelSpec.model_validate(SMALL)


@pytest.mark.parametrize("batch", [8, 10**7])
def test_stages_as_fast_as_planned_make_the_planned_step(batch: int) -> None:
    eager = in_eager_torch(plan_of(MODEL, 2, 32, batch, tp=1, cp=1, pp=2, dp=1), alone=True)

    def stages(factor: float) -> list[Any]:
        return [
            SimpleNamespace(chunks=[
                ChunkSeconds(
                    stage=stage,
                    forward_s=factor * float(cost.forward_s),
                    backward_s=factor * float(cost.input_grad_s + cost.weight_grad_s),
                    weight_grad_s=factor * float(cost.weight_grad_s),
                )
            ])
            for stage, cost in enumerate(repriced(eager).costs)
        ]  # fmt: skip

    planned_s = eager.step.step_s
    assert replayed_step_s(eager, stages(1.0)) == pytest.approx(planned_s)
    assert planned_s * 1.01 < replayed_step_s(eager, stages(2.0)) < planned_s * 2
