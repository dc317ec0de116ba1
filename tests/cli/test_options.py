"""A command that declares a class of options is shown and given its fields."""

import inspect
import shlex
from collections.abc import Callable
from dataclasses import fields

import pytest

from planner.cli import options as module
from planner.cli.options import JobOptions, LayoutOptions, SearchOptions, command_line, declared
from planner.cli.plan_command import evaluate_command, explain_command, plan_command


def test_the_command_gets_one_object_and_its_own_options() -> None:
    told = []

    def command(name: str, asked: SearchOptions, json: bool = False) -> None:
        """What it does."""
        told.append((name, asked.tp, asked.gpus, json))

    values = {field.name: field.default for field in fields(SearchOptions)} | {"tp": "8,16", "gpus": 64}
    run = declared(command, "plan")
    run(name="a", json=True, **values)
    assert told == [("a", "8,16", 64, True)]
    assert run.__doc__ == "What it does."


@pytest.mark.parametrize(
    ("name", "command", "options_class"),
    [
        ("plan", plan_command, SearchOptions),
        ("explain", explain_command, SearchOptions),
        ("evaluate", evaluate_command, LayoutOptions),
    ],
)
def test_typer_sees_fields_in_order(name: str, command: Callable[..., None], options_class: type[JobOptions]) -> None:
    parameters = inspect.signature(declared(command, name)).parameters
    assert {field.name for field in fields(options_class)} < parameters.keys()
    assert "asked" not in parameters
    options = [parameter.annotation for name, parameter in parameters.items() if name not in ("ctx", "file")]
    panels = [option.__metadata__[0].rich_help_panel for option in options]
    assert panels == sorted(panels, key=module._ORDER.index)


def test_a_command_line_gives_the_same_options_again(capsys: pytest.CaptureFixture[str]) -> None:
    asked = SearchOptions(model="my model.yaml", gpus=8, tp="1,2", tp_across_nodes=True, seq_length=4096)
    words = shlex.split(command_line(asked))
    assert words == [
        "plan", "--model", "my model.yaml", "--gpus", "8", "--seq-length", "4096", "--tp", "1,2", "--tp-across-nodes",
    ]  # fmt: skip
