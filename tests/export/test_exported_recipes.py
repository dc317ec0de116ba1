"""Recipes that obey the rules are exported whole, in every target's words, and come back as they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from planner.answer import Plan
from planner.export.common.recipe import recipe_of, setting_of
from planner.export.export import bundle_of
from planner.export.megatron.switches import SWITCH_OPTIONS
from planner.export.read import read_configuration
from planner.layout.evaluate import evaluate
from planner.layout.runs import parse_run
from planner.trainers.load import load_runtime, switches_of
from planner.trainers.rules.recipe import broken_recipe_rules
from planner.trainers.switches import SWITCHES

Planned = Callable[..., Plan]

JOBS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense": ("llama-3.1-70b", 64, {"tp": 4, "pp": 4, "vpp": 4}),
    "context": ("llama-3.1-8b", 32, {"tp": 2, "cp": 2, "hardware": "b200"}),
    "mixture": ("qwen3-30b-a3b", 16, {"ep": 16}),
    "pipeline": ("qwen3-235b-a22b", 256, {"tp": 2, "pp": 8, "vpp": 2, "ep": 32, "layers_per_stage": (5, *[6] * 14, 5)}),
    "latent": ("deepseek-v3", 512, {"pp": 8, "ep": 64, "layout": "Et*7|(t*8|)*6t*6mL"}),
    "rack": (
        "deepseek-v3", 256,
        {"pp": 2, "vpp": 2, "ep": 64, "hardware": "gb200", "dtype": "mxfp8", "layout": "Et*15|(t*16|)*2t*14mL"},
    ),
    "fsdp": ("llama-3.1-8b", 16, {"zero_stage": 3}),
}  # fmt: skip


def some_recipe(planned: Planned, job: str, seed: int) -> Plan:
    """A plan with switches at random: those that break a rule are taken back, one after the other."""
    rng = random.Random(f"{job} {seed}")
    model, gpus, options = JOBS[job]
    features = {name: rng.choice(values) for name, values in switches_of(load_runtime("megatron")).items()}
    for _ in range(2 * len(features)):
        plan = planned(model, gpus, **options, features=features)
        rule = next(broken_recipe_rules(setting_of(plan)), None)
        if rule is None:
            return plan
        plain = next(iter(SWITCHES[rule.switch].values))
        if rule.switch == "p2p_overlap":
            features[rule.switch] = True
        elif features.get(rule.switch, plain) == plain:
            features.pop(rule.switch, None)
        else:
            features[rule.switch] = plain
    raise AssertionError(f"{rule.switch} {rule.says}: {features}")


def read_back(plan: Plan, target: str) -> Plan:
    """The plan's export to a target, imported and priced again."""
    hardware = plan.cluster.hardware.name
    text = bundle_of(plan, [target]).files[0].text
    imported = read_configuration(text)
    assert imported.source == target
    assert imported.unknown == {}
    run = parse_run({"run": imported.complete(hardware=hardware, num_gpus=plan.cluster.num_gpus)})
    return evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=run.runtime)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("target", ["megatron", "bridge"])
def test_legal_recipes_come_back(planned: Planned, target: str, job: str, seed: int) -> None:
    plan = some_recipe(planned, job, seed)
    again = read_back(plan, target)
    assert recipe_of(again, SWITCH_OPTIONS) == recipe_of(plan, SWITCH_OPTIONS)
    assert again.step.step_s == pytest.approx(plan.step.step_s, rel=1e-9)
    assert [s.memory.total_bytes for s in again.stages] == [s.memory.total_bytes for s in plan.stages]
