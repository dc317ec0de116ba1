"""The blocks of pages that show what a command prints: what they say, and how they are written anew.

A block is `<!-- $ plan … -->` or `<!-- $ cat FILE -->`, then a fenced block. Behind the command may stand `| head -N`,
`| tail -N`, `| section TEXT` for the paragraphs that begin so, `| from TEXT` and `| until TEXT` for the lines from one
that begins so up to another; `# long` says that CI only parses it. What comes behind `<!-- file NAME -->` becomes a
file, which later commands of the page read. All commands of a page run in one folder, with links to docs/ and tests/.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GUIDE = (*sorted((ROOT / "docs" / "guide").glob("*.md")), ROOT / "docs" / "physics" / "program.md")
PAGES = (*GUIDE, ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("FINETUNE", "ACCURACY", "OBSERVE")))
"""The pages that show outputs. Those of the guide show one below each command that they have one type."""
BLOCK = re.compile(r"^<!-- (\$|file) (.+?) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CUT = re.compile(r" \| (?:(head|tail) -(\d+)|(section|from|until) ([^|#]+?))(?= \||$)")
Run = Callable[[list[str]], str]
"""Runs `plan` with these words in the page's folder, and gives its stdout; stderr where nothing fits."""


class Block(NamedTuple):
    """A block of a page."""

    is_file: bool
    command: str
    """The command without what cuts its output; the name of a file."""
    cuts: tuple[tuple[str, str], ...]
    is_long: bool
    shown: str

    def cut(self, text: str) -> str:
        """The lines that the page shows of an output."""
        titles = tuple(title for kind, title in self.cuts if kind == "section")
        if titles:
            paragraphs = [part for part in text.rstrip("\n").split("\n\n") if part.startswith(titles)]
            assert len(paragraphs) >= len(titles), f"{self.command}: no paragraph begins with one of {titles}"
            text = "\n\n".join(paragraphs) + "\n"
        lines = text.splitlines(keepends=True)
        for kind, what in self.cuts:
            if kind in ("head", "tail"):
                lines = lines[: int(what)] if kind == "head" else lines[-int(what) :]
            elif kind in ("from", "until"):
                number = next(number for number, line in enumerate(lines) if line.startswith(what))
                lines = lines[number:] if kind == "from" else "".join(lines[:number]).rstrip().splitlines(keepends=True)
                lines[-1] = lines[-1].rstrip() + "\n"
        return "".join(lines)


def block_of(found: re.Match[str]) -> Block:
    command, _, long = found[2].partition(" # ")
    cuts = tuple((cut[1] or cut[3], cut[2] or cut[4]) for cut in _CUT.finditer(command))
    return Block(found[1] == "file", _CUT.sub("", command).strip(), cuts, long == "long", found[3])


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page, from its top."""
    return (block_of(found) for found in BLOCK.finditer(page))


def output_of(block: Block, folder: Path, run: Run) -> str:
    """What a block has to show: the text of its file, or the output of its command."""
    if block.is_file:
        (folder / block.command).write_text(block.shown)
        return block.shown
    program, *words = shlex.split(block.command)
    assert program in ("plan", "cat"), f"only plan and cat are run: {block.command}"
    return block.cut((folder / words[0]).read_text() if program == "cat" else run(words))


def rewritten(page: str, folder: Path, run: Run) -> str:
    """The page with what its commands print now."""

    def anew(found: re.Match[str]) -> str:
        block, start = block_of(found), found.start()
        return found[0][: found.start(3) - start] + output_of(block, folder, run) + found[0][found.end(3) - start :]

    return BLOCK.sub(anew, page)


def plan_in(folder: Path) -> Run:
    """Runs `plan` as a process of its own in a folder; the same words run once."""
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PLANNER_HISTORY": os.devnull}
    environment["PYTHONPATH"] = str(ROOT)
    done: dict[str, str] = {}

    def run(words: list[str]) -> str:
        line = shlex.join(words)
        if line not in done:
            command = [sys.executable, "-m", "planner.cli", *words]
            ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
            if ran.returncode not in (0, 3):
                raise SystemExit(f"plan {line}: {ran.stderr}")
            done[line] = ran.stdout if ran.returncode == 0 else ran.stderr
        return done[line]

    return run


def link_docs(folder: Path) -> None:
    """Make docs/ and tests/ readable from a page's folder."""
    for name in ("docs", "tests"):
        (folder / name).symlink_to(ROOT / name)


def rewrite(pages: Iterable[Path] = PAGES) -> None:
    """Write the outputs of the pages anew."""
    for page in pages:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            link_docs(folder)
            page.write_text(rewritten(page.read_text(), folder, plan_in(folder)))
