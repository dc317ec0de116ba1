"""`--calibration probe.json`: what a probe measured corrects the hardware of a plan."""

import json
from pathlib import Path
from typing import Any

import pytest
from probes import probe_result

from planner.answer import Plan
from planner.cli import main
from planner.cli.output import show
from planner.plan_file import read_plan
from planner.probe.run_price import in_eager_torch
from planner.report.terminal import render
from planner.saved import with_digest

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


def test_a_search_is_calibrated_too_and_says_what_it_took(plan_file: Path, tmp_path: Path, capsys: Any) -> None:
    probe = save_probe(plan_file, 1.1)
    assert main([*JOB, "--top", "1", "--calibration", str(probe), "-o", str(tmp_path / "p.json")]) == 0
    assert read_plan(str(tmp_path / "p.json")).evidence == "probed"
    told = capsys.readouterr().err
    assert f"{probe}: products: × 1.000 → × 1.1" in told
    assert "is that" not in told


@pytest.mark.thorough(0)
def test_seconds_that_no_factor_explains_widen_the_interval(plan_file: Path, tmp_path: Path, capsys: Any) -> None:
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


JOB_OF_HISTORY = ["--model", "8b", "--gpus", "16", "-s", "8192", "-b", "128"]
LAYOUT_OF_HISTORY = ["evaluate", *JOB_OF_HISTORY, "--tp", "2", "--pp", "2", "--dp", "4"]
SLOWER = 1.1


@pytest.fixture(scope="module")
def planned_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("history") / "plan.json"
    assert main([*LAYOUT_OF_HISTORY, "-q", "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def run_file(planned_file: Path) -> Path:
    """A log of a run that took a tenth longer, as `plan observe` saved it."""
    step_s = SLOWER * read_plan(str(planned_file)).step.step_s
    log, path = planned_file.with_name("steps.csv"), planned_file.with_name("observed.json")
    log.write_text("step,step_time_s\n" + "".join(f"{n},{step_s * (1 + 0.002 * (n % 3)):.6f}\n" for n in range(1, 61)))
    assert main(["observe", str(log), "--plan", str(planned_file), "-q", "-o", str(path)]) == 0
    return path


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kept runs that is not there yet."""
    folder = tmp_path / "history"
    monkeypatch.setenv("PLANNER_HISTORY", str(folder))
    return folder


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert main([*arguments, "--json", "-q"]) == 0
    return json.loads(capsys.readouterr().out)


def text_of(plan: Plan, capsys: pytest.CaptureFixture[str]) -> str:
    """The report of a plan as a terminal shows it."""
    capsys.readouterr()
    show(render(plan))
    return capsys.readouterr().out


def test_calibrating_gives_the_measured_step(planned_file: Path, run_file: Path, tmp_path: Path, capsys: Any) -> None:
    measured_s = json.loads(run_file.read_text())["observation"]["step_s"]
    after = planned([*LAYOUT_OF_HISTORY, "--calibration", str(run_file)], tmp_path)
    assert after.step.step_s == pytest.approx(measured_s, rel=1e-6)
    assert after.evidence == "probed"
    assert {correction.by for correction in after.cluster.hardware.corrections} == {"run"}
    assert main([*LAYOUT_OF_HISTORY, "--calibration", str(run_file), "--json"]) == 0
    assert f"note: {run_file}: all kernels: × 1.000 → × 1.1" in capsys.readouterr().err
    shown = text_of(after, capsys)
    assert "│ by a run: all kernels × 1.000 → × 1.1" in shown
    assert "What a run corrected" in shown
    assert "a probe" not in shown


def test_a_kept_run_corrects_the_job(
    planned_file: Path, run_file: Path, history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_plan(str(planned_file))
    added = answer(["validate", "--add", str(run_file)], capsys)
    assert added["history"] == str(history)
    assert added["is_new"] is True
    assert added["cluster_and_trainer"] == "h100-sxm-80gb, 8 GPUs a node, 50 GB/s between nodes, megatron"
    assert added["correction"]["num_runs"] == added["correction"]["num_jobs"] == len(added["runs"]) == 1
    assert added["runs"][0]["predicted_step_s"] == pytest.approx(before.step.step_s)
    assert 1 < added["correction"]["kernels_factor"] < SLOWER, "one run is believed in part"
    assert answer(["validate", "--add", str(run_file)], capsys)["is_new"] is False

    after = planned(LAYOUT_OF_HISTORY, tmp_path)
    assert 1.02 < after.step.step_s / before.step.step_s < SLOWER
    (correction,) = after.cluster.hardware.corrections
    assert (correction.by, correction.source) == ("history", "1 run of yours: …/history")
    shown = text_of(after, capsys)
    assert "│ corrected by 1 run of yours: …/history · all kernels × 1.000 → × 1.0" in shown
    assert "What your runs corrected" in shown
    assert main([*LAYOUT_OF_HISTORY, "--json"]) == 0
    assert f"note: {history}: all kernels × 1.000 → × 1.0" in capsys.readouterr().err


@pytest.mark.anew
def test_no_history_changes_no_byte_of_a_plan(
    planned_file: Path, run_file: Path, history: Path, tmp_path: Path
) -> None:
    assert main(["validate", "--add", str(run_file), "-q"]) == 0
    again = tmp_path / "without.json"
    assert main([*LAYOUT_OF_HISTORY, "--no-history", "-q", "-o", str(again)]) == 0
    saved, expected = (json.loads(path.read_text()) for path in (again, planned_file))
    assert saved | {"command": "", "digest": {}} == expected | {"command": "", "digest": {}}
    for path in history.iterdir():
        path.unlink()
    assert main([*LAYOUT_OF_HISTORY, "-q", "--force", "-o", str(again)]) == 0
    assert again.read_bytes() == planned_file.read_bytes(), "an empty folder changes nothing"


def test_a_run_of_another_trainer_is_doubted_and_not_kept(run_file: Path, history: Path, capsys: Any) -> None:
    other = [*LAYOUT_OF_HISTORY, "--runtime", "torchtitan", "--json"]
    assert main([*other, "--calibration", str(run_file)]) == 0
    says = "is a run of megatron: how far it is from its price may not hold for torchtitan"
    assert f"warning: {run_file}: {says}" in capsys.readouterr().err
    assert main(["validate", "--add", str(run_file), "-q"]) == 0
    capsys.readouterr()
    assert main(other) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["cluster"]["hardware"]["corrections"] == []
    assert "of yours" not in shown.err


def test_a_broken_file_is_one_warning(planned_file: Path, history: Path, tmp_path: Path, capsys: Any) -> None:
    history.mkdir()
    (history / "run-0000.json").write_text('{"plan": {}}')
    for _ in range(2):
        capsys.readouterr()
        assert main([*LAYOUT_OF_HISTORY, "--force", "-o", str(tmp_path / "again.json")]) == 0
        assert capsys.readouterr().err.count("run-0000.json is left out") == 1
    assert (tmp_path / "again.json").read_bytes() == planned_file.read_bytes()


def test_another_folder_may_be_named(run_file: Path, history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = history.with_name("other")
    assert main(["validate", "--add", str(run_file), "--history", str(other)]) == 0
    shown = capsys.readouterr().out
    assert "steps.csv: llama-3.1-8b on 16 GPUs" in " ".join(shown.split())
    assert f"where PLANNER_HISTORY={other}".replace(" ", "") in "".join(shown.split())
    assert "by 1 run of 1 job" in " ".join(shown.split())
    assert len(list(other.glob("run-*.json"))) == 1
    assert not history.exists()


def test_a_run_on_another_gpu_is_refused_by_name(run_file: Path, history: Path, tmp_path: Path, capsys: Any) -> None:
    saved = json.loads(run_file.read_text())
    saved["observation"]["facts"]["hardware"] = "NVIDIA A100-SXM4-80GB"
    other = tmp_path / "a100.json"
    other.write_text(json.dumps(with_digest({name: value for name, value in saved.items() if name != "digest"})))
    for arguments in (["validate", "--add", str(other)], [*LAYOUT_OF_HISTORY, "--calibration", str(other)]):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert "ran on NVIDIA A100-SXM4-80GB (ampere); h100-sxm-80gb is hopper" in error
        assert "hint: plan with --hardware a100-sxm-80gb" in error
    assert main([*LAYOUT_OF_HISTORY, "--hardware", "h200", "--calibration", str(run_file)]) == 2
    assert "is of a run on h100-sxm-80gb, which says nothing about h200-sxm-141gb" in capsys.readouterr().err
    assert not history.exists()


@pytest.mark.thorough(0)
def test_a_calibration_that_is_named_wins(run_file: Path, history: Path, tmp_path: Path) -> None:
    alone = planned([*LAYOUT_OF_HISTORY, "--calibration", str(run_file)], tmp_path)
    assert main(["validate", "--add", str(run_file), "-q"]) == 0
    both = planned([*LAYOUT_OF_HISTORY, "--calibration", str(run_file)], tmp_path)
    assert both.inputs_sha256 == alone.inputs_sha256


@pytest.mark.thorough(0)
def test_a_sweep_takes_it_and_says_so_once(run_file: Path, history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["sweep", "--model", "8b", "--gpus", "8,16", "-s", "8192", "-b", "64", "--dp", "4,8", "--top", "1"]
    sweep += ["--tp", "1", "--pp", "1", "--time-limit", "2"]
    plain = answer(sweep, capsys)
    assert main(["validate", "--add", str(run_file), "-q"]) == 0
    capsys.readouterr()
    assert main([*sweep, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("1 run of yours") == 1
    steps = [[point["step_s"] for point in one["points"]] for one in (plain, json.loads(shown.out))]
    assert all(after > 1.01 * before for before, after in zip(*steps, strict=True))
