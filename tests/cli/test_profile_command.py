"""`plan profile` on a laptop: profile, plan, probe, compare, and plan again with what the probe measured."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tables import beside

from planner.cli import main
from planner.cli.measurements import read_probe
from planner.plan_file import read_plan
from planner.specs.registry import load_hardware

TABLES = beside(__file__)

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "cpu.yaml"
    assert main(["profile", "--device", "cpu", "--quick", "-q", "-o", str(path)]) == 0
    assert [*path.parent.iterdir()] == [path]
    return path


def test_the_profile_is_one_that_hardware_reads(profile: Path) -> None:
    hardware = load_hardware(str(profile))
    assert (hardware.architecture, hardware.efficiency.evidence) == ("cpu", "measured")
    assert hardware.tiers[0].name == "gloo"
    assert "exchanges over 2 ranks" in hardware.tiers[0].source
    assert "# stage forward" in profile.read_text()


def test_profile_plan_probe_compare_and_plan_again(profile: Path, tmp_path: Path, capsys: Any) -> None:
    model, plan, probe = tmp_path / "tiny.yaml", tmp_path / "plan.json", tmp_path / "probe.json"
    model.write_text(TABLES["model"])
    job = ["--model", str(model), "--gpus", "2", "--hardware", str(profile), "--runtime", "torch-eager"]
    job += ["-s", "64", "-b", "8"]
    assert main([*job, "--pp", "2", "--micro-batch-size", "1", "--schedule", "1f1b", "-q", "-o", str(plan)]) == 0
    assert read_plan(str(plan)).evidence == "calibrated"
    code = main(["probe", str(plan), "--device", "cpu", "--stage", "all", "--tolerance", "1e6", "-o", str(probe)])
    assert code == 0, capsys.readouterr().err
    result = read_probe(str(probe))
    judged = {found.name for found in result.comparisons if found.agrees is not None}
    assert {"forward", "backward", "step"} <= judged, "a CPU's seconds are judged where the profile is a CPU's"
    capsys.readouterr()
    assert main(["evaluate", *job, "--pp", "2", "--calibration", str(probe), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    listed = {row["name"]: row["verdict"] for row in answer["cluster"]["hardware"]["corrections"]}
    assert {"products", "memory-bound kernels", "host per micro-batch"} <= listed.keys()
    # a busy machine may leave more unexplained than it explains
    assert (answer["best"]["evidence"] == "probed") == (listed["products"] != "refused")
    assert main(["rebalance", str(plan), str(probe), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert sum(stage["num_layers_after"] for stage in data["stages"]) == 4
    assert data["step_after_s"] <= data["step_before_s"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_on_the_same_path(tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    assert main(["profile", "--device", "cuda", "--quick", "-o", str(path)]) == 0
    hardware = load_hardware(str(path))
    assert hardware.architecture != "cpu"
    assert hardware.memory_gib == pytest.approx(torch.cuda.get_device_properties(0).total_memory / 2**30, rel=1e-3)
    assert "torch" in hardware.efficiency.source


def test_an_existing_profile_is_kept_before_anything_is_measured(profile: Path, capsys: Any) -> None:
    before = profile.read_text()
    assert main(["profile", "--device", "cpu", "--quick", "-o", str(profile)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert profile.read_text() == before


def test_without_a_gpu_cuda_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["profile", "--device", "cuda", "-o", "-"]) == 5
    assert "torch sees no GPU" in capsys.readouterr().err


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "planner.profile.measure", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["profile", "-o", "-"]) == 5
    assert "pip install 'trainplan[probe]'" in capsys.readouterr().err
