"""What a command loads before it answers: no library, no file and no source that the answer does not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.cli.app import COMMANDS, _named
from planner.trainers.load import load_runtime
from planner.trainers.shipped import RUNTIMES, architectures_of

LIBRARIES = ("numpy", "pydantic", "yaml", "rich", "pulp", "highspy", "matplotlib", "torch")
LOADED = """
import json, sys
from planner.cli import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
COUNTED = """
import inspect, json, sys
import planner.specs.reading as reading
texts, sources = [], []
parse, find = reading.parse_yaml, inspect.findsource
reading.parse_yaml = lambda text, where, *more, **named: texts.append(where) or parse(text, where, *more, **named)
inspect.findsource = lambda what: sources.append(str(what)) or find(what)
from planner.cli import main
main(sys.argv[1:])
print(json.dumps([texts, sources]), file=sys.stderr)
"""


def said(code: str, *words: str, **variables: str) -> Any:
    """What a fresh process writes last to stderr, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env={**os.environ, **variables}
    )
    return json.loads(done.stderr.splitlines()[-1])


def heavy(modules: list[str]) -> set[str]:
    """The libraries among modules, and the rooms of the planner that calculate or hold types of data."""
    rooms = ("planner.search", "planner.physics", "planner.layout", "planner.answer", "planner.specs.base")
    return {name for name in modules if name in LIBRARIES or name.startswith(rooms)}


@pytest.mark.parametrize("words", [["-h"], ["--version"], [], ["--modle"], *([name, "-h"] for name in COMMANDS)])
def test_help_loads_no_library_and_no_room_that_calculates(words: list[str]) -> None:
    assert heavy(said(LOADED, *words)) == set()


@pytest.mark.parametrize(
    ("words", "index"),
    [("plan ", 1), ("plan ev", 1), ("plan --model 405", 2), ("plan --runtime ", 2), ("plan evaluate --hardware h", 3)],
)
def test_completion_loads_nothing_but_what_the_parser_loads_itself(words: str, index: int) -> None:
    asked = {"_PLAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(index)}
    loaded = said(LOADED, **asked)
    assert heavy(loaded) <= {"pydantic"}, "some versions of typer check each option with it"
    commands = {row.module for row in COMMANDS.values()} & set(loaded)
    assert commands == {"planner.cli.plan_command"}, "the main job's own"


def test_a_plan_reads_one_model_one_gpu_and_one_trainer_once_and_no_source() -> None:
    texts, sources = said(COUNTED, "--model", "8b", "--gpus", "8", "--no-history", "--json")
    assert [Path(text).name for text in texts] == [
        "llama-3.1-8b.yaml",
        "h100-sxm-80gb.yaml",
        "megatron.yaml",
        "nccl.yaml",
    ]
    assert sources == []


def test_json_is_written_without_what_draws_and_a_price_without_the_solver() -> None:
    loaded = set(said(LOADED, "--model", "8b", "--gpus", "8", "--no-history", "--json"))
    assert not loaded & {"rich.console", "matplotlib", "torch", "planner.report.terminal"}
    assert not loaded & {"planner.months.whole_run", "planner.specs.architectures"}, "no tokens, no config.json"
    priced = set(said(LOADED, "evaluate", "--model", "8b", "--gpus", "8", "--no-history", "--json"))
    assert not priced & {"rich.console", "pulp", "highspy", "planner.search.search"}


@pytest.mark.parametrize("name", RUNTIMES)
def test_the_silicon_found_by_a_scan_is_what_the_trainers_file_says(name: str) -> None:
    stand_in = load_runtime(name).stand_in
    assert not stand_in or architectures_of(stand_in) == load_runtime(stand_in).architectures != ()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_line_of_the_list_is_the_first_sentence_of_the_commands_help(name: str) -> None:
    sentence = _named(name).help.split("\n\n")[0].split(". ")[0].replace("\n", " ")
    assert COMMANDS[name].says == sentence
