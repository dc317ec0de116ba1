"""What a command loads before it answers: no library, no file and no source that the answer does not need."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tables import beside

from planner.cli.app import COMMANDS, _named
from planner.trainers.load import load_runtime
from planner.trainers.shipped import RUNTIMES, architectures_of

TABLES = beside(__file__)

LIBRARIES = ("numpy", "pydantic", "yaml", "rich", "pulp", "highspy", "matplotlib", "torch")


def said(code: str, *words: str) -> Any:
    """What a fresh process writes last to stderr, as JSON."""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    return json.loads(done.stderr.splitlines()[-1])


def loaded(*lines: tuple[list[str], dict[str, str]]) -> list[list[str]]:
    """The modules of a fresh process after each command line, with the variables that it has from then on."""
    found: list[list[str]] = said(TABLES["loaded"], json.dumps(lines))
    return found


def heavy(modules: list[str]) -> set[str]:
    """The libraries among modules, and the rooms of the planner that calculate or hold types of data."""
    rooms = ("planner.search", "planner.physics", "planner.layout", "planner.answer", "planner.specs.base")
    return {name for name in modules if name in LIBRARIES or name.startswith(rooms)}


def test_help_loads_no_library_and_no_room_that_calculates() -> None:
    lines = [["-h"], ["--version"], [], ["--modle"], *([name, "-h"] for name in COMMANDS)]
    for words, modules in zip(lines, loaded(*((words, {}) for words in lines)), strict=True):
        assert heavy(modules) == set(), words


def test_completion_loads_nothing_but_what_the_parser_loads_itself() -> None:
    lines = {"plan ": 1, "plan ev": 1, "plan --model 405": 2, "plan --runtime ": 2, "plan evaluate --hardware h": 3}
    asked = (
        {"_PLAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(n)} for words, n in lines.items()
    )
    for words, modules in zip(lines, loaded(*(([], variables) for variables in asked)), strict=True):
        assert heavy(modules) <= {"pydantic"}, "some versions of typer check each option with it"
        commands = {row.module for row in COMMANDS.values()} & set(modules)
        assert commands == {"planner.cli.plan_command"}, f"the main job's own for {words!r}"


def test_a_plan_reads_one_model_one_gpu_and_one_trainer_once_and_no_source() -> None:
    texts, sources = said(TABLES["counted"], "--model", "8b", "--gpus", "8", "--no-history", "--json")
    assert [Path(text).name for text in texts] == [
        "llama-3.1-8b.yaml", "h100-sxm-80gb.yaml", "megatron.yaml", "nccl.yaml",
    ]  # fmt: skip
    assert sources == []


def test_json_is_written_without_what_draws_and_a_price_without_the_solver() -> None:
    job = ["--model", "8b", "--gpus", "8", "--no-history", "--json"]
    priced, planned = map(set, loaded((["evaluate", *job], {}), (job, {})))
    assert not priced & {"rich.console", "pulp", "highspy", "planner.search.search"}
    assert not planned & {"rich.console", "matplotlib", "torch", "planner.report.terminal"}
    assert not planned & {"planner.months.whole_run", "planner.specs.architectures"}, "no tokens, no config.json"


@pytest.mark.parametrize("name", RUNTIMES)
def test_the_silicon_found_by_a_scan_is_what_the_trainers_file_says(name: str) -> None:
    stand_in = load_runtime(name).stand_in
    assert not stand_in or architectures_of(stand_in) == load_runtime(stand_in).architectures != ()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_line_of_the_list_is_the_first_sentence_of_the_commands_help(name: str) -> None:
    sentence = _named(name).help.split("\n\n")[0].split(". ")[0].replace("\n", " ")
    assert COMMANDS[name].says == sentence
