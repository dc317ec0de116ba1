"""Assumptions told with a plan: only those that matter, with the effect that setting them then has."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from planner.answer import Plan
from planner.cli.inputs import read_described, read_job
from planner.cli.options import JobOptions, LayoutOptions
from planner.errors import SpecError
from planner.layout.evaluate import evaluate
from planner.layout.price import reprice
from planner.layout.variation import other_assumptions, told_assumptions
from planner.physics.pricing import Pricing
from planner.specs.training import Parallelism

OPTIONS = LayoutOptions(model="deepseek-v3", gpus=256, hardware="h100", seq_length=4096, global_batch_size=512)


def _evaluated(**more: Any) -> Plan:
    asked = replace(OPTIONS, **more)
    job = read_described(asked, read_job(asked))
    layout = Parallelism(pp=8, dp=32, ep=32, micro_batch_size=1)
    return evaluate(job.model, job.cluster, job.training, layout, runtime=job.runtime_spec)


def test_each_line_tells_what_setting_its_option_does() -> None:
    now = _evaluated()
    assert len(now.assumptions) >= 3
    for line in now.assumptions:
        effect, option, value = re.match(r"([+-][\d.]+)% if .* \(--(\S+) (\S+)\)$", line).groups()  # type: ignore[union-attr]
        then = _evaluated(**{option.replace("-", "_"): value if option in ("assume", "switch") else float(value)})
        assert then.step.step_s / now.step.step_s - 1 == pytest.approx(float(effect) / 100, abs=6e-4), line
        assert abs(float(effect)) >= 2


def test_the_switches_of_a_run_that_is_described_are_told_and_those_of_a_plan_are_not() -> None:
    """The recipe of a plan says what its switches are worth."""
    now = _evaluated(switch="ep_overlap=false,dispatcher=alltoall")
    assert any("--switch dispatcher=deepep" in line for line in now.assumptions)
    assert not any("--switch" in line or "ep_overlap" in line for line in told_assumptions(reprice(now, now.best)))


def test_a_switch_that_needs_consent_or_breaks_a_rule_is_not_told() -> None:
    told = " ".join(_evaluated(switch="ep_overlap=true").assumptions)
    for name in ("bf16_gradients", "nan_checks", "shared_expert_overlap", "full_iteration"):
        assert name not in told


@pytest.mark.parametrize("runtime", ["torch-eager", "megatron"])
def test_what_a_trainer_has_no_switch_for_is_assumed_by_its_field(runtime: str) -> None:
    job = read_job(JobOptions(model="8b", gpus=16, hardware="h100", runtime=runtime))
    pricing = Pricing(model=job.model, training=job.training, cluster=job.cluster, runtime=job.runtime_spec)
    (words,) = (other.options for other in other_assumptions(pricing) if other.name == "host")
    assert words[0] == ("--assume" if runtime == "torch-eager" else "--switch")
    assert read_job(replace(OPTIONS, runtime=runtime, assume="cuda_graphs=true")).runtime_spec.cuda_graphs


def test_the_largest_effect_comes_first() -> None:
    effects = [abs(float(line.split("%")[0])) for line in _evaluated().assumptions]
    assert effects == sorted(effects, reverse=True)


def test_an_assumption_that_does_not_matter_is_not_told() -> None:
    alone = read_job(JobOptions(model="8b", gpus=1, hardware="h100", global_batch_size=8))
    told = evaluate(alone.model, alone.cluster, alone.training, Parallelism()).assumptions
    assert [line for line in told if "overlap" in line] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp_overlap=0", "--assume: 'tp_overlap' is unknown"),
        ("tp_overlap_fraction", "--assume: tp_overlap_fraction: '' is no number"),
        ("tp_overlap_fraction=2", "--assume: tp_overlap_fraction: 2"),
        ("tp_overlap_fraction=much", "--assume: tp_overlap_fraction: 'much'"),
        ("p2p_overlap=0.5", "--assume: p2p_overlap: '0.5' is no value of it"),
        ("network_gb_per_s=-1", "--assume: -1"),
    ],
)
def test_assumptions_that_make_no_sense_are_named(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_job(replace(OPTIONS, assume=text))
    assert caught.value.message.startswith(message)
    assert caught.value.hint
