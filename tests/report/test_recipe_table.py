"""The table of switches: what is chosen, what others cost, which rules refuse; within 80 columns."""

from __future__ import annotations

from pages import printed

from planner.answer import Plan
from planner.report.explain import render_recipe_table
from planner.search.why.recipe import OtherValue, RecipeTable, SwitchWorth
from planner.trainers.switches import Value


def worth(switch: str, value: Value, *others: OtherValue, has_effect: bool = True) -> SwitchWorth:
    return SwitchWorth(switch=switch, says="", value=value, has_effect=has_effect, others=others)


def other(switch: str, value: Value, **more: object) -> OtherValue:
    return OtherValue.model_validate({"switch": switch, "value": value, **more})


def shown(plan: Plan, *switches: SwitchWorth) -> str:
    text = printed(
        render_recipe_table(RecipeTable(job="a job", step_s=20.0, parallelism=plan.parallelism, switches=switches))
    )
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def test_values_stand_below_the_chosen_one_with_what_they_cost(make_plan: object) -> None:
    plan = make_plan()  # type: ignore[operator]
    text = shown(
        plan,
        worth(
            "ep_overlap", "delayed",
            other("ep_overlap", True, step_s=21.0, more_fraction=0.05, replanned=True),
            other("ep_overlap", False, step_s=24.0, more_fraction=0.2),
        ),
        worth(
            "cuda_graph", "none",
            other("cuda_graph", "full_iteration", beside={"nan_checks": False}, step_s=19.0, more_fraction=-0.05),
        ),
        worth("nan_checks", True, other("nan_checks", False, rule="nan_checks goes with nothing")),
    )  # fmt: skip
    assert "ep_overlap delayed true 21.00 s +5.0% false 24.00 s +20.0% of this layout" in text
    assert "full_iteration 19.00 s -5.0% of this layout" in text
    assert "no nan_checks: nan_checks goes with nothing" in text


def test_a_switch_without_effect_is_left_out_unless_it_leads_to_another_layout(make_plan: object) -> None:
    plan = make_plan()  # type: ignore[operator]
    idle = worth("p2p_overlap", True, other("p2p_overlap", False, step_s=20.0, more_fraction=0.0), has_effect=False)
    moves = worth("dispatcher", "deepep", other("dispatcher", "alltoall", step_s=19.0, more_fraction=-0.05),
        has_effect=False)  # fmt: skip
    text = shown(plan, idle, moves)
    assert "p2p_overlap" not in text
    assert "dispatcher deepep no effect here" in text


def test_a_trainer_without_switches_says_so(make_plan: object) -> None:
    assert "knows no switches" in shown(make_plan())  # type: ignore[operator]
