"""Pages say what the commands print: their blocks are run again, and those that take long are parsed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from planner.cli import main
from planner.cli.app import COMMANDS, _root

ROOT = Path(__file__).parents[1]
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
