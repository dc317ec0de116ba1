"""What is typed wrong is one `error:` line that names it, one `hint:` line and a code; stdout is empty, or JSON."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from planner.cli import main
from planner.schedule.graph import to_torch_csv
from planner.schedule.orders import build_schedule

TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())
ROWS = [
    (f"{start} {words}".strip(), message, "".join(more[:1]), *(more[1:] or [2]))
    for start, rows in TABLE.items()
    for words, message, *more in rows
]
FILES = {
    "other.json": '{"name": 1}',
    "empty.json": "",
    "run.sh": "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64",
    "around.sh": "cat > a.yaml <<EOF\ndistributed_type: FSDP\nEOF\naccelerate launch --config_file a.yaml train.py",
    "a.log": "".join(f" iteration {n:8d}/  500 | elapsed time per iteration (ms): 9000.0 |\n" for n in range(1, 6)),
    "order.csv": to_torch_csv(build_schedule("1f1b", 2, 1, 2)),
    "phases.yaml": "phases: [{name: short, tokens: 100B, seq_length: 4096, global_batch_size: 128}]",
    "switch.yaml": "phases: [{name: a, tokens: 1T, switch: nosuch=1}]",
    "tokens.yaml": "phases: [{name: a, tokens: 1T, seq_length: 4096, batch_tokens: 1000}]",
    "by.yaml": "phases: [{name: a, tokens: 1T, global_batch_size: 64, rampup: {from: 8, by: 9, samples: 9}}]",
    "long.yaml": "phases: [{name: a, tokens: 1B, global_batch_size: 64, rampup: {from: 8, by: 8, tokens: 2B}}]",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    layout = ["-m", "8b", "-g", "16", "--hardware", "h200", "-s", "4096", "-b", "64", "--tp", "2", "--pp", "4"]
    assert main(["evaluate", *layout, "--dp", "2", "-q", "-o", str(folder / "plan.json")]) == 0
    assert main(["evaluate", "-m", "70b", "-g", "8", "--tp", "8", "-q", "-o", str(folder / "full.json")]) == 0
    return folder


@pytest.mark.parametrize(("words", "message", "hint", "code"), ROWS, ids=lambda value: str(value)[:60])
def test_a_mistake_is_one_error_and_one_hint(
    words: str, message: str, hint: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if "probe " in words or "profile " in words:
        pytest.importorskip("torch", reason="needs the probe extra (torch)")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PLANNER_HISTORY", str(folder / "history"))
    before, typed = set(folder.iterdir()), shlex.split(words)
    assert main(typed) == code
    out, err = capsys.readouterr()
    error, advice = (line for line in err.splitlines() if not line.startswith(("note: ", "warning: ")))
    assert error.startswith("error: ")
    assert message in error
    assert advice.startswith("hint: ")
    assert hint in advice
    assert out == "" or "--json" in typed
    assert set(folder.iterdir()) == before


def is_told_as_json(words: str) -> bool:
    """False for commands without --json, and where stdout is a file's or the parser's."""
    return " -o -" not in words and not words.startswith(("report", "trace", "serve", "-h", "probe", "profile"))


@pytest.mark.thorough(4)
@pytest.mark.parametrize(("words", "code"), [(words, code) for words, _, _, code in ROWS if is_told_as_json(words)])
def test_with_json_a_mistake_is_json_on_stdout_beside_its_two_lines(
    words: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main([*shlex.split(words), "--json"]) == code
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["schema_version"] == 1
    assert answer["error"]["type"] in ("SpecError", "Infeasible", "PlannerError")
    assert f"error: {' '.join(answer['error']['message'].split())}\n" in err
    assert answer["error"]["hint"] in err
    assert ("rejections" in answer) <= (code == 3)
