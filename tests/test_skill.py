"""The skill for agents: every command in it runs, and questions of public threads have theirs in its table."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.cli import main
from planner.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]
SKILL = (ROOT / "skills/planner/SKILL.md").read_text()
QUESTIONS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "skill_questions.yaml").read_text())
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
