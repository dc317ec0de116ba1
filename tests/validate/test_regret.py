"""The regret of a sweep is what the layout ranked first lost to the one measured best."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from planner.answer import PricedLayout
from planner.validate.choices import PublishedSweep, regrets, spreads, sweeps
from planner.validate.rows import PublishedRun, load_rows
from planner.validate.score import Scored, evaluate_rows


@cache
def priced() -> Scored:
    return evaluate_rows([next(row for row in load_rows() if row.family == "korthikanti")])[0]


def run(name: str, tp: int, predicted_s: float, measured_s: float, **changed: object) -> Scored:
    """A run of a layout named by its TP; `changed` are fields of the row, or of the run under `run`."""
    row, layout = priced().row, priced().layout
    assert isinstance(layout, PricedLayout)
    fields = dict(changed)
    job = {**row.run, "parallelism": {**row.run["parallelism"], "tp": tp}, **fields.pop("run", {})}  # type: ignore[dict-item]
    told = PublishedRun.model_validate(
        row.model_dump() | {"id": name, "run": job, "measured": {"step_s": measured_s}, "assumed": ()} | fields
    )
    step = layout.step.model_copy(update={"step_s": predicted_s})
    return Scored(told, layout.model_copy(update={"step": step}))


def test_regret_is_the_measured_time_of_the_first_over_the_best() -> None:
    (sweep,) = sweeps([run("a", 1, 10.0, 12.0), run("b", 2, 11.0, 10.0), run("c", 4, 12.0, 20.0)])
    assert sweep.regret == pytest.approx(0.2)
    assert sweep.random_regret == pytest.approx((0.2 + 0.0 + 1.0) / 3)
    assert (sweep.ids[sweep.chosen], sweep.ids[sweep.best]) == ("a", "b")


def test_layouts_that_share_the_first_place_are_drawn_by_chance() -> None:
    (sweep,) = sweeps([run("a", 1, 10.0, 12.0), run("b", 2, 10.0, 10.0), run("c", 4, 12.0, 9.0)])
    assert sweep.regret == pytest.approx(11 / 9 - 1)
    assert sweep.ids[sweep.chosen] == "a", "the slower one is named"


def test_a_layout_measured_again_counts_once_with_its_geometric_mean() -> None:
    (sweep,) = sweeps([run("a", 1, 10.0, 9.0), run("a again", 1, 10.0, 16.0), run("b", 2, 11.0, 10.0)])
    assert sweep.ids == ("a", "b")
    assert sweep.regret == pytest.approx(0.2)
    assert list(sweep.num_runs) == [2, 1]


@pytest.mark.parametrize(
    "other",
    [
        {"family": "another"},
        {"source": "the same tables, container 26.04"},
        {"run": {"global_batch_size": 999}},
        {"run": {"hardware": "h100-sxm-80gb"}},
        {"run": {"dtype": "fp8"}},
        {"trust": "C"},
        {"assumed": ("zero_stage",)},
    ],
)
def test_other_jobs_releases_and_runs_that_do_not_count_are_no_choice(other: dict[str, object]) -> None:
    assert not sweeps([run("a", 1, 10.0, 12.0), run("b", 2, 11.0, 10.0, **other)])


def test_switches_are_a_choice_as_layouts_are() -> None:
    (sweep,) = sweeps([run("a", 1, 10.0, 12.0), run("b", 1, 11.0, 10.0, run={"features": {"compile": True}})])
    assert sweep.regret == pytest.approx(0.2)


def test_a_run_without_a_price_is_left_out() -> None:
    unpriced = Scored(run("b", 2, 11.0, 10.0).row, None)
    assert not sweeps([run("a", 1, 10.0, 12.0), unpriced])


def test_a_family_counts_its_sweeps_and_names_the_worst() -> None:
    found = sweeps(
        [
            run(f"{name}{batch}", tp, predicted_s, measured_s, run={"global_batch_size": batch})
            for batch, lost in ((10, 1.0), (20, 1.1), (30, 1.5))
            for name, tp, predicted_s, measured_s in (("first", 1, 1.0, lost), ("second", 2, 2.0, 1.0))
        ]
    )
    score, everything = regrets(found, {})
    assert (score.num_sweeps, score.num_layouts, everything.name) == (3, 6, "all")
    assert (score.mean, score.median) == (pytest.approx(0.2), pytest.approx(0.1))
    assert (score.p90, score.worst) == (pytest.approx(0.5), pytest.approx(0.5))
    assert (score.worst_id, score.best_id) == ("first30", "second30")
    assert score.noise_mean is None
    assert not score.is_noisy


def test_a_perfect_prediction_loses_to_noise_what_chance_makes_of_equal_layouts() -> None:
    """Of two equal layouts, one of which is chosen, half the draws lose: (e^(2·spread²) over …) by simulation."""
    equal = PublishedSweep("f", ("a", "b"), np.array([1.0, 1.0]), np.array([1.0, 1.0]), np.array([1.0, 1.0]))
    apart = PublishedSweep("f", ("a", "b"), np.array([1.0, 2.0]), np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    # the mean of max(0, x) for x normal with deviation 0.1·√2
    assert equal.noise_regret(0.1) == pytest.approx(0.1 * 2**0.5 / (2 * np.pi) ** 0.5, rel=0.2)
    assert equal.noise_regret(0.0) == apart.noise_regret(0.1) == 0.0
    often = PublishedSweep("f", ("a", "b"), equal.predicted_s, equal.measured_s, np.array([100.0, 100.0]))
    assert often.noise_regret(0.1) < equal.noise_regret(0.1) / 5, "a mean of many runs has less noise"


def test_noisy_families_are_told_apart_from_the_rest() -> None:
    found = sweeps(
        [
            run(family + name, tp, predicted_s, measured_s, family=family)
            for family, lost in (("calm", 1.0), ("wild", 1.5))
            for name, tp, predicted_s, measured_s in (("a", 1, 1.0, lost), ("b", 2, 1.1, 1.0))
        ]
    )
    *families, rest, everything = regrets(found, {"wild": 0.2})
    assert [score.is_noisy for score in families] == [False, True]
    assert (rest.num_sweeps, rest.mean) == (1, 0.0)
    assert everything.mean == pytest.approx(0.25)
    assert everything.noise_mean == pytest.approx(families[1].noise_mean / 2 if families[1].noise_mean else 0)


def test_noise_is_read_from_runs_measured_again_where_there_are_any() -> None:
    noise = spreads(load_rows())
    assert noise["bloom-prequel"] == pytest.approx(0.028, abs=0.001)
    assert noise["vtrain-single"] > 0.1, "known otherwise"
    assert "korthikanti" not in noise
