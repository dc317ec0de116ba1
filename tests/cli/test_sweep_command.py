"""`plan sweep` answers which and how many GPUs, on the screen, as JSON, as CSV and as pictures."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tables import beside

from planner.answer import Plan
from planner.cli import main
from planner.plan_file import read_plan

TABLES = beside(__file__)

QUICK = ["sweep", "--model", "8b", "-s", "4096", "-b", "64", "--tp", "1", "--pp", "1", "--micro-batch-size", "1", "-q"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*QUICK, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_json_is_that_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--gpus", "8,16", "--hardware", "h100,h200", "--tokens", "100B", "--deadline", "100d")
    assert set(found) >= {"points", "pareto", "answers"}
    points = found["points"]
    assert [[p["options"]["gpus"], p["options"]["hardware"]] for p in points] == TABLES["gpus_and_hardware"]
    fields = (
        "options fits step_s step_s_interval tokens_per_s scaling_efficiency mfu days days_interval usd usd_interval"
    )
    assert all(set(fields.split()) <= set(point) for point in points)
    assert found["answers"] == {
        "fewest_gpus": min(range(4), key=lambda i: (points[i]["num_gpus"], points[i]["step_s"])),
        "cheapest": min(range(4), key=lambda i: points[i]["usd"]),
        "fastest": min(range(4), key=lambda i: points[i]["days"]),
    }


def test_an_axis_of_the_layout_gives_a_point_for_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--gpus", "8", "--recompute", "none,full")
    points = found["points"]
    assert [point["options"]["recompute"] for point in points] == ["none", "full"]
    assert points[0]["step_s"] < points[1]["step_s"] or not points[0]["fits"]


def test_auto_finds_the_fewest_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["sweep", "--model", "llama-2-70b", "-b", "64", "--tp", "8", "--micro-batch-size", "1", "-q", "--json"]
    job += ["--switch", "optimizer_offload=0"]  # with it, 8 GPUs are enough
    assert main([*job, "--gpus", "auto"]) == 0
    found = json.loads(capsys.readouterr().out)
    points, answers = found["points"], found["answers"]
    fewest = points[answers["fewest_gpus"]]["num_gpus"]
    assert fewest == min(point["num_gpus"] for point in points if point["fits"])
    below = [point["num_gpus"] for point in points if point["num_gpus"] < fewest]
    assert fewest - 8 in below, "the next smaller number was tried"


def test_the_screen_is_80_columns_and_says_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--gpus", "8..24", "--hardware", "h100,h200", "--tokens", "100B", "--deadline", "10d"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "The run ends within 10.00 days at 4 of 6 points; fewest GPUs: 16 GPUs" in shown.replace("\n", " ")
    assert "in time" in shown


def test_csv_and_a_picture_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, lines = tmp_path / "a.svg", tmp_path / "a.csv"
    assert main([*QUICK, "--gpus", "8,16", "--plot", str(picture), "--csv", str(lines)]) == 0
    assert "fewest GPUs" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"<?xml")
    with lines.open() as file:
        assert [row["gpus"] for row in csv.DictReader(file)] == ["8", "16"]


JOB = ["--model", "8b", "--gpus", "16", "-s", "8192", "-b", "128", "--no-history", "-q"]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("next") / "plan.json"
    assert main([*JOB, "-o", str(path)]) == 0
    return path


def answer_of_next(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main(["next", *words, "--json", "-q"]) == 0
    return json.loads(capsys.readouterr().out)


def run_of(trial: Path, longer: float) -> Path:
    """The observation of a run of a trial, whose steps take `longer` times what was predicted."""
    step_s, log, path = longer * read_plan(str(trial)).step.step_s, trial.with_suffix(".csv"), trial.with_suffix(".run")
    log.write_text("step,step_time_s\n" + "".join(f"{n},{step_s * (1 + 0.002 * (n % 3)):.6f}\n" for n in range(1, 31)))
    assert main(["observe", str(log), "--plan", str(trial), "-q", "--force", "-o", str(path)]) == 0
    return path


def test_the_loop_closes(plan_file: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PLANNER_HISTORY", str(tmp_path / "history"))
    plan, first, second = str(plan_file), tmp_path / "first.json", tmp_path / "second.json"
    before = answer_of_next(capsys, plan, "--days", "30", "-o", str(first))
    assert before["proposed"] == before["favourite"] == str(read_plan(plan).parallelism)
    assert main(["export", str(first), "--to", "megatron", "--trials", "0", "-o", str(tmp_path / "trial"), "-q"]) == 0
    row = json.loads((tmp_path / "trial" / "trials.json").read_text())["trials"][0]
    assert row["layout"] == before["proposed"]
    run = run_of(first, 1.2)
    # a run that takes longer than the others are expected to makes another layout the favourite
    after = answer_of_next(capsys, plan, "--days", "30", "--measured", str(run), "-o", str(second))
    assert after["num_measured"] == 1
    assert after["proposed"] != before["proposed"]
    told = {one["number"]: one for one in after["layouts"]}
    assert told[0]["measured_s"] == pytest.approx(1.2 * told[0]["predicted_s"], rel=0.01)
    assert told[1]["expected_s"] > 1.05 * told[1]["predicted_s"]
    # kept, it counts by itself, and once where it is given too
    assert main(["validate", "--add", str(run), "-q"]) == 0
    assert answer_of_next(capsys, plan, "--days", "30") == after
    assert answer_of_next(capsys, plan, "--days", "30", "--measured", str(run)) == after
    assert answer_of_next(capsys, plan, "--days", "30", "--no-history") == before
    # one that did not run is not proposed again
    number = next(one["number"] for one in after["layouts"] if one["name"] == after["proposed"])
    assert answer_of_next(capsys, plan, "--days", "30", "--skip", str(number))["proposed"] != after["proposed"]


def test_it_stops_with_exit_code_0_and_writes_nothing(plan_file: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "none.json"
    assert main(["next", str(plan_file), "--days", "0.01", "-o", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("stop  train with TP")
    assert "none.json is not written" in err
    assert not path.exists()


@pytest.mark.parametrize(("words", "said", "code"), TABLES["what_is_wrong_is_named"])
def test_what_is_wrong_is_named(
    words: list[str], said: str, code: int, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ""
    if "{other}" in words:
        smaller = tmp_path / "other.json"
        assert main([*JOB, "-b", "64", "-o", str(smaller)]) == 0
        other = str(run_of(smaller, 1.0))
    if "{full}" in words:
        full = tmp_path / "full.json"
        assert (
            main(["evaluate", "--model", "70b", "--gpus", "8", "--tp", "8", "--no-history", "-q", "-o", str(full)]) == 0
        )
        plan_file, words = full, []
    words = [word.format(plan=plan_file, other=other) for word in words]
    assert main(["next", str(plan_file), *words]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "\nhint: " in err


JOB_OF_PHASES = TABLES["job_of_phases"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases")
    (folder / "phases.yaml").write_text(TABLES["phases"])
    return folder


@pytest.fixture(scope="module")
def answer_of_phases(folder: Path) -> dict[str, Any]:
    """The run as JSON, which has been saved as a folder too."""
    path = str(folder / "phases.yaml")
    assert main([*JOB_OF_PHASES, "--runtime", "torchtitan", "--phases", path, "-q", "-o", f"{folder}/run/"]) == 0
    return json.loads((folder / "run" / "phases.json").read_text())


def test_a_phase_has_its_own_options(answer_of_phases: dict[str, Any]) -> None:
    short, more, packed = answer_of_phases["phases"]
    assert (short["global_batch_size"], [one["global_batch_size"] for one in short["batches"]]) == (128, [64, 96, 128])
    assert more["global_batch_size"] == 256
    assert (packed["seq_length"], packed["dtype"], packed["steps"]) == (32768, "fp8", 1000)
    assert 0 < packed["document_fraction"] < 0.2
    assert "-s 4096" in more["plan"]["command"].replace("--seq-length", "-s")
    assert "--phases" in packed["plan"]["command"]


def test_every_plan_is_a_file_that_commands_read(folder: Path, answer_of_phases: dict[str, Any]) -> None:
    for phase in answer_of_phases["phases"]:
        path = folder / "run" / f"plan-{phase['name']}.json"
        plan = Plan.load(path)
        assert plan.training.seq_length == phase["seq_length"]
        assert plan.run_cost.days == phase["days"]
        assert phase["plan"]["best"] == json.loads(path.read_text())["best"]
    exported = folder / "exported"
    assert (
        main(["export", str(folder / "run" / "plan-more.json"), "--to", "torchtitan", "-o", str(exported), "-q"]) == 0
    )
    assert any(exported.iterdir())


def test_the_table_fits_eighty_columns(folder: Path, capsys: Any) -> None:
    (folder / "one.yaml").write_text(
        "phases:\n  - {name: a-name-that-is-longer-than-its-column, tokens: 1T, global_batch_size: 128, "
        "lengths: {p50: 9, p90: 999}, rampup: {from: 64, by: 32, tokens: 1B}}\n"
    )
    assert main([*JOB_OF_PHASES, "-s", "4096", "--phases", str(folder / "one.yaml"), "--dp", "8"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "--rampup-batch-size 64 32 244141" in " ".join(text.split())


RECIPES = Path(__file__).parents[2] / "docs" / "phases"
ALIKE = ["--gpus", "64", "--pp", "1", "--micro-batch-size", "1", "--switch", "default", "--top", "1", "--json", "-q"]


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("recipe", "job", "tokens", "lengths"), TABLES["published_recipes_sum"])
def test_published_recipes_sum(recipe: str, job: list[str], tokens: float, lengths: list[int], capsys: Any) -> None:
    assert main(["--phases", str(RECIPES / f"{recipe}.yaml"), *job, *ALIKE]) == 0
    answer_of_phases = json.loads(capsys.readouterr().out)
    phases = answer_of_phases["phases"]
    assert [phase["seq_length"] for phase in phases if phase["seq_length"] in lengths] == lengths
    assert (
        sum(phase["tokens"] for phase in phases)
        == answer_of_phases["total"]["tokens"]
        == pytest.approx(tokens, rel=0.01)
    )
    wall = sum(phase["days"] + phase["stop_s"] / 86400 for phase in phases)
    assert answer_of_phases["total"]["days"] == pytest.approx(wall)
    assert len(answer_of_phases["changes"]) == sum(phase["stop_s"] > 0 for phase in phases)


QUICK_OF_REPLAN = ["--schedule", "1f1b", "--recompute", "none", "--top", "1", "-q"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replan") / "plan.json"
    assert main(["evaluate", *TABLES["job_of_replan"], "--dp", "8", "-q", "-o", str(path)]) == 0
    return path


def answer_of_replan(saved: Path, *more: str) -> list[str]:
    return ["--from", str(saved), "--gpus", "28", *QUICK_OF_REPLAN, *more]


def test_the_json_is_a_plan_with_the_ways_beside_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(answer_of_replan(saved, "--json")) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    resume = data.pop("resume")
    plan = Plan.from_json(data)
    chosen = resume["choices"][resume["recommended"]]
    assert chosen["parallelism"] == plan.parallelism.model_dump(mode="json")
    assert {"split", "reshard", "wait"} <= {choice["kind"] for choice in resume["choices"]}
    assert resume["num_gpus"] == plan.cluster.num_gpus == 28
    assert resume["checkpoint"]["source"]
    assert all(row["gpu_hours"] == row["idle_gpu_hours"] + row["lost_gpu_hours"] for row in resume["spares"])
    assert plan.command.startswith("plan --gpus 28")


def test_what_is_saved_is_a_plan_that_commands_read(saved: Path, tmp_path: Path, capsys: Any) -> None:
    new = tmp_path / "new.json"
    assert main(answer_of_replan(saved, "--keep", "tp, pp", "-o", str(new))) == 0
    assert "Ways to go on" in capsys.readouterr().out
    assert Plan.load(new).parallelism.tp == 2
    assert main(["compare", str(saved), str(new)]) == 0
    assert main(answer_of_replan(saved, "-o", str(new))) == 2
    assert "--force" in capsys.readouterr().err


def test_options_take_the_place_of_the_jobs_own(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["-b", "56", "--spares", "1", "--failures-per-1000-gpu-days", "2", "--tokens", "1T", "--json"]
    assert main(answer_of_replan(saved, *more)) == 0
    data = json.loads(capsys.readouterr().out)
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra test")
    schema = Path(__file__).parents[2] / "docs" / "schemas" / "resume.json"
    jsonschema.validate(data, json.loads(schema.read_text()))
    assert data["training"]["global_batch_size"] == 56
    assert data["training"]["operations"]["num_spare_nodes"] == 1
    assert data["run_cost"]["days"] > 0
    assert {choice["global_batch_size"] for choice in data["resume"]["choices"]} == {56, 64}
    rates = [failure["per_day"] for failure in data["resume"]["failures"]]
    assert sum(rates) == pytest.approx(2 * data["best"]["parallelism"]["num_gpus_used"] / 1000)


def test_the_same_gpus_leave_nothing_to_do(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", str(saved), "--gpus", "32"]) == 0
    assert capsys.readouterr().out == "Nothing to do: the plan is for 32 GPUs.\n"


def test_an_infeasible_job_is_json_too(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*answer_of_replan(saved, "--keep", "tp,pp,dp"), "--json"]) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["error"]["hint"].startswith("leave ")
    assert data["remedy"]["options"]
