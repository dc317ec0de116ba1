"""The documents say what the program does.

Pages say what the commands print: their blocks are run again, and those that take long are parsed.
The example notebook: its cells run in their order, and it is kept without outputs.
The skill for agents: every command in it runs, and questions of public threads have theirs in its table.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import pytest
import yaml

from planner import Plan
from planner.cli import main
from planner.cli.app import COMMANDS, _root
from planner.cli.inputs import read_job, read_limits
from planner.cli.options import SearchOptions

ROOT = Path(__file__).parents[2]
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
"""The commands whose outputs are shown; tests/scripts/test_docs.py runs them."""


@pytest.mark.thorough(3)
@pytest.mark.usefixtures("priced_once")
@pytest.mark.parametrize("line", [line for line in LINES if line not in SHOWN and line not in ENDLESS])
def test_every_command_of_the_first_pages_works(line: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
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
    assert f"up to {worst.lstrip('+-')}." in unknown


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


SHOWING = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("FINETUNE", "ACCURACY", "OBSERVE"))]
PAGES = [*sorted((ROOT / "docs" / "guide").glob("*.md")), ROOT / "docs" / "physics" / "program.md"]
TYPED = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTHING_FITS = 3
_DRAWS = re.compile(r" --(svg|plot) \S+")


@pytest.fixture(scope="module")
def outputs() -> ModuleType:
    """The module that writes the blocks."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from reference import outputs  # type: ignore[import-not-found, unused-ignore]

        return outputs
    finally:
        sys.path.pop(0)


def without_seconds(text: str) -> str:
    return re.sub(r"solved as ILP in\s+[0-9.]+\s+m?s", "solved as ILP in …", text)


@pytest.mark.usefixtures("priced_once")
@pytest.mark.parametrize("page", [*PAGES, *SHOWING], ids=lambda page: page.stem)
def test_a_page_shows_what_its_commands_print(
    page: Path, outputs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    outputs.link_docs(tmp_path)
    printed: dict[str, str] = {}

    def run(words: list[str]) -> str:
        if (line := shlex.join(words)) not in printed:
            code, told = main(words), capsys.readouterr()
            assert code in (0, NOTHING_FITS), f"plan {line}: {told.err}"
            printed[line] = told.err if code else told.out
        return printed[line]

    for block in outputs.blocks(page.read_text()):
        if not block.is_long:
            shown = outputs.output_of(block, tmp_path, run)
            said = f"run scripts/readme {page.relative_to(ROOT)}"
            assert without_seconds(block.shown) == without_seconds(shown), said


def parsed(line: str) -> Any:
    """The context of a command line that is parsed and not run."""
    program, *words = shlex.split(line)
    assert program == "plan"
    root = _root()
    if words and words[0] in COMMANDS:
        top = root.make_context("plan", [], resilient_parsing=True)
        return root.get_command(top, words[0]).make_context(words[0], words[1:], parent=top)
    return root.make_context("plan", words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_has_one_type_is_understood_and_shown(page: Path, outputs: ModuleType) -> None:
    """Each line in a block of `sh` is a command with an output below it, but for the file that it may draw."""
    text = page.read_text()
    shown = {block.command for block in outputs.blocks(text) if not block.is_file}
    typed = [line for code in TYPED.findall(text) for line in code.splitlines()]
    for line in typed:
        parsed(line)
        assert _DRAWS.sub("", line) in shown, line
    for command in shown:
        if command.startswith("plan "):
            parsed(command)


def test_the_sections_of_an_answer_are_its_paragraphs(outputs: ModuleType) -> None:
    page = "<!-- $ plan models | section B | section D | head -3 # long -->\n```text\n```\n"
    (block,) = outputs.blocks(page)
    assert (block.command, block.is_long) == ("plan models", True)
    assert block.cut("A\n\nB\nb\n\nC\n\nD\nd\n") == "B\nb\n\n"
    with pytest.raises(AssertionError, match="no paragraph"):
        block.cut("A\n\nC\n")


def test_a_file_of_a_page_is_there_for_its_commands(outputs: ModuleType, tmp_path: Path) -> None:
    page = "<!-- file a.log -->\n```text\none\ntwo\n```\n\n<!-- $ cat a.log | tail -1 -->\n```text\nold\n```\n"
    assert outputs.rewritten(page, tmp_path, lambda words: "") == page.replace("old", "two")


def test_every_picture_of_the_guide_is_drawn_by_a_command_and_small() -> None:
    drawn = (ROOT / "scripts" / "docs").read_text()
    pictures = {name for page in PAGES for name in re.findall(r"\]\(pictures/([\w.-]+)\)", page.read_text())}
    assert pictures == {file.name for file in (ROOT / "docs" / "guide" / "pictures").iterdir()}
    for name in pictures:
        assert name.removesuffix(".svg") in drawn
        assert (ROOT / "docs" / "guide" / "pictures" / name).stat().st_size < 100_000


def test_the_program_is_written_with_the_names_of_its_rows_and_variables() -> None:
    """Each name of the tables stands in the code that makes variables and rows."""
    page = (ROOT / "docs" / "physics" / "program.md").read_text()
    code = "\n".join(file.read_text() for file in (ROOT / "planner" / "search" / "ilp").glob("*.py"))
    tables = re.findall(r"^\| (.+?) \| (.+?) \|", page, re.MULTILINE)
    cells = [first if first.startswith("`") else second for first, second in tables]
    names = {name for cell in cells for name in re.findall(r"`([a-zA-Z]+)[\w…]*`", cell)}
    assert {"filled", "chunk", "T", "memory", "grows", "exposed", "holds"} <= names
    assert [name for name in sorted(names) if not re.search(rf'"{name}["_]', code)] == []


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MOST_BYTES = 20_000


def code_of(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.usefixtures("priced_once")
def test_the_cells_run_in_order_and_say_what_the_text_says(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """As a kernel would run them, with pictures drawn to no screen."""
    (notebook,) = NOTEBOOKS
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, code in enumerate(code_of(notebook), 1):
        exec(compile(code, f"{notebook.name}, code cell {number}", "exec"), names)
    best, points = names["best"], names["points"]
    names["plt"].close("all")
    assert Plan.load("plan.json").parallelism == best.parallelism
    assert best.step.step_s <= names["ours"].step.step_s
    assert sum(stage.num_layers for stage in best.stages) == names["model"].num_hidden_layers
    efficiencies = [points[0].step_s * 8 / (step.step_s * n) for n, step in zip(names["counts"], points, strict=True)]
    assert [step.step_s for step in points] == sorted((step.step_s for step in points), reverse=True)
    assert efficiencies[-1] < 1, "the step shortens by less than the GPUs grow"
    assert "proof: proven" in capsys.readouterr().out


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_small_and_have_no_outputs(notebook: Path) -> None:
    data = json.loads(notebook.read_text(encoding="utf-8"))
    assert (data["nbformat"], len(notebook.read_bytes()) < MOST_BYTES) == (4, True)
    assert [cell for cell in data["cells"] if cell.get("outputs") or cell.get("execution_count")] == []
    assert len({cell["id"] for cell in data["cells"]}) == len(data["cells"])


SKILL = (ROOT / "skills/planner/SKILL.md").read_text()
QUESTIONS: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "skill_questions.yaml").read_text())
SCRIPT = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 32 \\
  --ffn-hidden-size 8192 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 32 \\
  --swiglu --bf16 --vocab-size 32000 --disable-bias-linear --setting-of-tomorrow 1
"""


def command(words: list[str]) -> str:
    """The command of a line; empty for the main job."""
    return words[1] if len(words) > 1 and words[1] in COMMANDS else ""


NAMED = {command(shlex.split(text)) for text in re.findall(r"`(plan [^`]+)`", SKILL)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A saved plan and a launch script, whose paths stand for {saved} and {script}."""
    folder = tmp_path_factory.mktemp("skill")
    saved, script = folder / "plan.json", folder / "run.sh"
    assert main(["--model", "1b", "--gpus", "16", "-o", str(saved)]) == 0
    script.write_text(SCRIPT)
    return {"saved": str(saved), "script": str(script)}


def test_there_are_twenty_questions_of_threads() -> None:
    assert len({row["thread"] for row in QUESTIONS}) == 20


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: row["thread"])
def test_the_command_of_a_question_is_in_the_skill_and_answers(
    row: dict[str, Any], files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(row["run"].format(**files))
    assert command(words) in NAMED
    assert main(words[1:]) == row.get("code", 0), capsys.readouterr().err
    assert capsys.readouterr().out


def test_the_pages_of_llms_txt_exist() -> None:
    pages = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text())
    assert pages
    assert [page for page in pages if not (ROOT / page).is_file()] == []
