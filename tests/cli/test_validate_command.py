"""`plan validate`: predictions beside published runs, drawn, and beside the planner's own choices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.answer import Plan
from planner.cli import main
from planner.search.search import plan
from planner.specs.training import SearchLimits
from planner.validate import plans
from planner.validate.rows import Row, load_rows


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for plans beside runs end by themselves: a busy machine chooses the same in more time."""

    def chosen(*job: Any, limits: SearchLimits, **more: Any) -> Plan:
        return plan(*job, limits=limits.model_copy(update={"time_limit_s": 3600.0}), **more)

    monkeypatch.setattr(plans, "plan", chosen)


def test_a_family_is_listed_run_by_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--family", "bloom"]) == 0
    assert "bloom-176b-384gpu-main" in capsys.readouterr().out


def test_an_unknown_family_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--family", "blom"]) == 2
    assert "'blom'" in capsys.readouterr().err


def test_regret_names_what_was_ranked_first_and_what_was_fastest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [row for row in load_rows() if row.family == "bloom-prequel" and row.run["global_batch_size"] == 1568]
    monkeypatch.setattr("planner.validate.rows.load_rows", lambda: tuple(few))
    assert main(["validate", "--family", "bloom-prequel", "--regret"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["validate", "--regret"]) == 0
    assert "all" in capsys.readouterr().out
    assert main(["validate", "--regret", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    worst = max(answer["sweeps"], key=lambda sweep: sweep["regret"])
    told = "".join(out.split())
    assert told.index(worst["chosen_id"]) < told.index(worst["best_id"])
    measured_s = {layout["id"]: layout["measured_s"] for layout in worst["layouts"]}
    assert worst["chosen_id"] == min(worst["layouts"], key=lambda layout: layout["predicted_s"])["id"]
    assert worst["regret"] == pytest.approx(measured_s[worst["chosen_id"]] / min(measured_s.values()) - 1)
    (family, _) = answer["regret"]
    assert family["worst"] == worst["regret"]


def test_a_family_of_one_layout_a_job_has_no_regret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--family", "bloom", "--regret"]) == 0
    assert "no job" in capsys.readouterr().out
    assert main(["validate", "--family", "bloom", "--regret", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"regret": [], "sweeps": []}


def test_unsaid_holds_runs_without_their_switches_against_their_intervals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["validate", "--family", "fms-fsdp", "--unsaid"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "FSDP" in out
    assert main(["validate", "--family", "fms-fsdp", "--unsaid", "--json"]) == 0
    kinds = {kind["name"]: kind for kind in json.loads(capsys.readouterr().out)["unsaid"]}
    assert kinds["FSDP"]["num_runs"] == kinds["all"]["num_runs"] == 10
    assert kinds["FSDP"]["width"] > kinds["FSDP"]["said_width"]
    assert main(["validate", "--family", "bloom", "--unsaid", "--regret"]) == 2
    assert "--regret" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--plans"], ["--plot", "-"]])
def test_regret_is_asked_for_by_itself(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--family", "bloom", "--regret", *option]) == 2
    assert "--regret" in capsys.readouterr().err


def test_the_plot_is_a_page_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "runs.html"
    assert main(["validate", "--family", "torchtitan", "--plot", str(target)]) == 0
    out, err = capsys.readouterr()
    assert "predicted" in out
    assert f"wrote {target}" in err
    assert target.read_text().count("measured ") > 14


def test_the_plot_replaces_nothing_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "runs.html"
    target.write_text("mine")
    assert main(["validate", "--family", "bloom", "--plot", str(target)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--force" in err
    assert target.read_text() == "mine"
    assert main(["validate", "--family", "bloom", "--plot", str(target), "--force"]) == 0
    assert target.read_text().startswith("<!doctype html>")


def test_a_plot_on_stdout_is_all_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--family", "bloom", "--plot", "-"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("<!doctype html>")
    assert out.endswith("</html>\n")


@pytest.mark.thorough(0)
def test_plans_stand_beside_what_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--family", "bloom", "--plans"]) == 0
    out = capsys.readouterr().out
    assert "speed-up" in out
    assert "bloom-176b-384gpu-main" in out


def test_plans_as_json_hold_both_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--family", "bloom", "--plans", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (plan,) = answer["plans"]
    assert plan["speedup"] == pytest.approx(plan["published_step_s"] / plan["chosen_step_s"])
    assert plan["published"]["dp"] * plan["published"]["tp"] * plan["published"]["pp"] == 384
    assert [one["name"] for one in answer["plan_families"]] == ["bloom", "all"]


def test_json_is_as_it_was_without_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--family", "bloom", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"families", "rows"}


def test_a_finding_is_marked_and_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plans, "_note", lambda *args: "slower")
    assert main(["validate", "--family", "bloom", "--plans"]) == 0
    out, err = capsys.readouterr()
    assert "slower" in out
    assert "warning: bloom-176b-384gpu-main: the published layout" in err


def test_what_is_not_modelled_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    priced = [row for row in load_rows() if row.family == "bloom"]
    fields = priced[0].model_dump()
    offloads = [
        Row.model_validate(fields | {"id": name, "run": fields["run"] | {"features": {"cpu_offload": True}}})
        for name in "ab"
    ]
    monkeypatch.setattr("planner.validate.rows.load_rows", lambda: (*priced, *offloads))
    assert main(["validate"]) == 0
    assert "2 unsupported of bloom: features: cpu_offload: tensors kept in host memory" in capsys.readouterr().out
