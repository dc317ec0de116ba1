"""`--calibration probe.json`: what a probe measured corrects the hardware of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from probes import probe_result

from planner.answer import Plan
from planner.cli import main
from planner.plan_file import read_plan
from planner.probe.run_price import in_eager_torch

JOB = ["--model", "8b", "--gpus", "16", "--hardware", "h200", "-s", "4096", "-b", "64"]
LAYOUT = ["evaluate", *JOB, "--tp", "2", "--pp", "4", "--dp", "2"]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "plan.json"
    assert main([*LAYOUT, "--runtime", "torch-eager", "-q", "-o", str(path)]) == 0
    return path


def save_probe(plan_file: Path, factor: float, **changes: Any) -> Path:
    """A probe in which everything took `factor` times as long as planned."""
    plan = read_plan(str(plan_file))
    stages = in_eager_torch(plan, alone=True).stages
    result = probe_result(plan, lambda j: (factor * stages[j].forward_s, factor * stages[j].backward_s), **changes)
    path = plan_file.with_name("probe.json")
    path.write_text(result.model_dump_json())
    return path


def planned(arguments: list[str], tmp_path: Path) -> Plan:
    path = tmp_path / "again.json"
    assert main([*arguments, "-q", "--force", "-o", str(path)]) == 0
    return read_plan(str(path))


def test_a_slower_machine_makes_a_slower_plan_with_probed_evidence(plan_file: Path, tmp_path: Path) -> None:
    probe = save_probe(plan_file, 1.2)
    before = planned([*LAYOUT], tmp_path)
    after = planned([*LAYOUT, "--calibration", str(probe)], tmp_path)
    assert (before.evidence, after.evidence) == ("calibrated", "probed")
    assert after.step.breakdown.compute_s == pytest.approx(1.2 * before.step.breakdown.compute_s, rel=0.02)
    assert after.runtime_spec.microbatch_overhead_s > 0
    assert after.inputs_sha256 != before.inputs_sha256


def test_a_search_is_calibrated_too_and_says_what_it_took(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = save_probe(plan_file, 1.1)
    assert main([*JOB, "--top", "1", "--calibration", str(probe), "-o", str(tmp_path / "p.json")]) == 0
    assert read_plan(str(tmp_path / "p.json")).evidence == "probed"
    told = capsys.readouterr().err
    assert f"{probe}: products: × 1.000 → × 1.1" in told
    assert "is that" not in told


@pytest.mark.thorough(0)
def test_the_panel_the_report_and_explain_list_what_was_corrected(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = save_probe(plan_file, 1.2)
    assert main([*LAYOUT, "--calibration", str(probe), "-q", "--force", "-o", str(tmp_path / "p.json")]) == 0
    corrections = json.loads((tmp_path / "p.json").read_text())["cluster"]["hardware"]["corrections"]
    products = next(row for row in corrections if row["name"] == "products")
    assert (products["before"], products["verdict"]) == (1.0, "corrected")
    assert products["after"] == products["measured"] == pytest.approx(1.2, rel=0.02)
    capsys.readouterr()
    for arguments in (LAYOUT, ["explain", *JOB, "--tp", "2", "--pp", "4", "--dp", "2", "--time-limit", "1"]):
        assert main([*arguments, "--calibration", str(probe), "-q"]) == 0
        shown = capsys.readouterr().out
        assert "What a probe corrected" in shown
        assert "products" in shown
        assert "→ × 1.2" in shown
    assert main(["report", str(tmp_path / "p.json"), "-q", "--force", "-o", str(tmp_path / "p.html")]) == 0
    assert "What a probe corrected" in (tmp_path / "p.html").read_text()


@pytest.mark.thorough(0)
def test_seconds_that_factors_do_not_explain_leave_the_profile_and_widen_the_interval(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = read_plan(str(plan_file)).best.stages
    scattered = (1.6, 0.7, 1.45, 0.65)
    result = probe_result(
        read_plan(str(plan_file)), lambda j: (scattered[j] * stages[j].forward_s, stages[j].backward_s / scattered[j])
    )
    probe = plan_file.with_name("scattered.json")
    probe.write_text(result.model_dump_json())
    before = planned([*LAYOUT], tmp_path)
    assert main([*LAYOUT, "--calibration", str(probe), "--force", "-o", str(tmp_path / "again.json")]) == 0
    assert "products: refused, stays at × 1.000" in capsys.readouterr().err
    after = read_plan(str(tmp_path / "again.json"))
    assert after.evidence == before.evidence == "calibrated"
    assert after.step.breakdown.compute_s == before.step.breakdown.compute_s
    low_s, high_s = after.step.step_s_interval or (0.0, 0.0)
    assert high_s / low_s > 1.3**2


def test_a_file_that_is_no_probe_is_refused(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAYOUT, "--calibration", str(plan_file)]) == 2
    assert "plan.json: is no probe's result" in capsys.readouterr().err


def test_runs_say_their_hardware_themselves(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe = save_probe(plan_file, 1.0)
    assert main(["evaluate", "--runs", "runs.jsonl", "--calibration", str(probe)]) == 2
    assert "--runs and --calibration: both given" in capsys.readouterr().err
