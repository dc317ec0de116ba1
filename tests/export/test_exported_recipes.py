"""Recipes that obey the rules are exported whole, in every target's words, and come back as they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tables import beside

from planner.answer import Plan
from planner.export.export import bundle_of
from planner.export.import_run import read_configuration
from planner.export.launchers import megatron_environment
from planner.export.megatron.plan_options import SWITCH_OPTIONS
from planner.export.refusal import Inexpressible
from planner.export.spelling import recipe_of, setting_of, spelling_of
from planner.layout.evaluate import evaluate
from planner.layout.runs import parse_run
from planner.trainers.load import load_runtime, since_of, switches_of, versions_of
from planner.trainers.rules.recipe import broken_recipe_rules, has_effect
from planner.trainers.switches import SWITCHES

TABLES = beside(__file__)

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
    bridge = switches_of(load_runtime("bridge"))
    known = {name: values for name, values in switches_of(load_runtime("megatron")).items() if name in bridge}
    features = {name: rng.choice([v for v in values if v in bridge[name]]) for name, values in known.items()}
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
    raise AssertionError(f"no legal recipe among {features}")


def text_of(plan: Plan, target: str, name: str) -> str:
    return next(file.text for file in bundle_of(plan, [target]).files if file.name == name)


def read_back(plan: Plan, target: str) -> Plan:
    """The plan's export to a target, imported and priced again."""
    hardware = plan.cluster.hardware.name
    text = bundle_of(plan, [target]).files[0].text
    imported = read_configuration(text)
    assert imported.source == target
    assert imported.unknown == {}
    run = parse_run({"run": imported.complete(hardware=hardware, num_gpus=plan.cluster.num_gpus)})
    return evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=run.runtime)


@pytest.mark.thorough(3)
@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("target", ["megatron", "bridge"])
def test_legal_recipes_come_back(planned: Planned, target: str, job: str, seed: int) -> None:
    plan = some_recipe(planned, job, seed)
    again = read_back(plan, target)
    assert recipe_of(again, SWITCH_OPTIONS) == recipe_of(plan, SWITCH_OPTIONS)
    assert again.step.step_s == pytest.approx(plan.step.step_s, rel=1e-9)
    assert [s.memory.total_bytes for s in again.stages] == [s.memory.total_bytes for s in plan.stages]


VERSIONS = versions_of(load_runtime("megatron"))
SPELLED = {row.switch for row in SWITCH_OPTIONS}


def test_every_switch_but_gtp_which_multiplies_tp_has_words() -> None:
    assert {*switches_of(load_runtime("megatron"))} - SPELLED == {"gtp"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sorted(SPELLED & {*switches_of(load_runtime("megatron"))}))
def test_a_version_has_words_for_the_values_that_it_has(name: str, version: str) -> None:
    megatron = load_runtime("megatron")
    for value in switches_of(megatron)[name]:
        since = since_of(megatron, name, value)
        is_there = not since or VERSIONS.index(since) <= VERSIONS.index(version)
        modules = (SWITCHES[name].fields_of(value) or {}).get("graphed_modules", ())
        words = spelling_of(SWITCH_OPTIONS, name, "+".join(modules) or value, version)
        # a value without words is that of a trainer which is told nothing
        assert words == {} or (words is not None) == is_there, f"{name}={value} in {version}"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("", {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": ("attn", "moe_router")}),
        ("0.18", {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": ("attn", "moe_router")}),
        ("0.17", {"--cuda-graph-impl": "transformer_engine", "--cuda-graph-scope": ("attn", "moe_router")}),
        ("0.15", None),
    ],
)
def test_a_version_s_own_words(version: str, words: dict[str, Any] | None) -> None:
    assert spelling_of(SWITCH_OPTIONS, "cuda_graph", "attn+moe_router", version) == words


def test_a_value_that_a_version_lacks_is_refused_by_name(planned: Planned) -> None:
    plan = planned("qwen3-30b-a3b", 16, ep=16, features={"cuda_graph": "moe_router", "dispatcher": "deepep"})
    old = plan.model_copy(update={"runtime_spec": plan.runtime_spec.model_copy(update={"version": "0.15"})})
    with pytest.raises(Inexpressible, match=r"cuda_graph: Megatron core 0\.15 has no cuda_graph=moe_router"):
        bundle_of(old, "megatron")
    blackwell = planned("llama-3.1-8b", 16, hardware="b200", dtype="nvfp4")
    older = blackwell.runtime_spec.model_copy(update={"version": "0.14"})
    with pytest.raises(Inexpressible, match=r"dtype: Megatron-LM core 0\.14 has no nvfp4"):
        bundle_of(blackwell.model_copy(update={"runtime_spec": older}), "megatron")
    newer = plan.model_copy(update={"runtime_spec": plan.runtime_spec.model_copy(update={"version": "0.16"})})
    assert "--cuda-graph-scope moe_router moe_preprocess" in text_of(newer, "megatron", "launch.sh")


@pytest.mark.parametrize("features", TABLES["torchtitan_s_switches_come_back"])
@pytest.mark.parametrize("layout", TABLES["torchtitan_s_switches_come_back_1"])
def test_torchtitan_s_switches_come_back(planned: Planned, features: dict[str, Any], layout: dict[str, Any]) -> None:
    plan = planned("llama-3.1-8b", 16, runtime="torchtitan", features=features, **layout)
    text = text_of(plan, "torchtitan", "planned_recipe.py")
    imported = read_configuration(text)
    switches = switches_of(load_runtime("torchtitan"))
    expected = {name: SWITCHES[name].value_of(plan.runtime_spec) for name in switches}
    assert {name: imported.run["features"][name] for name in switches} == expected
    assert imported.run["parallelism"]["zero_stage"] == plan.parallelism.zero_stage
    assert read_back(plan, "torchtitan").best.step.step_s == plan.best.step.step_s


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("overlaps", [True, False])
def test_deepspeed_s_switches_come_back(planned: Planned, share: float, overlaps: bool) -> None:
    features = {"optimizer_offload": share, "overlap_grad_reduce": overlaps}
    plan = planned("llama-3.2-1b", 16, features=features)
    imported = read_configuration(text_of(plan, "deepspeed", "ds_config.json"))
    assert imported.run["features"] == features


def test_deepspeed_offloads_a_part_at_zero_3_only(planned: Planned) -> None:
    options: dict[str, Any] = {"features": {"optimizer_offload": 0.5}}
    with pytest.raises(Inexpressible, match="below ZeRO-3 it offloads all or none"):
        bundle_of(planned("llama-3.2-1b", 16, **options), "deepspeed")
    text = text_of(planned("llama-3.2-1b", 16, zero_stage=3, **options), "deepspeed", "ds_config.json")
    assert read_configuration(text).run["features"]["optimizer_offload"] == 0.5


@pytest.mark.parametrize(("trainer", "target", "name", "says"), TABLES["determinism_comes_back"])
def test_determinism_comes_back(planned: Planned, trainer: str, target: str, name: str, says: str) -> None:
    features = {"deterministic": True} | ({} if trainer == "torchtitan" else {"cross_entropy_fusion": False})
    features |= {} if trainer == "torchtitan" else {"tp_comm_overlap": False}
    text = text_of(planned("llama-3.1-8b", 16, runtime=trainer, features=features), target, name)
    assert says in text
    assert read_configuration(text).run["features"]["deterministic"] is True


@pytest.mark.parametrize(("job", "expected"), TABLES["environments"])
def test_the_environment_follows_from_the_recipe(
    planned: Planned, job: dict[str, Any], expected: dict[str, str | None]
) -> None:
    variables = megatron_environment(planned(**{"model": "llama-3.1-8b", "gpus": 16, **job}))
    assert {name: variables.get(name) for name in expected} == expected


@pytest.mark.parametrize(("model", "first"), [("gpt-oss-20b", "0.19"), ("llama-3.1-8b", "0.14")])
def test_models_that_came_with_a_version(planned: Planned, model: str, first: str) -> None:
    for version in ("0.14", "0.15", "0.20"):
        plan = planned(model, 16, runtime=f"megatron@{version}", seq_length=8192)
        warned = any("Megatron core" in warning for warning in plan.best.warnings)
        assert warned == (version < first)
        if warned:
            with pytest.raises(Inexpressible, match=f"Megatron core {version} has no .*, which came with {first}"):
                bundle_of(plan, "megatron")
        else:
            assert bundle_of(plan, "megatron").files


def test_a_graph_of_the_iteration_waits_for_copies_to_the_host(planned: Planned) -> None:
    """Megatron core 0.18 and later refuse the one without the other."""
    graph = {"cuda_graph": "full_iteration", "nan_checks": False, "activation_offload": "core_attn+attn_proj"}
    option = "--fine-grained-offloading-max-inflight-offloads"
    assert f"{option} 1" in text_of(planned("llama-3.1-8b", 16, features=graph), "megatron", "launch.sh")
    eager = planned("llama-3.1-8b", 16, features=graph | {"cuda_graph": "none"})
    assert option not in text_of(eager, "megatron", "launch.sh")


@pytest.mark.thorough(3)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("job", JOBS)
def test_a_version_exports_what_its_rules_allow(planned: Planned, job: str, version: str) -> None:
    """The rules that the exporter refuses by are those that the search obeys; all else has words in every version."""
    model, gpus, options = JOBS[job]
    rng = random.Random(f"{job} {version}")
    runtime = load_runtime(f"megatron@{version}")
    features = {name: rng.choice(values) for name, values in switches_of(runtime).items()}
    # whole graphs of published runs imply other switches, which this version may not have
    features |= {name: False for name in ("fused_experts", "ep_overlap") if name not in features}
    plan = planned(model, gpus, runtime=f"megatron@{version}", features=features, **options)
    setting = setting_of(plan)
    broken = {rule.switch for rule in broken_recipe_rules(setting) if has_effect(rule.switch, setting)}
    broken.discard("overlap_param_gather")  # left out with a note
    if broken:
        with pytest.raises(Inexpressible) as caught:
            bundle_of(plan, "megatron")
        assert {reason.name for reason in caught.value.reasons} == broken
    else:
        assert "MODEL_ARGS" in bundle_of(plan, "megatron").files[0].text


@pytest.mark.parametrize(("target", "runtime"), TABLES["a_trainer_is_told_all_of_its_own_plans"])
def test_a_trainer_is_told_all_of_its_own_plans(planned: Planned, target: str, runtime: str) -> None:
    plan = planned("llama-3.1-8b", 16, tp=2, runtime=runtime)
    assert not any("priced for" in note for note in bundle_of(plan, target).notes)
