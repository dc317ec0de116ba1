"""`plan validate`: predictions beside published runs."""

from __future__ import annotations

import json

import pytest

from planner.cli import main
from planner.validate.rows import PublishedRun, load_rows


def test_a_family_is_listed_run_by_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--family", "bloom"]) == 0
    assert "bloom-176b-384gpu-main" in capsys.readouterr().out


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


def test_what_is_not_modelled_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    priced = [row for row in load_rows() if row.family == "bloom"]
    fields = priced[0].model_dump()
    offloads = [
        PublishedRun.model_validate(fields | {"id": name, "run": fields["run"] | {"features": {"cpu_offload": True}}})
        for name in "ab"
    ]
    monkeypatch.setattr("planner.validate.rows.load_rows", lambda: (*priced, *offloads))
    assert main(["validate"]) == 0
    assert "2 unsupported of bloom: features: cpu_offload: tensors kept in host memory" in capsys.readouterr().out
