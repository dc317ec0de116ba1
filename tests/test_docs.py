"""The documents say what the program does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from planner.cli import main
from planner.cli.app import COMMANDS
from planner.cli.inputs import read_job, read_limits
from planner.cli.options import SearchOptions

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDE = README + "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("COMMANDS", "ACCURACY"))
"""The README and the pages that go on where it ends."""
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL))
PYTHON = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
SMALL = ["--model", "llama-3.2-1b", "--gpus", "8"]
LINES = list(dict.fromkeys(line for line in SHELL.splitlines() if line.startswith("plan ")))
ENDLESS = ("plan serve", "plan mcp --folder runs")
"""Commands that end when they are interrupted; tests/cli/test_help.py does so."""
SHOWN = set(re.findall(r"<!-- \$ (plan .*?)(?: \| .*?)?(?: # long)? -->", GUIDE))
"""The commands whose outputs are shown; tests/test_guide.py runs them."""


@pytest.mark.thorough(3)
@pytest.mark.usefixtures("priced_once")
@pytest.mark.parametrize("line", [line for line in LINES if line not in SHOWN and line not in ENDLESS])
def test_every_command_of_the_first_pages_works(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if ("plan.json" in line or "run/" in line) and "-o plan.json" not in line:  # an earlier line saves it
        main([*SMALL, "-q", "-o", "plan.json"])
    if "train.log" in line:
        fields = " | elapsed time per iteration (ms): 9000.0 | global batch size:  2048 |\n"
        Path("train.log").write_text("".join(f" iteration {step}/ 9{fields}" for step in range(1, 9)))
    if "run/" in line:  # likewise
        main(["export", "plan.json", "--to", "megatron", "-o", "run", "-q"])
    for saved in re.findall(r"(?<!-o )\b(tp\d\.json)", line):
        main(shlex.split(next(other for other in LINES if f"-o {saved}" in other))[1:])
    if line.startswith(("plan probe", "plan profile")):
        pytest.importorskip("torch", reason="needs the probe extra (torch)")
    assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("code", PYTHON)
def test_the_python_of_the_first_pages_works(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/COMMANDS.md", "exec"), {})


@pytest.mark.parametrize("command", [name for name, row in COMMANDS.items() if row.group])
def test_every_command_is_in_the_first_pages(command: str) -> None:
    assert any(line.split()[:2] == ["plan", command] for line in SHELL.splitlines())


def test_the_readme_is_a_screen_and_a_half() -> None:
    assert len(README.splitlines()) <= 95


def test_how_sure_it_is_are_the_figures_that_the_commands_print() -> None:
    """Those of the fit are in the table of docs/CALIBRATION.md, those of `plan validate` in docs/ACCURACY.md."""
    held_out, interval, regret, unknown = re.findall(r"^- \*\*[^*]+\*\*: (.*)$", README, re.MULTILINE)
    calibration, accuracy = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("CALIBRATION", "ACCURACY"))
    _, median, p90, _, inside = re.search(  # type: ignore[union-attr]
        r"^\| all \| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", calibration, re.MULTILINE
    ).groups()
    assert f"median error of {median}, nine of ten within {p90}" in held_out
    assert interval.startswith(inside)
    words = " ".join(accuracy.split())
    jobs, first, chance = re.search(  # type: ignore[union-attr]
        r"regret: in (\d+) jobs .* the one ranked first took (\S+) longer than the fastest, one drawn by chance (\S+) ",
        words,
    ).groups()
    assert f"took {first} longer" in regret
    assert f"over {jobs} jobs; one drawn by chance {chance}." in regret
    worst = accuracy.partition("\nall  ")[2].split()[4]
    assert f"up to {worst.lstrip('-')}." in unknown


def test_links_lead_to_files_and_sections() -> None:
    for page in ("README.md", "docs/guide/reading-a-plan.md", "docs/COMMANDS.md", "docs/ACCURACY.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            assert link.startswith("https://") or ((ROOT / page).parent / link).exists(), f"{page}: {link}"


def test_documents_name_files_that_exist() -> None:
    """Those of an example, which `scripts/new` writes for a reader, are called `my`."""
    for document in ("README.md", "AGENTS.md", "CONTRIBUTING.md"):
        named = re.findall(
            r"`?((?:planner|scripts|tests|tools)/[\w/]+(?:\.(?:py|json|jsonl|yaml))?)\b", (ROOT / document).read_text()
        )
        own = [name for name in named if "_my_" not in name]
        assert [name for name in own if not (ROOT / name).exists()] == []


def test_every_script_is_listed_once_for_those_who_work_on_the_code() -> None:
    """Those with a suffix are parts of others."""
    lines = re.findall(r"^    ((?:scripts|tools)/\w+(?:, \w+/\w+)*)", (ROOT / "AGENTS.md").read_text(), re.MULTILINE)
    listed = [name for line in lines for name in line.split(", ")]
    files = [path for folder in ("scripts", "tools") for path in (ROOT / folder).iterdir()]
    run = [path for path in files if (path.is_file() and not path.suffix) or (path / "__main__.py").exists()]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in run)


def test_scripts_stay_small() -> None:
    for name in ("check", "test"):
        assert len((ROOT / "scripts" / name).read_text().splitlines()) <= 20


@pytest.mark.parametrize(
    "line", re.findall(r"^    (plan .+?)  ", (ROOT / "docs" / "RECIPE.md").read_text(), re.MULTILINE)
)
def test_the_options_of_the_recipes_page_are_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the search itself, which takes seconds each."""
    words = shlex.split(line.replace("explain ", "").replace("--recipe", ""))[1:]
    options = {name[2:]: value for name, value in zip(words[::2], words[1::2], strict=True)}
    asked = SearchOptions(**{name: int(value) if name == "gpus" else value for name, value in options.items()})
    assert read_limits(asked, read_job(asked)).time_limit_s > 0
