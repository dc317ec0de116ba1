"""The recipe's lines: what is on and what it saves, what is refused, what consent would buy; never more than eight.

The table of switches: what is chosen, what others cost, which rules refuse; within 80 columns.
The largest cause is the item that loses most, in words that hold for these two layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pages import printed
from tables import beside

from planner.answer import Offer, Plan, PricedLayout, RecipeGain, RecipeRefusal
from planner.cli.inputs import read_job, read_limits
from planner.cli.options import SearchOptions
from planner.report.causes import (
    largest_cause,
    memory_differences,
    now,
    says_best,
    says_misfit,
    says_slower,
    step_differences,
)
from planner.report.explain import render_recipe_table
from planner.report.format import MEMORY, differences, recipe_heading, recipe_lines, says_offer
from planner.report.terminal import render
from planner.report.view import view_of
from planner.search.why.recipe import OtherValue, RecipeTable, SwitchWorth
from planner.trainers.load import load_runtime, switches_of
from planner.trainers.switches import Value

TABLES = beside(__file__)

MakePlan = Callable[..., Plan]
RECIPE = {"ep_overlap": "delayed", "cuda_graph": "none", "p2p_overlap": True, "nan_checks": True}


def gain(switch: str, value: Any, without_step_s: float, replanned: bool = False) -> RecipeGain:
    return RecipeGain(switch=switch, value=value, without_step_s=without_step_s, replanned=replanned)


def offer(switch: str, value: Any, step_s: float, *allow: str, changes: str = "numerics") -> Offer:
    return Offer(switch=switch, value=value, step_s=step_s, replanned=False, changes=changes, allow=allow)


def said(plan: Plan, **changes: Any) -> dict[str, str]:
    """The recipe's lines of a plan of 22.08 s whose best layout is changed."""
    return dict(recipe_lines(plan.best.model_copy(update={"recipe": RECIPE, **changes}), {}))


def test_what_is_on_is_named_with_what_it_saves_the_most_first(make_plan: MakePlan) -> None:
    plan = make_plan()
    for without_s, worth in ((22.5, "1.9%"), (plan.step.step_s / 2, "takes 50.0%")):
        gains = (gain("p2p_overlap", True, without_s), gain("ep_overlap", "delayed", 27.6))
        assert said(plan, recipe_gains=gains) == {"on": f"ep_overlap delayed 20.0%, p2p_overlap {worth}"}


def test_a_recipe_that_nobody_knows_has_no_lines(make_plan: MakePlan) -> None:
    plan = make_plan()
    assert said(plan, recipe={}) == {}
    assert "Recipe" not in printed(render(plan))
    plain = {"ep_overlap": False, "cuda_graph": "none"}
    assert said(plan, recipe=plain) == {"on": "every switch is at its plainest value"}


@pytest.mark.parametrize(("replanned", "heading"), TABLES["the_heading_says_how_gains_were_priced"])
def test_the_heading_says_how_gains_were_priced(make_plan: MakePlan, replanned: list[bool], heading: str) -> None:
    names = ["ep_overlap", "p2p_overlap"]
    gains = tuple(gain(name, True, 25.0, again) for name, again in zip(names, replanned, strict=False))
    layout = make_plan().best.model_copy(update={"recipe": RECIPE, "recipe_gains": gains})
    assert recipe_heading(layout).endswith(heading)
    assert dict(recipe_lines(layout, {}))["on"].count("*") == (1 if len(set(replanned)) == 2 else 0)


@pytest.mark.parametrize(("words", "more", "says"), TABLES["an_offer_is_an_option_that_can_be_typed"])
def test_an_offer_is_an_option_that_can_be_typed(words: list[Any], more: dict[str, str], says: str) -> None:
    given = offer(*words, **more)
    line = says_offer(given, 10.0)
    assert line == says
    asked = SearchOptions(model="deepseek-v3", gpus=256, hardware="gb200", allow=line.split(":")[0].split()[1])
    assert read_limits(asked, read_job(asked)).allow == given.allow


def test_an_alternative_shows_where_its_recipe_differs(make_plan: MakePlan) -> None:
    plan = make_plan()
    best = plan.best.model_copy(update={"recipe": RECIPE})
    other = plan.best.model_copy(update={"recipe": {"ep_overlap": False, "cuda_graph": "none", "dispatcher": "deepep"}})
    assert list(differences(other, best)) == ["no ep_overlap"]
    view = view_of(plan.model_copy(update={"best": best, "alternatives": (other, best)}))
    assert [entry.manner for entry in view.alternatives] == ["no ep_overlap", ""]


def test_the_variables_are_those_that_the_export_sets(make_plan: MakePlan) -> None:
    plan = make_plan()
    best = plan.best.model_copy(update={"recipe": RECIPE})
    lines = dict(view_of(plan.model_copy(update={"best": best})).recipe)
    assert lines["env"].startswith("CUDA_DEVICE_MAX_CONNECTIONS=1")
    eager = plan.model_copy(update={"best": best, "runtime_spec": load_runtime("torch-eager")})
    assert "env" not in dict(view_of(eager).recipe)


def test_the_block_is_eight_lines_at_most(make_plan: MakePlan) -> None:
    """Also where every switch is on, every other value refused, and each consent would buy something."""
    plan, has = make_plan(), switches_of(load_runtime("megatron"))
    refused = [(name, value) for name, values in has.items() for value in values]
    rule = "ep_overlap does not go with a rule that takes many words to say, more than fit in a line of a terminal"
    best = plan.best.model_copy(
        update={
            "recipe": {name: values[-1] for name, values in has.items()},
            "recipe_gains": tuple(gain(name, values[-1], 25.0) for name, values in has.items()),
            "recipe_refused": tuple(RecipeRefusal(switch=n, value=v, rule=rule) for n, v in refused),
            "offers": tuple(offer(name, True, 20.0, name, "nan_checks") for name in has),
        }
    )
    shown = printed(render(plan.model_copy(update={"best": best}))).splitlines()
    start = next(index for index, line in enumerate(shown) if line.startswith("Recipe"))
    block = shown[start + 1 : shown.index("", start)]
    assert len(block) <= 8
    assert max(map(len, shown)) <= 80
    assert all(f"{word} " in " ".join(block) for word in ("on", "refused", "consent", "more in --json"))


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


def _slower(plan: Plan, item: str, by_s: float, **layout: Any) -> Plan:
    """The plan with one item of its step longer."""
    step = plan.step
    breakdown = step.breakdown.model_copy(update={item: getattr(step.breakdown, item) + by_s})
    best = plan.best.model_copy(
        update={
            "step": step.model_copy(update={"step_s": step.step_s + by_s, "breakdown": breakdown}),
            "parallelism": plan.parallelism.model_copy(update=layout),
        }
    )
    return plan.model_copy(update={"best": best})


@pytest.mark.parametrize(("item", "layout", "words"), TABLES["the_item_that_loses_most_is_the_cause"])
def test_the_item_that_loses_most_is_the_cause(
    make_plan: MakePlan, item: str, layout: dict[str, Any], words: str
) -> None:
    best = make_plan()
    other = _slower(best, item, 2.0, **layout)
    cause = largest_cause(best.best, other.best, best.cluster)
    assert (cause.item, cause.difference_s) == (item, pytest.approx(2.0))
    assert words in cause.because
    assert f"mostly by {cause.label} (+2.00 s)" in says_slower(best, other, cause, 0.005)


def test_a_smaller_node_has_a_smaller_domain(make_plan: MakePlan) -> None:
    """Nodes of 4 H100, as the user says: their links join 4, whatever the profile's join."""
    best = make_plan()
    cluster = best.cluster.model_copy(update={"gpus_per_node": 4})
    cause = largest_cause(best.best, _slower(best, "tp_comm_s", 2.0).best, cluster)
    assert "tp 8 leaves the NVLink domain of 4 GPUs" in cause.because


@pytest.mark.parametrize(
    ("more_s", "words"),
    [(0.05, "It is as fast: 0.23% slower"), (-1.0, "It is 4.5% faster, mostly by pipeline bubble, 1.00 s less")],
)
def test_what_is_no_slower_is_said_so(more_s: float, words: str, make_plan: MakePlan) -> None:
    """Below what searches are exact to is no difference, and a pin can be faster than what is tried without it."""
    best = make_plan()
    other = _slower(best, "bubble_s", more_s)
    says = says_slower(best, other, largest_cause(best.best, other.best, best.cluster), 0.005)
    assert says.startswith(words)


def test_differences_hold_every_item_and_add_up(make_plan: MakePlan) -> None:
    best, other = make_plan(), make_plan(total_gib=64.0, step_s=25.0)
    steps = step_differences(best.best, other.best)
    assert {one.item for one in steps} == set(type(best.step.breakdown).model_fields)
    assert sum(one.change for one in steps) == pytest.approx(25.0 - 22.08)
    memories = memory_differences(best.best, other.best)
    assert [one.item for one in memories] == list(MEMORY)
    assert memories[-1].change == sum(one.change for one in memories[:-1])


def test_a_misfit_names_the_stage_and_what_it_lacks(make_plan: MakePlan) -> None:
    layout: PricedLayout = make_plan(total_gib=90.0, fits=False).best
    says = says_misfit(layout, make_plan().cluster, 0.0)
    assert "needs 90.0 GiB on stage 0, 10.9 GiB more than the GPU's 79.1" in says
    assert "activations, 52.0 GiB" in says
    assert "12.9 GiB more than the GPU's 79.1 less 2 of headroom" in says_misfit(layout, make_plan().cluster, 2.0)


def test_what_is_proven_of_the_best_and_how_far_constraints_are(make_plan: MakePlan) -> None:
    plan = make_plan()
    for outcome, words in (("feasible", "time was up"), ("bounded", "it is within 4.00% of"), ("proven", "and no")):
        search = plan.search.model_copy(update={"outcome": outcome, "gap": 0.04})
        assert words in says_best(plan.model_copy(update={"search": search}))
    assert now("batch", plan) == "128 micro-batches of 1 over 16 stages"
    assert (now("domain", plan), now("memory", plan)) == (
        "tp 8 of an NVLink domain of 8",
        "stage 0 fills 90% of 79.1 GiB",
    )
