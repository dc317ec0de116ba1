"""Seconds of a micro-batch on each rank: from timers of all ranks, from the least and the most, and from traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_traces import GEMM, MadeTrace

from planner.observe.case import Case
from planner.observe.ideal.grid import grid_of
from planner.observe.ideal.passes import passes_of, planned_pass_s
from planner.observe.measured import JobFacts, Source, Timer
from planner.observe.observation import Observation
from planner.observe.traces.detect import Kind
from planner.observe.traces.recorded import read_recorded

US = 1e-6
STATED = {"tp": 2, "pp": 2, "cp": 1, "micro_batch_size": 1}


def case(*timers: Timer, **parallelism: Any) -> Case:
    facts = JobFacts(num_gpus=8, global_batch_size=8, run={"parallelism": {**STATED, **parallelism}})
    return Case(Observation(sources=(Source(path="a.log", format="megatron"),), facts=facts, timers=timers))


def timer(name: str, *ranks_s: float) -> Timer:
    per_rank_s = dict(enumerate(ranks_s))
    return Timer(name=name, min_s=min(ranks_s), max_s=max(ranks_s), num_values=1, per_rank_s=per_rank_s)


def test_timers_of_ranks_hold_all_micro_batches_of_a_step() -> None:
    forward = timer("forward-compute", *(0.4,) * 4, *(0.8,) * 4)
    passes = passes_of(case(forward, timer("backward-compute", *(1.2,) * 8)))
    assert [one.stage for one in passes] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [one.forward_s for one in passes] == pytest.approx([0.1] * 4 + [0.2] * 4)  # 8 sequences, dp 2: 4 each
    assert [one.backward_s for one in passes] == pytest.approx([0.3] * 8)
    assert all(one.holds_exchanges for one in passes)


def test_the_order_of_the_ranks_says_their_stage() -> None:
    both = timer("forward-compute", *(0.4,) * 8), timer("backward-compute", *(1.2,) * 8)
    assert [one.stage for one in passes_of(case(*both, rank_order="tp-cp-ep-pp-dp"))] == [0, 0, 1, 1, 0, 0, 1, 1]
    grid = grid_of(case(rank_order="tp-cp-ep-pp-dp"))
    assert grid is not None
    assert [grid.pipeline(rank) for rank in range(8)] == [0, 1, 0, 1, 4, 5, 4, 5]


def test_the_least_and_the_most_are_of_ranks_that_nobody_names() -> None:
    both = [
        Timer(name=name, min_s=low, max_s=high, num_values=3)
        for name, low, high in (("forward-compute", 0.4, 0.8), ("backward-compute", 1.2, 1.6))
    ]
    least, most = passes_of(case(*both))
    assert (least.rank, least.stage, least.forward_s, most.backward_s) == (None, None, 0.1, 0.4)
    assert {one.stage for one in passes_of(case(*both, pp=1))} == {0}


def test_no_passes_where_micro_batches_are_not_known_or_passes_run_together() -> None:
    both = timer("forward-compute", *(0.4,) * 8), timer("backward-compute", *(1.2,) * 8)
    known = case(*both)
    facts = known.observation.facts.model_copy(update={"global_batch_size": None})
    assert passes_of(Case(known.observation.model_copy(update={"facts": facts}))) == ()
    overlapped = {**known.observation.facts.run, "features": {"ep_overlap": True}}
    facts = known.observation.facts.model_copy(update={"run": overlapped})
    assert passes_of(Case(known.observation.model_copy(update={"facts": facts}))) == ()
    assert passes_of(case(both[0])) == ()


def test_a_trace_tells_computing_and_gaps_of_a_pass_without_its_exchanges(tmp_path: Path) -> None:
    trace = MadeTrace(0, groups={"0": ("default_pg", [0, 1]), "1": ("TENSOR_MODEL_PARALLEL_GROUP", [0, 1])})
    trace.step(1, 0, 990)
    for at in (0.0, 400.0):  # two micro-batches
        trace.add("user_annotation", "forward_step", at, 20)
        trace.kernel(GEMM, at + 10, 50, at + 1)
        trace.collective(at + 60, 30, at + 2, "1")
        trace.kernel(GEMM, at + 100, 40, at + 3)  # 10 µs after the exchange: the host was late
        trace.add("user_annotation", "backward_step", at + 30, 20)
        trace.kernel(GEMM, at + 150, 200, at + 31)
    files = {str(trace.write(tmp_path / "rank0.json")): Kind.KINETO}
    seen = Case(Observation(sources=(Source(path="a.json", format="kineto"),)), read_recorded(files))
    (one,) = passes_of(seen)
    assert (one.rank, one.stage, one.holds_exchanges) == (0, 0, False)
    assert one.forward_s == pytest.approx((50 + 10 + 40) * US)
    assert one.backward_s == pytest.approx(200 * US)
    assert one.exchanges_s == pytest.approx(30 * US)


def test_the_plans_passes_hold_exchanges_where_those_are_asked_for(make_plan: Any) -> None:
    plan = make_plan()
    of_plan = Case(Observation(sources=()), plan=plan)
    assert of_plan.candidate is not None
    with_s, without_s = (planned_pass_s(of_plan.candidate, 0, holds) for holds in (True, False))
    cost = of_plan.candidate.rank_costs[0]
    assert with_s[0] - without_s[0] == pytest.approx(float(cost.forward_total_s - cost.forward_s))
    host_s = of_plan.candidate.pricing.runtime.microbatch_overhead_s
    assert sum(without_s) == pytest.approx(float(cost.forward_s + cost.input_grad_s + cost.weight_grad_s) + host_s)
