"""The HTML report holds the plan, needs nothing else, and says what hostile names say without doing it.

Lists of layers are short, and hold every layer.
Charts of a plan hold its numbers: bars to one scale beside the capacity, the curve's peak, the Pareto front.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import DRAWN, Page
from tables import beside

from planner.answer import Plan
from planner.report.page import render_html
from planner.report.pictures import ACTION_COLOURS, MEMORY_COLOURS, envelope, stacks, stage_seconds
from planner.report.rows import chunks
from planner.specs.units import GIB

TABLES = beside(__file__)

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
                update={"name": name, "spec": plan.model.spec.model_copy(update={"name": name, "source": name})},
            ),
            "cluster": type(plan.cluster)(hardware=hardware.model_copy(update=named), num_gpus=plan.cluster.num_gpus),
            "runtime": name, "assumptions": (name,), "rejections": {name: 1}, "rejection_examples": {name: name},
            "best": plan.best.model_copy(update={"warnings": (name,)}),
            "alternatives": tuple(one.model_copy(update={"trade": name}) for one in plan.alternatives),
        },
    )  # fmt: skip


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
    assert len(set(labels)) == len(labels) == 2
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


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        *TABLES["layers_in_words"],
        ([(first, first + 1) for first in range(3, 126, 16)], "3, then every 16 on to 115"),
        ([(first, first + 2) for first in range(0, 64, 16)], "0–1, then every 16 on to 48–49"),
    ],
)
def test_layers_in_words(ranges: list[tuple[int, int]], says: str) -> None:
    assert chunks(ranges) == says


def heights(svg: str) -> dict[str, list[float]]:
    """Units that each bar is high, by its colour."""
    found: dict[str, list[float]] = {}
    for path, colour in re.findall(r'<path d="([^"]*)" fill="([^"n][^"]*)"', svg):
        found[colour] = [abs(float(b) - float(a)) for a, b in re.findall(r"M\S+ (\S+?)H\S+V(\S+?)H", path)]
    return found


@pytest.mark.parametrize("total_gib", [60.0, 95.0])
def test_memory_is_drawn_to_one_scale_beside_the_capacity(make_plan: MakePlan, total_gib: float) -> None:
    plan = make_plan(pp=4, total_gib=total_gib, fits=total_gib < 79)
    capacity_bytes = plan.cluster.hardware.memory_bytes
    svg = stacks(plan, capacity_bytes)
    assert f"GPU {capacity_bytes / GIB:.1f}" in svg
    found = heights(svg)
    assert all(len(sizes) == 4 for sizes in found.values())
    highs = np.sum(list(found.values()), axis=0)
    totals = np.array([stage.memory.total_bytes for stage in plan.stages], dtype=float)
    assert highs / totals == pytest.approx([highs[0] / totals[0]] * 4, rel=5e-3)
    weights = found[MEMORY_COLOURS["weights"]][0] / plan.stages[0].memory.weights_bytes
    assert weights == pytest.approx(highs[0] / totals[0], rel=2e-2)


def test_the_seconds_of_a_stage_and_the_rest_are_the_step(make_plan: MakePlan) -> None:
    plan = make_plan(pp=4)
    drawn = heights(stage_seconds(plan.best))
    assert len(drawn) == 4
    sums = np.sum(list(drawn.values()), axis=0)
    assert sums == pytest.approx([sums[0]] * 4, rel=5e-3)
    stage, count = plan.stages[1], plan.parallelism.num_microbatches
    share = count * stage.forward_s / plan.step.step_s
    assert drawn[ACTION_COLOURS["F"]][1] / sums[1] == pytest.approx(share, rel=5e-3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_envelope_holds_the_least_and_the_most_of_each_column(data: st.DataObject) -> None:
    """By brute force: the values in force in a column are those that begin in it, and the one in force before."""
    steps = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=30).filter(any))
    times_s = np.cumsum(steps).astype(float)
    values = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(steps), max_size=len(steps))), dtype=float)
    if times_s[0] == times_s[-1]:
        return
    found = envelope(times_s, values, columns=data.draw(st.integers(1, 12)))
    last = len(found.low) - 1
    for column, (left, right) in enumerate(zip(found.edges_s, found.edges_s[1:], strict=False)):
        first = max(index for index, time_s in enumerate(times_s) if time_s <= left)
        own = [
            v
            for i, (t, v) in enumerate(zip(times_s, values, strict=True))
            if i >= first and (t < right or column == last)
        ]
        assert (found.low[column], found.high[column]) == (min(own), max(own))
