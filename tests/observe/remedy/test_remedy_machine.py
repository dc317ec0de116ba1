"""Remedies against slow ranks and links, waits for data and memory: the step without them, and what to type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from remedy_jobs import JOBS, SLOWER, case_of, cause, plan_of_job, saved, typed

from planner.cli import main
from planner.observe.case import Case
from planner.observe.causes.remedies import remedy_for
from planner.observe.measured import JobFacts, MemorySeries
from planner.observe.observation import Observation
from planner.observe.remedy.machine import slow_host, uneven
from planner.observe.remedy.running import running

MEASURED_S = {job: plan_of_job(job).step.step_s * SLOWER for job in JOBS}


def beside_file(case: Case, path: str) -> Case:
    assert case.prediction is not None
    return replace(case, prediction=case.prediction.model_copy(update={"source": path}))


def test_a_slow_stage_gives_layers_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved("bridge", tmp_path)
    planned_s = plan_of_job("bridge").step.step_s
    remedy = remedy_for(beside_file(case_of("bridge"), file), cause("straggler_rank", 0.2 * planned_s, "stage 1"))
    assert remedy is not None
    assert remedy.options[:3] == ("rebalance", file, "--slow-stage")
    stage, _, factor = remedy.options[3].partition(":")
    assert stage == "1"
    assert 1.1 < float(factor) < 1.5
    assert main([*remedy.options, "-q"]) == 0
    assert "shorter" in capsys.readouterr().out
    assert remedy.step_s is not None
    assert SLOWER * planned_s * 0.85 < remedy.step_s < SLOWER * planned_s


def test_a_slow_rank_has_another_node_or_fewer(tmp_path: Path) -> None:
    file = saved("bridge", tmp_path)
    remedy = remedy_for(beside_file(case_of("bridge"), file), cause("straggler_rank", 0.1, "rank 11"))
    assert remedy is not None
    assert remedy.options == ("--from", file, "--gpus", "8")
    assert remedy.step_s == pytest.approx(MEASURED_S["bridge"] - 0.1)
    assert "GPU 3 of node 1" in remedy.says
    assert main([*remedy.options, "--time-limit", "0.3", "-q"]) == 0


def test_a_plan_without_a_file_is_not_named() -> None:
    remedy = remedy_for(beside_file(case_of("bridge"), "the options"), cause("straggler_rank", 0.1, "rank 3"))
    assert remedy is not None
    assert remedy.options == ()


def test_a_slow_network_is_priced_at_the_rate_that_explains_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    case = case_of("experts")
    now = running(case)
    assert now is not None
    lost_s = 0.01 * now.step_s
    remedy = remedy_for(case, cause("slow_link", lost_s, "pp"))
    assert remedy is not None
    assert remedy.options[0] == "--assume"
    assert "infiniband" in remedy.says
    assert remedy.step_s == pytest.approx(MEASURED_S["experts"] - lost_s)
    slow = typed(capsys, JOBS["experts"].command(remedy.options))
    assert slow.step.step_s == pytest.approx(now.step_s + lost_s, rel=2e-3)


def test_seconds_that_no_network_explains_have_no_rate() -> None:
    remedy = remedy_for(case_of("experts"), cause("slow_link", 100.0, "dp"))
    assert remedy is not None
    assert remedy.options == ()
    assert "nccl-tests" in remedy.says


def test_links_inside_a_node_are_measured_there() -> None:
    remedy = remedy_for(case_of("bridge"), cause("slow_link", 0.01, "tp"))
    assert remedy is not None
    assert remedy.options == ()
    assert "measure nvlink" in remedy.says
    assert "on a node" in remedy.says


@pytest.mark.parametrize("name", ["data_stall", "clocks", "garbage_collection"])
def test_the_step_without_the_cause(name: str) -> None:
    remedy = remedy_for(case_of("megatron"), cause(name, 0.2))
    assert remedy is not None
    assert remedy.step_s == pytest.approx(MEASURED_S["megatron"] - 0.2)


def test_no_step_below_what_was_predicted() -> None:
    case = case_of("megatron")
    assert case.prediction is not None
    remedy = remedy_for(case, cause("data_stall", MEASURED_S["megatron"]))
    assert remedy is not None
    assert remedy.step_s == case.prediction.step_s
    assert not remedy.is_priced


def test_trainers_name_their_own_settings() -> None:
    says = {
        (job, name): getattr(remedy_for(case_of(job), cause(name)), "says", "")
        for job in ("megatron", "primus", "torchtitan")
        for name in ("garbage_collection", "checkpoint_stall", "data_stall", "clocks")
    }
    assert "--manual-gc, --manual-gc-interval 100" in says["megatron", "garbage_collection"]
    assert "--async-save" in says["megatron", "checkpoint_stall"]
    assert "--num-workers" in says["megatron", "data_stall"]
    assert "nvidia-smi" in says["megatron", "clocks"]
    assert "amd-smi" in says["primus", "clocks"]


def test_segments_that_grow_are_named_as_the_vendor_does() -> None:
    nvidia, amd = (remedy_for(case_of(job), cause("fragmentation")) for job in ("megatron", "primus"))
    assert nvidia is not None
    assert nvidia.options == ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",)
    assert amd is not None
    assert amd.options == ("PYTORCH_HIP_ALLOC_CONF=expandable_segments:True",)
    assert "ROCm 7" in amd.says


def test_a_leak_says_when_the_memory_is_full() -> None:
    gib = 2**30
    series = (
        MemorySeries(kind="allocated", rank=3, steps=(0, 500), num_bytes=(10 * gib, 20 * gib)),
        MemorySeries(kind="reserved", rank=3, steps=(0, 500), num_bytes=(10 * gib, 60 * gib)),
    )
    capacity = plan_of_job("megatron").cluster.hardware.memory_bytes
    remedy, alone = (
        remedy_for(case, cause("leak"))
        for case in (
            case_of("megatron", memory_series=series), Case(Observation(sources=(), memory_series=series)),
        )
    )  # fmt: skip
    assert remedy is not None
    assert alone is not None
    assert remedy.says.endswith(f"the GPU is full after {(capacity - 20 * gib) / (10 * gib / 500):,.0f} more steps")
    assert "snapshot" in alone.says
    assert "more steps" not in alone.says


def test_without_a_plan_machines_have_remedies_all_the_same() -> None:
    alone = Case(Observation(sources=(), facts=JobFacts(trainer="torchtitan"), step_s=2.0))
    for name in ("straggler_rank", "slow_link", "data_stall", "clocks", "fragmentation", "expert_imbalance"):
        remedy = remedy_for(alone, cause(name, 0.5, "rank 3"))
        assert remedy is not None
        assert remedy.step_s in (None, 1.5)
    advice = remedy_for(Case(Observation(sources=(), facts=JobFacts(trainer="megatron"), step_s=2.0)),
                        cause("exposed_dp", 0.5))  # fmt: skip
    assert advice is not None
    assert "--overlap-grad-reduce --overlap-param-gather" in advice.says
    assert (advice.step_s, advice.is_priced) == (1.5, False)


def test_experts_are_priced_as_unbalanced_as_the_seconds_say() -> None:
    case = case_of("experts")
    now = running(case)
    assert now is not None
    lost_s = 0.1 * now.step_s
    seen = uneven(now, cause("expert_imbalance", lost_s))
    assert seen is not None
    assert seen.step_s == pytest.approx(now.step_s + lost_s, rel=1e-3)
    assert 1 < seen.pricing.training.moe_imbalance < 8
    remedy = remedy_for(case, cause("expert_imbalance", lost_s))
    assert remedy is not None
    assert remedy.step_s is not None
    assert remedy.step_s < MEASURED_S["experts"]
    assert remedy.options[:2] == ("--allow", "token_drop") or "--ep" in remedy.options


def test_no_imbalance_without_experts_or_seconds() -> None:
    dense, experts = running(case_of("megatron")), running(case_of("experts"))
    assert dense is not None
    assert experts is not None
    assert uneven(dense, cause("expert_imbalance", 0.1)) is None
    assert uneven(experts, cause("expert_imbalance")) is None
    assert uneven(experts, cause("expert_imbalance", 1e3)) is None
    remedy = remedy_for(case_of("experts"), cause("expert_imbalance"))
    assert remedy is not None
    assert "auxiliary loss" in remedy.says


def test_changes_against_a_slow_host_are_priced_under_it() -> None:
    case = case_of("experts")
    now = running(case)
    assert now is not None
    lost_s = 0.25 * now.step_s
    seen = slow_host(now, cause("host_bound", lost_s))
    assert seen is not None
    assert seen.step_s == pytest.approx(now.step_s + lost_s, rel=1e-2)
    plain, slow = (remedy_for(case, cause("host_bound", seconds)) for seconds in (None, lost_s))
    assert plain is not None
    assert slow is not None
    assert plain.step_s is not None
    assert slow.step_s is not None
    assert slow.step_s < plain.step_s < MEASURED_S["experts"]
