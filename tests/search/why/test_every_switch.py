"""What every switch is worth with the rest planned again: the steps are those of plans with the switch pinned."""

from __future__ import annotations

import pytest

from planner import ClusterSpec, SearchLimits, TrainingSpec, load_model, load_runtime
from planner.layout.price import reprice
from planner.search.case import Case
from planner.search.search import plan
from planner.search.why import recipe as module
from planner.search.why.recipe import OtherValue, RecipeTable, other_values, recipe_table
from planner.trainers.load import switches_of
from planner.trainers.switches import Value

pytestmark = pytest.mark.thorough(0)  # a search for each value of each switch
LIMITS = SearchLimits(
    time_limit_s=3600, tp=(1,), cp=(1,), ep=(8,), pp=(1,), micro_batch_size=(1,), zero_stage=(1,), top=1,
    recompute=("none",),
)  # fmt: skip


def case(model: str = "deepseek-v2-lite", runtime: str = "megatron", **limits: object) -> Case:
    cluster = ClusterSpec(hardware="h100", num_gpus=8)
    training = TrainingSpec(seq_length=4096, global_batch_size=64)
    return Case(load_model(model), cluster, training, load_runtime(runtime), LIMITS.model_copy(update=limits))


@pytest.fixture(scope="module")
def table() -> RecipeTable:
    return recipe_table(case())


def row(table: RecipeTable, switch: str, value: Value) -> OtherValue:
    (found,) = (o for s in table.switches if s.switch == switch for o in s.others if o.value == value)
    return found


def test_every_value_of_every_switch_has_its_place(table: RecipeTable) -> None:
    has = switches_of(load_runtime("megatron"))
    assert {s.switch: {s.value, *(o.value for o in s.others)} for s in table.switches} == {
        name: set(values) for name, values in has.items()
    }
    others = [other for switch in table.switches for other in switch.others]
    assert all(other.rule or other.replanned for other in others)
    assert all((other.step_s is None) == (other.more_fraction is None) for other in others)


def test_a_step_is_that_of_a_plan_with_the_switch_pinned(table: RecipeTable) -> None:
    other = row(table, "cross_entropy_fusion", False)
    asked = case(switches={"cross_entropy_fusion": False})
    found = plan(asked.model, asked.cluster, asked.training, limits=asked.limits, runtime=asked.runtime)
    assert other.step_s == pytest.approx(found.step.step_s, rel=1e-12)
    assert other.parallelism == found.parallelism
    assert other.more_fraction == pytest.approx(found.step.step_s / table.step_s - 1)


def test_a_value_says_what_goes_with_it_what_refuses_it_and_what_it_changes(table: RecipeTable) -> None:
    other, refused = row(table, "overlap_grad_reduce", False), row(table, "fused_experts", True)
    assert (other.beside, other.rule) == ({"overlap_param_gather": False}, "")
    assert refused.rule.startswith("fused_experts needs experts")
    assert refused.step_s is None
    assert row(table, "bf16_gradients", True).changes == "numerics"
    assert row(table, "p2p_overlap", False).changes == ""


def test_without_time_the_values_are_priced_on_the_chosen_layout() -> None:
    asked, ticks = case(), []
    now = plan(asked.model, asked.cluster, asked.training, limits=asked.limits, runtime=asked.runtime)
    other, late = OtherValue(switch="overlap_param_gather", value=False), module.Deadline(0.0)
    done = module._replanned(asked, reprice(now, now.best), late, other)
    assert done.step_s is not None
    assert done.step_s >= now.step.step_s
    assert not done.replanned
    assert recipe_table(case(runtime="torch-eager"), lambda: ticks.append(1)).switches == ()
    assert len(ticks) == len(other_values(case(runtime="torch-eager"))) == 0
