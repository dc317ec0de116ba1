"""The recipe is chosen with the layout: optimal among its bundles, legal, and with consent only where that is due."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import MOE, Problem, case_of, solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan
from planner.errors import Infeasible, SpecError
from planner.layout.evaluate import evaluate
from planner.search.case import Case
from planner.search.recipes import Recipes, pinned
from planner.search.search import plan
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime, switches_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules
from planner.trainers.switches import SWITCHES, Value

SLOW: dict[str, Any] = {
    "model": toy_model(6, moe=MOE), "cluster": toy_cluster(8, network_gb_per_s=5.0, nvlink_gb_per_s=40.0),
    "training": toy_training(32), "cp": (1,), "zero_stage": (1,), "micro_batch_size": (1, 2), "switches": None,
}  # fmt: skip
"""A mixture whose expert exchanges take longer than its products."""


def recipes_of(problem: Problem) -> Recipes:
    return Recipes.of(case_of(problem))


@cache
def of_job(name: str, hardware: str, num_gpus: int, dtype: str = "bf16", **limits: Any) -> Plan:
    model, cluster = load_model(name), ClusterSpec(hardware=load_hardware(hardware), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=4096, global_batch_size=1024, dtype=dtype)  # type: ignore[arg-type]
    return plan(model, cluster, training, limits=SearchLimits(**{name: _thawed(v) for name, v in limits.items()}))


def _thawed(value: Any) -> Any:
    return dict(value) if isinstance(value, frozenset) else value


@pytest.mark.thorough(2)
@pytest.mark.parametrize("tps", [(1,), (2,)])
def test_no_bundle_has_a_faster_layout(tps: tuple[int, ...]) -> None:
    """Every layout is replayed under every bundle that the search starts from."""
    problem = toy_problem(**(SLOW | {"tp": tps, "ep": (1, 4), "top": 1, "gap_fraction": 0.0}))
    answer, starts = solved(problem), recipes_of(problem).starts()
    best_s = min(replace(problem, runtime=runtime).best_step_s() for runtime in starts)
    assert len(starts) > 2
    assert answer.search.outcome != "feasible"
    assert answer.search.lower_bound_s <= best_s * (1 + 1e-6)
    assert answer.step.step_s <= best_s * 1.005


def test_a_mixture_on_slow_links_overlaps_its_exchanges_and_interleaves_for_it() -> None:
    chosen = of_job("qwen3-30b", "h100", 16)
    own = of_job("qwen3-30b", "h100", 16, switches="default")
    assert chosen.best.recipe["ep_overlap"] in (True, "delayed")
    assert chosen.parallelism.pp == 1 or chosen.parallelism.vpp > 1
    assert chosen.parallelism.recompute != "full"
    assert chosen.step.step_s < 0.97 * own.step.step_s
    assert own.best.recipe["ep_overlap"] is False
    assert own.best.offers == ()


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    trainer=st.sampled_from(["megatron", "torchtitan", "torch-eager", "nanotron"]),
    moe=st.booleans(),
    network=st.sampled_from([2.0, 50.0]),
    memory=st.sampled_from([2.0, 8.0, 80.0]),
    allowed=st.sets(st.sampled_from(["bf16_gradients", "bf16_moments", "nan_checks", "token_drop"])),
)
def test_what_is_chosen_is_legal_and_takes_nothing_without_consent(
    trainer: str, moe: bool, network: float, memory: float, allowed: set[str]
) -> None:
    problem = toy_problem(
        toy_model(8, **({"moe": MOE} if moe else {})), toy_cluster(8, memory_gib=memory, network_gb_per_s=network),
        toy_training(32), trainer, top=2, cp=(1,), switches=None, allow=tuple(sorted(allowed)),
    )  # fmt: skip
    try:
        answer = solved(problem)
    except Infeasible:
        return
    for layout in (answer.best, *answer.alternatives):
        runtime, chosen = layout.runtime_spec or answer.runtime_spec, layout.parallelism
        sizes = ("tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "num_microbatches", "zero_stage")
        shape = Shape.of(**{name: getattr(chosen, name) for name in sizes}, shard_size=chosen.shard_size)
        modules = chosen.recompute_modules
        setting = Setting(
            problem.model, problem.cluster, problem.training, runtime, shape, chosen.recompute, modules
        )  # fmt: skip
        assert [rule.says for rule in broken_recipe_rules(setting)] == []
        for name in switches_of(runtime):
            value = SWITCHES[name].value_of(runtime)
            own = SWITCHES[name].value_of(problem.runtime)
            assert value == own or value not in SWITCHES[name].consent or name in allowed


@pytest.mark.parametrize(
    ("job", "switch", "value", "changes"),
    [
        (("qwen3-30b", "h100", 16), "bf16_gradients", True, "numerics"),
        (("mixtral-8x22b", "h100", 64), "activation_offload", "moe_act", "where activations wait"),
    ],
)
def test_a_consent_buys_what_was_offered(job: tuple[str, str, int], switch: str, value: Value, changes: str) -> None:
    without = of_job(*job)
    offer = next(offer for offer in without.best.offers if offer.switch == switch)
    assert (offer.changes.split(":")[0], offer.allow) == (changes, (switch,))
    given = of_job(*job, allow=(switch,))
    assert given.best.recipe[switch] == value
    assert given.step.step_s <= offer.step_s * 1.005 < without.step.step_s * 1.005
    assert all(offer.switch != switch for offer in given.best.offers)
    unsearched = [" ".join(answer.search.unsearched) for answer in (without, given) if answer.search]
    assert [switch in left_out for left_out in unsearched] == [switch == "activation_offload", False]


def test_a_narrow_dtype_is_chosen_with_consent_only() -> None:
    wide, narrow = of_job("8b", "h100", 8), of_job("8b", "h100", 8, allow=("fp8",))
    assert (wide.training.dtype, narrow.training.dtype) == ("bf16", "fp8")
    assert narrow.step.step_s < wide.step.step_s
    assert any(offer.switch == "dtype" and offer.value == "fp8" for offer in wide.best.offers)


def test_pins_hold_and_the_rest_is_chosen_around_them() -> None:
    held = of_job("qwen3-30b", "h100", 16, switches=frozenset({"ep_overlap": False}.items()))
    free = of_job("qwen3-30b", "h100", 16)
    assert held.best.recipe["ep_overlap"] is False
    assert held.best.recipe["cuda_graph"] != "none"
    assert held.step.step_s > free.step.step_s
    assert "ep_overlap" not in held.search.searched.switches


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ({"warp_drive": True}, "warp_drive"),
        ({"ep_overlap": "sometimes"}, "'sometimes' is no value of it"),
        ({"ep_overlap": True, "shared_expert_overlap": True}, "does not go with shared_expert_overlap"),
        ({"cuda_graph": "full_iteration"}, "needs nan_checks=false"),
    ],
)
def test_pins_that_cannot_be_are_refused(switches: dict[str, Any], says: str) -> None:
    problem = toy_problem(**SLOW)
    limits = problem.limits.model_copy(update={"switches": switches})
    with pytest.raises(SpecError, match=says):
        pinned(Case(load_model("deepseek-v3"), problem.cluster, problem.training, problem.runtime, limits))


def test_switches_that_a_runtime_has_by_hand_stay() -> None:
    by_hand = load_runtime("megatron").model_copy(update={"ep_overlap_fraction": 0.3})
    problem = toy_problem(**SLOW, runtime=by_hand, tp=(1,), pp=(2,), ep=(4,), top=1)
    assert "ep_overlap" not in recipes_of(problem).free
    assert solved(problem).runtime_spec.ep_overlap_fraction == 0.3


def test_the_answer_is_priced_as_every_other_layout_is() -> None:
    """What `plan` says of its choice, `evaluate` says of the same layout under the same runtime."""
    answer = of_job("qwen3-30b", "h100", 16)
    chosen = answer.parallelism
    sizes = ("tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "schedule", "recompute_modules")
    layers = tuple(last - first for first, last in _chunks_in_order(answer))
    layout = Parallelism(**{name: getattr(chosen, name) for name in sizes}, layers_per_stage=layers)
    again = evaluate(load_model("qwen3-30b"), answer.cluster, answer.training, layout, runtime=answer.runtime_spec)
    assert again.step.step_s == pytest.approx(answer.step.step_s, rel=1e-9)


def _chunks_in_order(answer: Plan) -> list[tuple[int, int]]:
    return sorted(chunk for stage in answer.stages for chunk in stage.chunks)


def test_every_gain_is_of_the_same_layout_without_the_switch() -> None:
    answer = of_job("qwen3-30b", "h100", 16)
    gains = {gain.switch: gain for gain in answer.best.recipe_gains}
    assert {"ep_overlap", "dispatcher"} <= gains.keys()
    for gain in gains.values():
        assert not gain.replanned
        assert gain.value == answer.best.recipe[gain.switch]
        # switches that gain nothing went back to the trainer's own value, or never were at another
        assert gain.without_step_s >= answer.step.step_s * (1 - 1e-9)


@pytest.mark.parametrize(("hardware", "allow"), [("p5", ()), ("p5", ("dispatcher",)), ("h100", ())])
def test_a_dispatcher_whose_transport_is_unproven_is_an_offer(hardware: str, allow: tuple[str, ...]) -> None:
    """Over EFA, where only consent takes what rows are priced to gain."""
    cluster = ClusterSpec(hardware=load_hardware(hardware), num_gpus=64)
    training = TrainingSpec(seq_length=4096, global_batch_size=256)
    limits = SearchLimits(allow=allow, tp=(1,), pp=(2,), ep=(8,), micro_batch_size=(2,), top=1)
    found = plan(load_model("qwen3-30b-a3b"), cluster, training, limits=limits)
    free = hardware == "h100" or "dispatcher" in allow
    assert found.runtime_spec.sends_tokens_once == free
    assert any(offer.switch == "dispatcher" for offer in found.best.offers) == (not free)
