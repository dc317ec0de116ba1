"""Moves: what rules ask for is moved along, and layouts are as `plan evaluate` has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from remedy_jobs import JOBS, case_of, plan_of_job

from planner.layout.candidate import Candidate
from planner.layout.recipe import under
from planner.observe.remedy.change import broken_rule, near, options_between, recompute_of, takes
from planner.observe.remedy.moves import consented, fewer_recomputed, micro_batch, schedules, switch, with_switch
from planner.observe.remedy.running import running
from planner.trainers.stated import switched


def now_of(job: str) -> Candidate:
    now = running(case_of(job))
    assert now is not None
    return now


@pytest.mark.parametrize("job", JOBS)
def test_the_layout_itself_is_no_change(job: str) -> None:
    now = now_of(job)
    same = near(now)
    assert same is not None
    assert same.step_s == pytest.approx(now.step_s)
    assert same.memory == now.memory
    assert options_between(now, same) == ()
    assert takes(same, now)


def test_a_switch_takes_along_what_its_rules_need() -> None:
    now = now_of("megatron")
    gathered = with_switch(now, "overlap_param_gather", True)
    assert gathered is not None
    assert options_between(now, gathered) == ("--switch", "overlap_grad_reduce=true,overlap_param_gather=true")
    assert with_switch(now, "cuda_graph", "full_iteration") is None
    (graphed,) = consented("cuda_graph")(now)
    assert options_between(now, graphed) == ("--switch", "cuda_graph=full_iteration,nan_checks=false")


def test_a_run_that_breaks_a_rule_is_helped_all_the_same() -> None:
    now = now_of("experts")
    broken = under(now, switched(now.pricing.runtime, {"ep_overlap": True}))
    rule = broken_rule(broken, now)
    assert rule is not None
    assert "vpp" in rule.says
    assert broken_rule(broken, broken) is None
    assert list(switch("overlap_grad_reduce", "cross_entropy_fusion")(broken))


def test_a_full_gpu_takes_nothing_that_needs_more() -> None:
    now = now_of("megatron")
    full = now.priced_as(replace(now.pricing, headroom_bytes=now.pricing.headroom_bytes + 1e12))
    assert not full.fits
    assert list(fewer_recomputed(full)) == []
    assert all(max(moved.excess_bytes) <= max(full.excess_bytes) for moved in schedules(full))


def test_fewer_layers_are_recomputed_in_every_way_that_fits() -> None:
    found = [recompute_of(moved) for moved in fewer_recomputed(now_of("megatron"))]
    assert {"recompute": "none"} in found
    counts = [one["recompute_num_layers"] for one in found if "recompute_num_layers" in one]
    layers = plan_of_job("megatron").stages[0].num_layers
    assert counts == list(range(1, layers))
    assert any(one["recompute"] == "selective" for one in found)


def test_micro_batches_keep_the_batch() -> None:
    now = now_of("megatron")
    (twice,) = micro_batch(larger=True)(now)
    assert int(twice.shape.micro_batch_size) * twice.num_microbatches == now.num_microbatches
    assert list(micro_batch(larger=False)(now)) == []
