"""The HTML report holds the plan, needs nothing else, and says what hostile names say without doing it."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from pages import DRAWN, Page

from planner.answer import Plan
from planner.report.page import render_html

MakePlan = Callable[..., Plan]
HOSTILE = "</title><script>alert(1)</script><img src=x onerror='alert(2)'>&amp;\"]]>"


def page(plan: Plan) -> Page:
    return Page(render_html(plan, DRAWN))


def renamed(plan: Plan, name: str) -> Plan:
    """The plan with a name that comes from a file in every place that has one."""
    hardware = plan.cluster.hardware
    tiers = tuple(tier.model_copy(update={"name": name, "source": name}) for tier in hardware.tiers)
    named = {"name": name, "source": name, "price_source": name, "tiers": tiers}
    return plan.model_copy(
        update={
            "model": plan.model.model_copy(
                update={"name": name, "spec": plan.model.spec.model_copy(update={"name": name, "source": name})}
            ),
            "cluster": type(plan.cluster)(hardware=hardware.model_copy(update=named), num_gpus=plan.cluster.num_gpus),
            "runtime": name,
            "assumptions": (name,),
            "rejections": {name: 1},
            "rejection_examples": {name: name},
            "best": plan.best.model_copy(update={"warnings": (name,)}),
            "alternatives": tuple(one.model_copy(update={"trade": name}) for one in plan.alternatives),
        }
    )


def test_everything_a_plan_says_is_there(make_plan: MakePlan) -> None:
    plan = make_plan()
    shown = page(plan).text
    for expected in (
        "22.08 s", "7,301.2 GiB of 79.1", "what is drawn", "what is held", "arXiv:2407.21783",
        "gradient_overlap_fraction", plan.inputs_sha256,
    ):  # fmt: skip
        assert expected in shown


def test_it_needs_no_network_and_no_scripts(make_plan: MakePlan) -> None:
    for plan in (make_plan(), renamed(make_plan(), HOSTILE)):
        html = render_html(plan, DRAWN)
        elements = Page(html).elements
        assert not {tag for tag, _ in elements} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
        attributes = [(name, value) for _, found in elements for name, value in found.items()]
        assert not [name for name, _ in attributes if name.startswith("on") or name in ("src", "href")]
        assert not [value for name, value in attributes if name == "xlink:href" and not str(value).startswith("#")]
        assert not re.search(r"@import|url\([^#]|javascript:", html)
        assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in attributes


def test_hostile_names_are_said_and_change_nothing(make_plan: MakePlan) -> None:
    tame, hostile = page(renamed(make_plan(), "tame")), page(renamed(make_plan(), HOSTILE))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in tame.elements]
    assert hostile.text.count(HOSTILE) == tame.text.count("tame") > 10


def test_names_that_no_file_can_hold_do_not_stop_it(make_plan: MakePlan) -> None:
    render_html(renamed(make_plan(), "half a pair \ud800"), DRAWN).encode()


def test_what_does_not_fit_says_so_first(make_plan: MakePlan) -> None:
    shown = page(make_plan(total_gib=90.0, fits=False)).text
    assert "Does not fit: stage 0 needs 90.0 GiB, 10.9 more than the GPU's 79.1" in shown.split("Stages, on GPUs")[0]


def test_an_evaluated_layout_has_neither_alternatives_nor_rejections(make_plan: MakePlan) -> None:
    shown = page(make_plan(searched=False)).text
    assert "Alternatives" not in shown
    assert "Rejected" not in shown
    assert "solver" not in shown


def test_headings_are_in_order_and_charts_and_tables_say_what_they_are(make_plan: MakePlan) -> None:
    shown = page(make_plan())
    levels = [int(name[1]) for name, _ in shown.elements if name in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    charts = [found for name, found in shown.elements if name == "svg" and found.get("class") == "plot"]
    labels = [found["aria-label"] for found in charts]
    assert len(set(labels)) == len(labels) == 3
    assert all(found["role"] == "img" for found in charts)
    num_tables = sum(name == "table" for name, _ in shown.elements)
    scopes = [found["scope"] for name, found in shown.elements if name == "th"]
    assert {"row", "col"} == set(scopes)
    assert len(scopes) > num_tables > 5
    names = [found["id"] for _, found in shown.elements if "id" in found]
    assert len(set(names)) == len(names), "drawings share no names"


def test_the_command_that_made_it_stands_at_the_top(make_plan: MakePlan) -> None:
    command = "plan --model '<b>.yaml' --gpus 2048"
    shown = page(make_plan().model_copy(update={"command": command}))
    assert command in shown.text.split("Stages, on GPUs")[0]
    assert "pre" not in [name for name, _ in page(make_plan()).elements]


def test_stages_that_hold_the_same_are_one_row_and_all_of_them_are_folded(make_plan: MakePlan) -> None:
    html = render_html(make_plan(pp=63, num_microbatches=64), DRAWN)
    short, folded = html.split("<details>")[:2]
    assert '<td class="num">1–61</td>' in short
    assert short.split("Stages, on GPUs")[1].count("<tr>") == 1 + 3
    assert folded.count("<tr>") == 1 + 63
