"""Changed assumptions: what is unchanged prices as it was, and each change reaches the prices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.layout.variation import Variation
from planner.search.case import Case
from planner.search.search import search
from planner.search.why.explain import other_assumptions, other_limits, outcome
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime


def _case(model: str = "8b", runtime: str = "megatron", num_gpus: int = 16) -> Case:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=4096, global_batch_size=64)
    return Case(
        load_model(model),
        cluster,
        training,
        load_runtime(runtime),
        SearchLimits(top=1, time_limit_s=60.0, switches="default"),
    )


@pytest.fixture(scope="module")
def now() -> Plan:
    return search(_case())


def test_nothing_changed_keeps_the_choice_and_its_price(now: Plan) -> None:
    then = outcome(_case(), Variation("nothing changes", ()), now)
    assert then.kept_s == pytest.approx(now.step.step_s, rel=1e-9)
    assert then.kept_fits
    assert not then.moves(now.best, 0.005)


def test_a_choice_that_splits_backwards_keeps_its_price() -> None:
    """It was priced without the compiled layers that the trainer has otherwise."""
    case = _case(runtime="torchtitan").limited(schedule=("zb-v",), pp=(4,), tp=(1,), cp=(1,))
    chosen = search(case)
    assert outcome(case, Variation("nothing changes", ()), chosen).kept_s == pytest.approx(chosen.step.step_s)


def test_pins_can_be_dropped_and_are_named() -> None:
    pinned = _case().limited(tp=(8,), recompute=("full",))
    assert pinned.pins == {"tp": (8,), "recompute": ("full",)}
    assert pinned.free().pins == {}


@pytest.mark.thorough(0)
def test_a_slower_network_reaches_the_prices_of_the_choice(now: Plan) -> None:
    case = _case()
    slow = ClusterSpec(hardware=case.cluster.hardware, num_gpus=16, network_gb_per_s=5.0)
    then = outcome(case, Variation("a slow network", (), cluster=slow), now)
    assert then.kept_s > now.step.step_s
    assert then.chosen.step.step_s <= then.kept_s * 1.005


def test_a_choice_without_room_is_replaced(now: Plan) -> None:
    free_gib = now.cluster.hardware.memory_gib - now.best.worst_stage.memory.total_bytes / 2**30
    then = outcome(_case(), Variation("less room", (), limits={"memory_headroom_gib": free_gib + 1}), now)
    assert not then.kept_fits
    assert then.moves(now.best, 0.005)


def test_twice_the_batch_takes_the_choice_about_twice_as_long(now: Plan) -> None:
    (twice,) = (other for other in other_limits(_case()) if other.name == "batch")
    assert outcome(_case(), twice, now).kept_s == pytest.approx(2 * now.step.step_s, rel=0.1)


def test_limits_are_moved_in_the_cluster_itself() -> None:
    moved = {other.name: _case().under(other) for other in other_limits(_case())}
    assert moved["domain"].cluster.tiers[0].num_gpus == 16
    assert moved["domain"].cluster.node_size == 8
    assert moved["memory"].cluster.hardware.memory_gib == pytest.approx(1.1 * 79.1)
    assert "domain" not in {other.name for other in other_limits(_case(num_gpus=8))}


def test_only_assumptions_that_a_job_makes_are_changed() -> None:
    dense = {other.name for other in other_assumptions(_case())}
    sparse = {other.name for other in other_assumptions(_case("deepseek-v2-lite"))}
    eager = {other.name for other in other_assumptions(_case(runtime="torch-eager"))}
    assert sparse - dense == {"moe_imbalance"}
    assert "data_parallel_overlap" not in eager
    assert "network" not in {other.name for other in other_assumptions(_case(num_gpus=8))}
    assert "host" in dense
    replayed = replace(_case(), runtime=load_runtime("megatron").model_copy(update={"cuda_graphs": True}))
    assert "host" not in {other.name for other in other_assumptions(replayed)}


def test_waits_for_the_host_are_told_where_layers_are_small() -> None:
    layout = Parallelism(tp=8, micro_batch_size=1)
    for name, seq_length, waits in (("llama-3.2-1b", 2048, True), ("llama-3.1-405b", 8192, False)):
        cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
        plan = evaluate(load_model(name), cluster, TrainingSpec(seq_length=seq_length, global_batch_size=8), layout)
        told = [line for line in plan.assumptions if "--switch cuda_graph=full_iteration,nan_checks=false" in line]
        assert bool(told) == waits, name
        assert all(line.startswith("-") for line in told)


@pytest.mark.thorough(0)
def test_changes_have_the_same_outcomes_in_any_order(now: Plan) -> None:
    """What was worked out for one change is not taken for another."""
    changes = list(other_limits(_case()))[:2]
    alone = [outcome(_case(), change, now) for change in changes]
    assert len(alone) == len(changes) > 1
    assert [outcome(_case(), change, now) for change in changes[::-1]] == alone[::-1]
    assert len({one.kept_s for one in alone}) > 1
