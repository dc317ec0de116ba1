"""Remedies: typed as they are written they give the price that they promise, break no rule, and are never slower."""

from __future__ import annotations

from functools import cache

import pytest
from remedy_jobs import JOBS, SLOWER, case_of, cause, plan_of_job, typed

from planner.observe.causes.hypotheses import HYPOTHESES
from planner.observe.causes.remedies import remedy_for
from planner.observe.observation import Remedy
from planner.observe.remedy.against import AGAINST, RECIPE
from planner.observe.remedy.change import runtime_of
from planner.observe.remedy.running import running
from planner.trainers.stated import stated_consents, stated_switches
from planner.trainers.switches import SWITCHES, written

PRICED = tuple(
    name for name, row in AGAINST.items() if name != "expert_imbalance" and (row.layouts or row.helpers or row.switches)
)
HELPED = {
    ("megatron", "exposed_dp"), ("megatron", "unfused_kernels"), ("megatron", "bubble"),
    ("megatron", "recompute_unneeded"), ("megatron", "host_bound"), ("bridge", "exposed_tp"),
    ("experts", "no_ep_overlap"), ("experts", "host_bound"), ("torchtitan", "unfused_kernels"),
    ("torchtitan", "recompute_unneeded"), ("primus", "unfused_kernels"), ("primus", "host_bound"),
    ("deepspeed", "exposed_dp"),
}  # fmt: skip
"""Pairs of a job and a cause that one of its switches, or its layout, is to blame for."""


@cache
def remedies_of(job: str) -> dict[str, Remedy]:
    """The remedies against each cause that are options, for a run of a job."""
    found = {name: remedy_for(case_of(job), cause(name)) for name in PRICED}
    return {name: remedy for name, remedy in found.items() if remedy is not None and remedy.options}


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("job", "name"), sorted(HELPED))
def test_what_is_to_blame_is_found(job: str, name: str) -> None:
    assert name in remedies_of(job)


@pytest.mark.thorough(3)
@pytest.mark.parametrize("job", JOBS)
def test_options_are_typed_and_give_what_they_promise(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    planned = plan_of_job(job)
    measured_s = planned.step.step_s * SLOWER
    distinct = {remedy.options: remedy for remedy in remedies_of(job).values() if "--allow" not in remedy.options}
    assert distinct
    for options, remedy in distinct.items():
        plan = typed(capsys, JOBS[job].command(options))
        assert remedy.step_s is not None
        assert remedy.step_s < measured_s
        assert plan.fits
        assert (plan.best.oom_probability or 0.0) <= max(0.1, planned.best.oom_probability or 0.0)
        assert not [warning for warning in plan.warnings if "refuses this layout" in warning]
        won_s = 0.0 if "the plan has it so" in remedy.says else measured_s - remedy.step_s
        assert plan.step.step_s == pytest.approx(planned.step.step_s - won_s), options


def test_consent_is_asked_for_in_words_that_plan_takes(capsys: pytest.CaptureFixture[str]) -> None:
    plan, remedy = plan_of_job("megatron"), remedies_of("megatron")["host_bound"]
    allow, names, *switches = remedy.options
    assert (allow, names) == ("--allow", "nan_checks")
    assert "changes checks" in remedy.says
    assert stated_consents(names, plan.runtime_spec, plan.cluster.hardware) == ("nan_checks",)
    assert stated_switches(switches[1], plan.runtime_spec) == {"cuda_graph": "full_iteration", "nan_checks": False}
    assert remedy.step_s is not None
    won_s = plan.step.step_s * SLOWER - remedy.step_s
    priced = typed(capsys, JOBS["megatron"].command(switches))
    assert priced.step.step_s == pytest.approx(plan.step.step_s - won_s)


@pytest.mark.parametrize("job", JOBS)
def test_values_that_change_numerics_are_not_chosen_without_consent(job: str) -> None:
    now = running(case_of(job))
    assert now is not None
    for remedy in remedies_of(job).values():
        if "--allow" in remedy.options or "--switch" not in remedy.options:
            continue
        stated = remedy.options[remedy.options.index("--switch") + 1]
        for name, _, value in (part.partition("=") for part in stated.split(",")):
            has = SWITCHES[name].value_of(runtime_of(now))
            assert value not in [written(other) for other in SWITCHES[name].consent if other != has]


def test_a_run_without_memory_left_is_not_told_to_fill_it() -> None:
    plan = plan_of_job("megatron")
    capacity = plan.cluster.hardware.memory_bytes
    free = case_of("megatron", peak_memory_bytes=plan.best.worst_stage.memory.peak_allocated_bytes,
                   peak_memory_kind="allocated")  # fmt: skip
    full = case_of("megatron", peak_memory_bytes=round(0.95 * capacity), peak_memory_kind="allocated")
    assert remedy_for(free, cause("recompute_unneeded")) is not None
    assert remedy_for(full, cause("recompute_unneeded")) is None


def test_a_fast_run_wins_in_proportion() -> None:
    slow, fast = (remedy_for(case_of("megatron", slower), cause("unfused_kernels")) for slower in (1.0, 0.5))
    assert slow is not None
    assert fast is not None
    assert slow.step_s is not None
    assert fast.step_s == pytest.approx(slow.step_s / 2)


def test_a_switch_that_is_planned_brings_back_no_more_than_the_plan() -> None:
    planned_s = plan_of_job("bridge").step.step_s
    slow, fine = (remedy_for(case_of("bridge", slower), cause("attention_kernel")) for slower in (1.05, 1.0))
    assert slow is not None
    assert slow.step_s == pytest.approx(planned_s)
    assert fine is None


def test_every_hypothesis_has_a_row_and_every_row_is_of_switches_that_exist() -> None:
    assert set(HYPOTHESES) <= {*AGAINST, RECIPE}
    assert {name for row in AGAINST.values() for name in (*row.switches, *row.helpers)} <= set(SWITCHES)


def test_nothing_helps_against_what_is_not_known() -> None:
    assert remedy_for(case_of("megatron"), cause("gremlins")) is None


def test_a_switch_that_has_no_cause_of_its_own_has_a_remedy() -> None:
    remedy = remedy_for(case_of("primus"), cause("recipe", where="dispatcher"))
    assert remedy is not None
    assert remedy.options == ("--switch", "dispatcher=deepep")
    assert "use_turbo_deepep: true" in remedy.says


@pytest.mark.parametrize(
    ("job", "name", "setting"),
    [
        ("megatron", "exposed_dp", "--overlap-grad-reduce"),
        ("megatron", "unfused_kernels", "without --no-bias-swiglu-fusion"),
        ("bridge", "exposed_tp", "with model.tp_comm_overlap=true"),
        ("torchtitan", "unfused_kernels", "CompileConfig(enable=True)"),
        ("deepspeed", "exposed_dp", '"overlap_comm": true'),
        ("primus", "unfused_kernels", "use_turbo_grouped_gemm: true"),
    ],
)
def test_settings_are_the_trainers_own(job: str, name: str, setting: str) -> None:
    assert setting in remedies_of(job)[name].says
