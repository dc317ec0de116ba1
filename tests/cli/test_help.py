"""Help answers everywhere, ends in an example, and fits 80 columns."""

from __future__ import annotations

import pytest

import planner
from planner.cli import main
from planner.cli.app import COMMANDS
from planner.trainers.shipped import calibration_date

EVERY = [[], *([name] for name in COMMANDS)]


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help_with_an_example(
    command: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, flag]) == 0
    shown = capsys.readouterr().out
    head, _, example = shown.partition("Example:\n")
    assert len(head.split("\n\n")[1].strip()) > 20
    assert example.strip().startswith(" ".join(["plan", *command]))


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_help_fits_80_columns_and_is_not_cut(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*command, "-h"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "..." not in shown.partition("\n")[2], "but in the usage, for arguments that repeat"


def test_every_option_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    main(["-h"])
    options = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  -")]
    assert len(options) > 30
    assert all(len(line.split("  ")) > 2 for line in options)


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: plan")


def test_version_names_the_calibration_the_solver_and_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    ours, *others = capsys.readouterr().out.split(", ")
    assert ours == f"trainplan {planner.__version__} (calibration of {calibration_date()})"
    assert [other.split()[0] for other in others] == ["Python", "pulp", "highspy", "torch"]


@pytest.mark.parametrize(
    ("words", "index", "expected"),
    [
        ("plan --model 405", 2, "405b"),
        ("plan --hardware h2", 2, "h200-sxm-141gb"),
        ("plan evaluate --model mixtral-8x2", 3, "mixtral-8x22b"),
        ("plan models deepseek-v3", 2, "deepseek-v3"),
        ("plan --runtime torcht", 2, "torchtitan"),
        ("plan ev", 1, "evaluate"),
    ],
)
def test_shells_complete_names(
    words: str, index: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"_PLAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(index)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as done:
        main([])
    assert done.value.code == 0
    assert expected in capsys.readouterr().out.split()
