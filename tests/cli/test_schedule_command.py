"""`plan schedule` end to end."""

import json
from pathlib import Path

import pytest

from planner.cli import main


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_a_schedule_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", "--pp", "4", "--micro-batches", "8", "--forward", "1", "--backward", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1f1b: 4 ranks, 8 micro-batches, 33.00 s"
    assert lines[1] == "bubble 27.3% of the step, 37.5% of useful time"
    assert lines[3].startswith("0 F0F1─F2F3·")
    assert max(map(len, lines)) <= 80


def test_slow_stages_links_and_lengths_are_priced(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["schedule", "1f1b", "--pp", "4", "--p2p", "0.1", "--json"]
    seconds = []
    for more in (
        [], ["--slow-stage", "3:1.2"], ["--slow-link", "0-1:9"], ["--sizes", "1,1,1,3,1,1,1,1"], ["--blocking"],
    ):  # fmt: skip
        assert main([*base, *more]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["makespan_s"])
    assert all(slower > seconds[0] for slower in seconds[1:])
    assert main(["schedule", "1f1b", "--slow-stage", "3:1.2"]) == 0
    assert "slow ranks cost 4.800 s" in capsys.readouterr().out


def test_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--compare", "--pp", "8", "-m", "64", "--json"]) == 0
    rows = {row["schedule"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["1f1b"]["step_s"] == 213
    assert rows["zb-v"]["vpp"] == 2
    assert main(["schedule", "--compare", "--pp", "5", "-m", "6"]) == 0
    assert "needs an even pp" in " ".join(capsys.readouterr().out.split())


def test_an_order_is_found_written_and_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    csv, svg, trace = (tmp_path / name for name in ("order.csv", "order.svg", "order.json"))
    arguments = ["schedule", "auto", "-m", "12", "--forward", "1,1.3,1,1.2", "--in-flight", "5", "--json"]
    assert main([*arguments, "--csv", str(csv), "--svg", str(svg), "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["makespan_s"] <= found["best_named_s"]
    assert found["gap"] >= 0
    assert max(found["peak_in_flight_microbatches"]) <= 5
    assert "<svg" in svg.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert main(["schedule", str(csv), "--forward", "1,1.3,1,1.2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == pytest.approx(found["makespan_s"])
    assert main([*arguments, "--csv", str(csv)]) == 2  # files are not replaced unasked


def test_what_goes_to_standard_output_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", "--trace", "-"]) == 0
    assert json.loads(capsys.readouterr().out)
