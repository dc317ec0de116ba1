"""What goes to stdout, what to stderr, and which code comes back."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tables import beside

from planner.answer import Plan
from planner.cli import main
from planner.report.terminal import COLUMNS, LINES
from planner.specs.registry import hardware_names
from planner.validate.rows import PublishedRun, load_rows

TABLES = beside(__file__)

SMALL = ["--model", "llama-3.2-1b", "--gpus", "8", "--time-limit", "3600"]
LAYOUT = ["evaluate", "--model", "405b", "--gpus", "2048", "--tp", "8", "--pp", "16"]
PLAN = [sys.executable, "-m", "planner.cli"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The saved plan of a small model."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main([*SMALL, "-q", "-o", str(path)]) == 0
    return path


def test_the_main_job_prints_a_report_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out, err = capsys.readouterr()
    assert "llama-3.2-1b on 8 × h100-sxm-80gb" in out
    assert max(map(len, out.splitlines())) <= 80
    assert err == ""


def test_json_is_the_plan_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert data["search"]["seconds"] > 0
    assert Plan.from_json(data).to_json() == data
    assert err == ""


@pytest.mark.anew
def test_saved_plans_are_the_same_for_the_same_inputs(small: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    assert main([*SMALL, "-q", "-o", str(again)]) == 0
    assert again.read_bytes() == small.read_bytes()
    assert json.loads(again.read_text())["search"]["seconds"] is None


@pytest.mark.parametrize("words", [SMALL, ["trace", "PLAN"], ["report", "PLAN"]], ids=" ".join)
def test_a_file_is_not_overwritten_without_force(words: list[str], small: Path, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "mine"
    target.write_text("mine")
    command = [*(str(small) if word == "PLAN" else word for word in words), "-o", str(target)]
    assert main(command) == 2
    assert capsys.readouterr().err.startswith(f"error: {target}: already exists\nhint: add --force")
    assert target.read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert list(tmp_path.iterdir()) == [target]


def test_a_dash_saves_to_stdout_alone(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "-o", "-"]) == 0
    assert capsys.readouterr().out == small.read_text()


def test_evaluate_answers_as_the_main_job_does_without_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAYOUT, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "search" not in data
    assert (data["model"]["name"], data["cluster"]["hardware"]["name"]) == ("llama-3.1-405b", "h100-sxm-80gb")
    assert data["best"]["id"] is None
    assert data["best"]["parallelism"]["dp"] == 16
    assert sum(stage["num_layers"] for stage in data["best"]["stages"]) == 126
    assert Plan.from_json(data).to_json() == data


def test_evaluate_shows_what_the_trainer_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "--model", "70b", "--gpus", "16", "--runtime", "torchtitan", "--tp", "16", "-b", "64"]
    assert main(words) == 0
    assert "num_key_value_heads 8" in capsys.readouterr().out


def test_evaluate_shows_the_planners_own_choice_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LAYOUT) == 0
    lines = capsys.readouterr().out.splitlines()
    given, own = (next(line for line in lines if line.startswith(f" {label} ")) for label in ("given", "own"))
    assert given.split()[1:7] == ["TP", "8", "PP", "16", "DP", "16"]
    assert "%" in own


def test_what_cannot_fit_says_in_json_what_excludes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "405b", "--gpus", "8", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {"schema_version", "error", "rejections", "nearest", "remedy"}
    assert sum(answer["rejections"].values()) > 0


def test_a_file_of_runs_that_breaks_off_ends_in_a_line_of_json(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b'{"id": "a", "run": {}}\n\x00')
    assert main(["evaluate", "--runs", str(path), "--json"]) == 2
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["error"]["type"] for answer in answers] == ["SpecError", "SpecError"]


def test_an_error_that_nobody_can_read_is_no_defect() -> None:
    command = f"{sys.executable} -m planner.cli models no-such-model --json > /dev/full"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "--model", "nothing", "--gpus", "8"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-2].startswith("error: model: unknown 'nothing'")


def test_a_defect_is_reported_as_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr("planner.search.search.planned", broken)
    assert main(SMALL) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: internal: ZeroDivisionError: by zero (test_main.py:")
    assert "--debug" in hint


def test_quiet_drops_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*LAYOUT, "--batch-tokens", "16M", "--json", "-o", str(tmp_path / "plan.json")]
    assert main(arguments) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["note", "note"]
    assert main([*arguments, "--force", "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_runs_answer_line_by_line_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = TABLES["runs_answer_line_by_line_in_order"]
    lines = [
        {"id": "good", "run": run, "measured": {}}, {"id": "odd", "run": {**run, "parallelism": {"tp": 8, "typo": 1}}},
        "not JSON", {"id": "again", "run": run},
    ]  # fmt: skip
    path = tmp_path / "runs.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    assert main(["evaluate", "--runs", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["id"] for answer in answers] == ["good", "odd", None, "again"]
    assert answers[0]["fits"] is True
    assert answers[1]["error"] == {
        "type": "SpecError",
        "message": "line 2: run: parallelism.typo: unknown key",
        "hint": answers[1]["error"]["hint"],
    }
    assert "not JSON" in answers[2]["error"]["message"]
    assert {**answers[3], "id": "good"} == answers[0]
    assert err == "warning: line 1: features: warp_drive: unknown, ignored\n"


@pytest.mark.parametrize("content", [b"\x00\x01\x02", b"x" * (2**20 + 2)])
def test_what_is_no_file_of_runs_is_refused(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(content)
    assert main(["evaluate", "--runs", str(path)]) == 2
    assert "is not a file of JSON lines" in capsys.readouterr().err


def test_models_and_hardware_can_be_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in TABLES["models_and_hardware_can_be_listed_and_shown"]:
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert expected in out
        if "--json" not in arguments:
            assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(("listing", "option", "name"), TABLES["what_is_shown_can_be_read_back"])
def test_what_is_shown_can_be_read_back(listing: str, option: str, name: str, tmp_path: Path, capsys: Any) -> None:
    main([listing, name])
    path = tmp_path / "mine.yaml"
    path.write_text(capsys.readouterr().out)
    assert main([*LAYOUT, "--json"]) == main([*LAYOUT, option, str(path), "--json"]) == 0
    decoder, out = json.JSONDecoder(), capsys.readouterr().out
    first, end = decoder.raw_decode(out)
    second, _ = decoder.raw_decode(out, end + 1)
    assert first.pop("command") != second.pop("command")
    assert first["digest"].pop("command") != second["digest"].pop("command")
    assert first == second


def test_a_closed_pipe_is_quiet() -> None:
    with subprocess.Popen([*PLAN, "models", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


def test_ctrl_c_is_130_without_a_traceback() -> None:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*PLAN, "evaluate", "--runs", "-"], **streams) as process:  # type: ignore[call-overload]
        process.stdin.write(b'{"id": "a", "run": {}}\n')
        process.stdin.flush()
        assert process.stdout.readline() == b"a\n"  # it is running, and waits for the next line
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == b""


def test_a_terminal_without_unicode_still_gets_an_answer() -> None:
    done = subprocess.run([*PLAN, *LAYOUT], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert done.stderr == b""


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_stream_that_is_closed_is_no_defect(closed: int) -> None:
    """`plan … >&-`: what would be printed is lost, and nothing else happens."""
    command = f"{sys.executable} -m planner.cli models no-such-model {closed}>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "internal" not in done.stderr
    assert done.stdout == ""


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["hardware"]) == 0
    return capsys.readouterr().out


def test_the_list_has_every_profile_once_and_no_line_beyond_80_columns(listed: str) -> None:
    lines = listed.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.endswith(" $/h") for line in lines), "no column is cut"
    first = [line.split()[0] for line in lines if line.strip()]
    assert all(first.count(name) == 1 for name in hardware_names())


@pytest.mark.parametrize(("name", "heading"), TABLES["hardware_is_listed_with_its_like"])
def test_hardware_is_listed_with_its_like(name: str, heading: str, listed: str) -> None:
    (block,) = [block for block in listed.split("\n\n") if f"\n{name} " in block]
    assert heading in block.splitlines()[0]


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", ["t4", "v100-32gb"])
def test_a_gpu_without_bf16_computes_in_fp16_unless_asked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--model", "1b", "--gpus", "1", "--hardware", name, "--lora", "--seq-length", "512", "--json"]
    assert main([*job, "--dtype", "bf16"]) == 0
    assert "has no bf16: priced at the rate of fp16, which --dtype fp16 asks for" in capsys.readouterr().out
    assert main(job) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["training"]["dtype"], plan["best"]["warnings"]) == ("fp16", [])
    assert main([*job[:-1], "--finetune", "--runtime", "megatron"]) == 0
    assert "MFU of fp16" in capsys.readouterr().out


def test_regret_names_what_was_ranked_first_and_what_was_fastest(capsys: Any, monkeypatch: Any) -> None:
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


def test_what_is_not_modelled_is_counted_and_named(monkeypatch: Any, capsys: Any) -> None:
    priced = [row for row in load_rows() if row.family == "bloom"]
    fields = priced[0].model_dump()
    offloads = [
        PublishedRun.model_validate(fields | {"id": name, "run": fields["run"] | {"features": {"cpu_offload": True}}})
        for name in "ab"
    ]
    monkeypatch.setattr("planner.validate.rows.load_rows", lambda: (*priced, *offloads))
    assert main(["validate"]) == 0
    assert "2 unsupported of bloom: features: cpu_offload: tensors kept in host memory" in capsys.readouterr().out


@pytest.mark.thorough(4)
@pytest.mark.parametrize("job", TABLES["jobs"].strip().splitlines())
def test_the_answer_is_one_screen(job: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    assert main([*job.split(), "--no-history"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert sum(line == "" for line in lines) < 8
    assert lines[-1].startswith("next  ")


@pytest.mark.parametrize(("job", "command"), TABLES["the_next_command_exports_only_what_a_target_takes"])
def test_the_next_command_exports_only_what_a_target_takes(job: str, command: str, capsys: Any) -> None:
    assert main([*job.split(), "--no-history"]) == 0
    assert command in capsys.readouterr().out.splitlines()[-1]
