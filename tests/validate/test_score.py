"""A score counts the rows that it should, with their weights.

The regret of a sweep is what the layout ranked first lost to the one measured best.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from tables import beside

from planner.answer import PricedLayout
from planner.validate.choices import regrets, sweeps
from planner.validate.rows import PublishedRun, load_rows
from planner.validate.score import Scored, by_family, evaluate_rows, score, spearman, weighted_quantile

TABLES = beside(__file__)


@pytest.mark.parametrize(("fraction", "expected"), [(0.1, 1.0), (0.5, 2.0), (0.8, 2.0), (0.9, 5.0)])
def test_quantiles_count_weight_and_not_rows(fraction: float, expected: float) -> None:
    values, weights = np.array([5.0, 1.0, 2.0]), np.array([1.0, 2.0, 5.0])
    assert weighted_quantile(values, weights, fraction) == expected


def test_a_family_is_scored_on_its_trusted_rows_alone() -> None:
    rows = [row for row in load_rows() if row.family == "megatron-sc21"]
    scored = evaluate_rows(rows)
    (family, everything) = by_family(scored)
    assert family.num_rows == everything.num_rows == sum(row.counts for row in rows) < len(rows)


def test_a_run_that_cannot_be_priced_is_counted_and_not_hidden() -> None:
    row = load_rows()[0]
    bad = row.model_copy(update={"run": {**row.run, "num_gpus": 1}})
    scored = evaluate_rows([row, bad])
    assert scored[1].error is not None
    result = score("both", scored)
    assert result is not None
    assert (result.num_rows, result.num_unsupported) == (1, 1)


def test_rank_correlation_sees_order_alone() -> None:
    seconds = np.array([3.0, 1.0, 2.0, 2.0])
    assert spearman(seconds, seconds**3) == pytest.approx(1.0)
    assert spearman(seconds, -seconds) == pytest.approx(-1.0)
    assert spearman(seconds, np.ones(4)) == 0.0


def test_sequences_of_4_thousand_to_a_million_tokens_take_what_was_measured() -> None:
    """Llama 2 7B on 4 to 1,024 H100, Llama 3 8B on 8 to 256 B200 (NeMo), TP 1 to 8 and CP 1 to 32."""
    rows = [row for row in load_rows() if row.family == "nemo-docs" and "-seq" in row.id]
    assert {row.run["parallelism"]["cp"] for row in rows} == {1, 2, 4, 8, 16, 32}
    errors = {one.row.id: one.step_error for one in evaluate_rows(rows)}
    assert errors == {name: pytest.approx(0, abs=0.08) for name in errors}


@pytest.mark.parametrize(
    ("family", "gpu", "num_rows", "worst"), TABLES["runs_that_nobody_fitted_to_take_what_was_measured"]
)
def test_runs_that_nobody_fitted_to_take_what_was_measured(family: str, gpu: str, num_rows: int, worst: float) -> None:
    rows = [row for row in load_rows() if row.family == family and row.run["hardware"].startswith(gpu)]
    assert len(rows) == num_rows
    assert all(row.held_out for row in rows)
    errors = {one.row.id: one.step_error for one in evaluate_rows(rows)}
    assert errors == {name: pytest.approx(0, abs=worst) for name in errors}


def test_groups_of_a_node_are_ranked_before_all_ranks_as_measured() -> None:
    """InternEvo's ZeRO-1 on 16 to 1,024 A100 over 4 × 100 Gb/s a node: groups gain 2 to 60%, and are predicted to."""
    rows = {row.id: row for row in load_rows() if row.family == "internevo" and "-zero" in row.id}
    priced = {one.row.id: one for one in evaluate_rows(rows.values())}
    gains = []
    for num_gpus in (16, 32, 64, 128, 256, 512, 1024):
        for tp, group in ((1, 8), (2, 4)):
            over_all, grouped = (priced[f"internevo-7b-a100x{num_gpus}-tp{tp}-zero{size}"] for size in ("all", group))
            measured = over_all.row.measured.step_s / grouped.row.measured.step_s
            predicted = (1 + over_all.step_error) / (1 + grouped.step_error) * measured
            assert min(measured, predicted) > 1, (num_gpus, tp)
            gains.append((predicted, measured))
    assert np.corrcoef(np.log(np.array(gains)).T)[0, 1] > 0.95


def test_a_poor_network_costs_no_more_than_that() -> None:
    """nanotron on 8 nodes of AWS, where ZeRO-1 gathers tensor by tensor: within 15%, without a fit to more than 4."""
    rows = [row for row in load_rows() if row.family == "ultrascale-efa" and "x64-" in row.id and "zero1" in row.id]
    errors = np.array([one.step_error for one in evaluate_rows(rows)])
    assert len(errors) == 15
    assert np.abs(errors).max() < 0.16
    assert np.median(np.abs(errors)) < 0.08


def test_kinds_of_runs_are_summed_up_before_all_beside_a_naive_prediction() -> None:
    rows = [
        row for row in load_rows() if row.family in ("mlperf-amd", "torchao-mi300x", "megatron-sc21", "korthikanti")
    ]
    scores = {one.name: one for one in by_family(evaluate_rows(rows))}
    assert list(scores)[-3:] == ["dense", "32 nodes or more", "all"]
    assert scores["AMD GPUs"].num_rows == scores["mlperf-amd"].num_rows + scores["torchao-mi300x"].num_rows == 5
    assert scores["korthikanti"].median < 0.05 < scores["korthikanti"].naive  # type: ignore[operator]


def test_families_on_amd_gpus_that_nobody_fitted_to_are_near() -> None:
    """Half of the families that count are held out: MI300X, MI325X, MI350X and MI355X, dense models and a mixture."""
    counted = [row for row in load_rows() if row.on_amd and row.counts]
    left_out = [row for row in counted if row.held_out]
    assert 2 * len({row.family for row in left_out}) >= len({row.family for row in counted}) == 11
    assert {row.run["hardware"] for row in left_out} == {"mi300x", "mi325x", "mi350x", "mi355x"}
    together = score("held out", evaluate_rows(left_out))
    assert together is not None
    assert together.median < 0.14
    assert together.coverage is not None
    assert together.coverage > 0.8


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


@pytest.mark.parametrize("other", TABLES["other_jobs_releases_and_runs_that_do_not_count_are_no_choice"])
def test_other_jobs_releases_and_runs_that_do_not_count_are_no_choice(other: dict[str, object]) -> None:
    assert not sweeps([run("a", 1, 10.0, 12.0), run("b", 2, 11.0, 10.0, **other)])


def test_switches_are_a_choice_as_layouts_are_and_what_has_no_price_is_none() -> None:
    (sweep,) = sweeps([run("a", 1, 10.0, 12.0), run("b", 1, 11.0, 10.0, run={"features": {"compile": True}})])
    assert sweep.regret == pytest.approx(0.2)
    assert not sweeps([run("a", 1, 10.0, 12.0), Scored(run("b", 2, 11.0, 10.0).row, None)])


def test_a_family_counts_its_sweeps_and_names_the_worst() -> None:
    found = sweeps(
        [
            run(f"{name}{batch}", tp, predicted_s, measured_s, run={"global_batch_size": batch})
            for batch, lost in ((10, 1.0), (20, 1.1), (30, 1.5))
            for name, tp, predicted_s, measured_s in (("first", 1, 1.0, lost), ("second", 2, 2.0, 1.0))
        ]
    )
    score, everything = regrets(found)
    assert (score.num_sweeps, score.num_layouts, everything.name) == (3, 6, "all")
    assert (score.mean, score.median) == (pytest.approx(0.2), pytest.approx(0.1))
    assert (score.p90, score.worst) == (pytest.approx(0.5), pytest.approx(0.5))
    assert (score.worst_id, score.best_id) == ("first30", "second30")
