"""The recipe's lines: what is on and what it saves, what is refused, what consent would buy; never more than eight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pages import printed

from planner.answer import Offer, Plan, RecipeGain, RecipeRefusal
from planner.cli.inputs import read_job, read_limits
from planner.cli.options import SearchOptions
from planner.report.format import differences, recipe_heading, recipe_lines, says_offer, says_refusal
from planner.report.terminal import render
from planner.report.view import view_of
from planner.trainers.load import load_runtime, switches_of

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
    gains = (gain("p2p_overlap", True, 22.5), gain("ep_overlap", "delayed", 27.6))
    assert said(make_plan(), recipe_gains=gains) == {"on": "ep_overlap delayed 20.0%, p2p_overlap 1.9%"}


def test_a_switch_that_saves_next_to_nothing_has_no_number(make_plan: MakePlan) -> None:
    gains = (gain("p2p_overlap", True, 22.081), gain("ep_overlap", "delayed", 27.6))
    assert said(make_plan(), recipe_gains=gains)["on"] == "ep_overlap delayed 20.0%, p2p_overlap"


def test_a_recipe_that_nobody_knows_has_no_lines(make_plan: MakePlan) -> None:
    plan = make_plan()
    assert said(plan, recipe={}) == {}
    assert "Recipe" not in printed(render(plan))
    plain = {"ep_overlap": False, "cuda_graph": "none"}
    assert said(plan, recipe=plain) == {"on": "every switch is at its plainest value"}


@pytest.mark.parametrize(
    ("replanned", "heading"),
    [
        ([], "Recipe"),
        ([False, False], "(of this layout)"),
        ([True, True], "(planned again without it)"),
        ([True, False], "(of this layout, or * planned again)"),
    ],
)
def test_the_heading_says_how_gains_were_priced(make_plan: MakePlan, replanned: list[bool], heading: str) -> None:
    names = ["ep_overlap", "p2p_overlap"]
    gains = tuple(gain(name, True, 25.0, again) for name, again in zip(names, replanned, strict=False))
    layout = make_plan().best.model_copy(update={"recipe": RECIPE, "recipe_gains": gains})
    assert recipe_heading(layout).endswith(heading)
    assert dict(recipe_lines(layout, {}))["on"].count("*") == (1 if len(set(replanned)) == 2 else 0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            offer("bf16_gradients", True, 9.0, "bf16_gradients"),
            "--allow bf16_gradients: at least 10.0% faster, changes numerics",
        ),
        (offer("dtype", "fp8", 7.5, "fp8"), "--allow fp8: at least 25.0% faster, changes numerics"),
        (
            offer("cuda_graph", "full_iteration", 8.0, "nan_checks", "fused_experts", changes="checks and numerics"),
            "--allow nan_checks,fused_experts: cuda_graph full_iteration, at least 20.0% faster, "
            "changes checks and numerics",
        ),
    ],
)
def test_an_offer_is_an_option_that_can_be_typed(given: Offer, says: str) -> None:
    line = says_offer(given, 10.0)
    assert line == says
    asked = SearchOptions(model="deepseek-v3", gpus=256, hardware="gb200", allow=line.split(":")[0].split()[1])
    assert read_limits(asked, read_job(asked)).allow == given.allow


def test_a_refusal_names_the_value_once() -> None:
    own = RecipeRefusal(
        switch="cuda_graph", value="full_iteration", rule="cuda_graph full_iteration needs nan_checks=false"
    )
    other = RecipeRefusal(switch="shared_expert_overlap", value=True, rule="ep_overlap does not go with it")
    assert says_refusal(own) == "cuda_graph full_iteration: needs nan_checks=false"
    assert says_refusal(other) == "shared_expert_overlap: ep_overlap does not go with it"


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
