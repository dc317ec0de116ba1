"""The folder of kept runs: files that others broke, versions that change, two that add at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from measured_runs import observed, priced
from tables import beside

from planner.answer import Plan
from planner.errors import PlannerError, SpecError
from planner.observe import default_folder
from planner.observe import history as stored
from planner.observe.history import (
    PRICES,
    KeptPrice,
    belongs_to,
    calibration_of,
    keep,
    kept_run,
    name_of,
    price_of,
    price_of_file,
    prices_of,
    read_kept,
    runs_of,
    said_of,
    text_of,
)
from planner.observe.observation import Observed
from planner.trainers.load import load_runtime

TABLES = beside(__file__)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return priced()


@pytest.fixture(scope="module")
def run(plan: Plan) -> Observed:
    return observed(plan, 1.2 * plan.step.step_s)


def add(folder: Path, run: Observed) -> bool:
    return keep(folder, name_of(run), text_of(kept_run(run, "observed.json")[0]))


@pytest.fixture(scope="module")
def cheap(run: Observed) -> Callable[[Path], KeptPrice]:
    """Reads a file as pricing does, and gives it a price that was made once."""
    price = price_of(kept_run(run, "observed.json")[0], "observed.json")

    def of_file(path: Path) -> KeptPrice:
        read_kept(path)
        return price.model_copy(update={"file": path.name})

    return of_file


def no_price(path: Path) -> KeptPrice:
    raise AssertionError(f"{path} was priced again")


def test_a_kept_run_is_read_back_and_priced_by_the_profile(plan: Plan, run: Observed, tmp_path: Path) -> None:
    assert add(tmp_path, run)
    price = price_of_file(tmp_path / name_of(run))
    assert price.predicted_s == pytest.approx(plan.step.step_s)
    assert price.measured_s == pytest.approx(1.2 * plan.step.step_s)
    assert price.belongs == "toy-gpu, 4 GPUs a node, 50 GB/s between nodes, megatron"
    assert price.log_kernels > 0.18, "kernels have to take more than the step"
    assert text_of(read_kept(tmp_path / name_of(run))) == (tmp_path / name_of(run)).read_text()


def test_adding_twice_is_one_and_another_log_another(plan: Plan, run: Observed, tmp_path: Path) -> None:
    assert add(tmp_path, run)
    assert not add(tmp_path, run)
    assert add(tmp_path, observed(plan, 1.21 * plan.step.step_s))
    assert len(list(tmp_path.glob("run-*.json"))) == 2


def test_a_run_is_one_however_its_plan_was_corrected(plan: Plan, run: Observed, tmp_path: Path) -> None:
    add(tmp_path, run)
    known = calibration_of(prices_of(tmp_path, price_of_file).runs, plan.cluster, tmp_path)
    corrected = observed(priced(known[0].of_cluster(plan.cluster)), 1.2 * plan.step.step_s)
    assert name_of(corrected) == name_of(run)
    with pytest.raises(SpecError, match="was made with a calibration"):
        kept_run(corrected, "observed.json")


def test_prices_are_kept_until_a_file_or_the_version_changes(
    plan: Plan, run: Observed, cheap: Callable[[Path], KeptPrice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path, run)
    first = prices_of(tmp_path, cheap)
    assert prices_of(tmp_path, no_price) == first
    add(tmp_path, observed(plan, 1.3 * plan.step.step_s))
    asked: list[str] = []

    def price(path: Path) -> KeptPrice:
        asked.append(path.name)
        return cheap(path)

    assert len(prices_of(tmp_path, price).runs) == 2
    assert len(asked) == 1, "the other's price stays"
    monkeypatch.setattr(stored, "__version__", "99")
    prices_of(tmp_path, price)
    assert len(asked) == 3
    (tmp_path / name_of(run)).unlink()
    assert len(prices_of(tmp_path, price).runs) == 1
    assert len(asked) == 3


def test_files_that_hold_no_run_are_left_out_with_one_sentence(run: Observed, tmp_path: Path) -> None:
    add(tmp_path, run)
    good = json.loads((tmp_path / name_of(run)).read_text())
    broken = {
        "run-a.json": "{", "run-b.json": "[]", "run-c.json": json.dumps({**good, "step_s": -1}),
        "run-d.json": json.dumps({**good, "plan": 7}),
        "run-e.json": json.dumps({**good, "plan": {**good["plan"], "best": None}}),
        "run-f.json": json.dumps({**good, "step_s": 1e9}), "run-g.json": "\0",
    }  # fmt: skip
    for name, text in broken.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "notes.txt").write_text("mine")
    prices = prices_of(tmp_path, price_of_file)
    assert [price.file for price in prices.runs] == [name_of(run)]
    assert set(prices.left_out) == set(broken)
    assert prices_of(tmp_path, no_price) == prices, "nor is a broken file read again"
    said = said_of(prices.left_out, tmp_path)
    assert said.startswith(f"{tmp_path}: run-a.json is left out (and 6 more): ")
    assert said.count("\n") == 0


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"planner_version": 3}', '{"runs": [{"file": "x"}]}'])
def test_prices_that_somebody_edited_are_made_again(
    run: Observed, cheap: Callable[[Path], KeptPrice], tmp_path: Path, text: str
) -> None:
    add(tmp_path, run)
    first = prices_of(tmp_path, cheap)
    (tmp_path / PRICES).write_text(text)
    assert prices_of(tmp_path, cheap) == first
    assert json.loads((tmp_path / PRICES).read_text())["runs"]


def test_prices_may_stay_unwritten(
    run: Observed, cheap: Callable[[Path], KeptPrice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path, run)

    def full(*_: object, **__: object) -> None:
        raise PlannerError("no space")

    monkeypatch.setattr(stored, "write_text", full)
    assert len(prices_of(tmp_path, cheap).runs) == 1
    assert not (tmp_path / PRICES).exists()


def test_runs_of_other_clusters_and_trainers_correct_nothing(
    plan: Plan, run: Observed, cheap: Callable[[Path], KeptPrice], tmp_path: Path
) -> None:
    add(tmp_path, run)
    prices, cluster, runtime = prices_of(tmp_path, cheap), plan.cluster, plan.runtime_spec
    assert len(runs_of(prices, cluster.changed(num_gpus=64), runtime)) == 1, "more of the same"
    assert runs_of(prices, cluster.changed(gpus_per_node=2), runtime) == ()
    assert runs_of(prices, cluster.changed(network_gb_per_s=25), runtime) == ()
    assert runs_of(prices, cluster, load_runtime("torchtitan")) == ()
    assert calibration_of((), cluster, tmp_path) is None
    assert belongs_to(cluster, runtime) == belongs_to(cluster, load_runtime("megatron@0.16"))


def test_a_run_that_teaches_nothing_is_not_kept(plan: Plan) -> None:
    with pytest.raises(SpecError, match="behind the warm-up"):
        kept_run(observed(plan, plan.step.step_s, num_steps=5), "observed.json")
    slow = kept_run(observed(plan, 9 * plan.step.step_s), "observed.json")[0]
    with pytest.raises(SpecError, match="is none that any factor on the kernels of toy-gpu explains"):
        price_of(slow, "observed.json")


def _keep_together(folder: str, name: str, text: str, barrier: object, cheap: Callable[[Path], KeptPrice]) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    keep(Path(folder), name, text)
    prices_of(Path(folder), cheap)


def test_two_that_add_at_once_lose_nothing(plan: Plan, cheap: Callable[[Path], KeptPrice], tmp_path: Path) -> None:
    context, folder = get_context("fork"), tmp_path / "deep" / "history"
    runs = [observed(plan, factor * plan.step.step_s) for factor in (1.1, 1.2)]
    texts = {name_of(run): text_of(kept_run(run, "observed.json")[0]) for run in runs}
    barrier = context.Barrier(2)
    both = [
        context.Process(target=_keep_together, args=(str(folder), name, text, barrier, cheap))
        for name, text in texts.items()
    ]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert {price.file for price in prices_of(folder, cheap).runs} == set(texts)
    assert {path.name for path in folder.iterdir()} == {*texts, PRICES}


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlannerError, match="cannot be made") as refused:
        keep(tmp_path / "file" / "history", "run-a.json", "")
    assert "PLANNER_HISTORY=DIR" in refused.value.hint


@pytest.mark.parametrize(("platform", "variables", "place"), TABLES["the_place_is_the_platforms_own"])
def test_the_place_is_the_platforms_own(platform: str, variables: dict[str, str], place: str, monkeypatch: Any) -> None:
    for name in ("PLANNER_HISTORY", "XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert str(default_folder()) == place
