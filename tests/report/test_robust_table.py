"""The table of layouts under assumptions: its choice is the minimax, and both reports show it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pages import DRAWN, Page, printed

from planner.answer import AS_PLANNED, Plan, RobustStep
from planner.report.page import render_html
from planner.report.rows import Robust, robust_of
from planner.report.terminal import render

MakePlan = Callable[..., Plan]
NAMES = (
    AS_PLANNED,
    "no overlap: no collective hides",
    "slow rank: a tenth",
    "uneven experts: the fullest gets more",
    "half the network: 25 GB/s",
    "default switches: its own",
)


def compared(plan: Plan, *rows: tuple[float, ...]) -> Plan:
    """The plan with a table of steps, a row for each layout."""
    steps = tuple(
        RobustStep(layout=f"layout {rank}", assumption=name, step_s=step_s)
        for rank, row in enumerate(rows)
        for name, step_s in zip(NAMES, row, strict=False)
    )
    return plan.model_copy(update={"best": plan.best.model_copy(update={"robust": steps})})


def terminal(plan: Plan) -> list[str]:
    return printed(render(plan)).splitlines()


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_minimax_by_brute_force(seed: int) -> None:
    steps_s = np.exp(np.random.default_rng(seed).normal(0.0, 0.1, (4, 5)))
    table = Robust(NAMES[:5], tuple(map(tuple, steps_s.tolist())))
    worst = [
        max(steps_s[layout][case] / min(steps_s[other][case] for other in range(4)) - 1 for case in range(5))
        for layout in range(4)
    ]
    assert table.losses == pytest.approx(worst)
    assert table.least == min(range(4), key=lambda layout: worst[layout])


def test_the_fastest_is_kept_where_another_loses_as_little() -> None:
    assert Robust(NAMES[:2], ((1.0, 2.0), (1.0, 2.0))).least == 0


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (((1.0, 2.0), (1.1, 1.6)), "alternative 1 loses at most 10.0%, the fastest 25.0%"),
        (((1.0, 2.0), (1.5, 1.9)), "the fastest loses least, at most 5.3%"),
        (((1.0, 2.0), (1.5, 2.1)), "The fastest stays so under each of these."),
    ],
)
def test_the_remark_names_the_layout_that_loses_least(
    make_plan: MakePlan, rows: tuple[tuple[float, ...], ...], says: str
) -> None:
    table = robust_of(compared(make_plan(), *rows).best)
    assert says in table.remarks[0]


def test_both_reports_show_the_same_rows_in_the_order_of_the_alternatives(make_plan: MakePlan) -> None:
    plan = compared(make_plan(), (1.25, 2.5, 1.5), (1.75, 2.25, 1.625))
    table = robust_of(plan.best)
    assert [row[0] for row in table.rows] == ["best", "1."]
    shown = "\n".join(terminal(plan))
    cells = Page(render_html(plan, DRAWN)).text
    for row in table.rows:
        assert " ".join(row) in " ".join(shown.split())
        assert all(cell in cells for cell in row)
    for text in (*table.heads, *table.remarks):
        assert text in cells
        assert set(text.split()) <= set(shown.split())


def test_a_wide_table_keeps_within_80_columns(make_plan: MakePlan) -> None:
    plan = compared(make_plan(), *[(1234.5,) * len(NAMES)] * 3)
    table = robust_of(plan.best)
    lines = terminal(plan)
    assert max(map(len, lines)) <= 80
    for row in table.rows:
        assert any(" ".join(row) in " ".join(line.split()) for line in lines), "nothing is cut"


@pytest.mark.parametrize("rows", [(), ((1.0,), (1.1,))])
def test_nothing_is_shown_where_nothing_moves(make_plan: MakePlan, rows: tuple[tuple[float, ...], ...]) -> None:
    plan = compared(make_plan(), *rows)
    assert robust_of(plan.best) is None
    assert "turns out otherwise" not in " ".join(terminal(plan))
    assert "turns out otherwise" not in render_html(plan, DRAWN)


def test_a_table_that_someone_edited_is_left_out(make_plan: MakePlan) -> None:
    plan = compared(make_plan(), (1.0, 2.0), (1.0, 2.0))
    for steps in (plan.best.robust[1:], plan.best.robust[:-1]):
        assert robust_of(plan.best.model_copy(update={"robust": steps})) is None
