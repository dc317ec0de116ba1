"""The printed integer program: every variable and row is there, and the rows can be read back from the text."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from importlib import import_module

import pytest
from test_ilp import interleaved_node, random_node, recurring_node

from planner.search.ilp import program as program_module
from planner.search.ilp.formulation import Row
from planner.search.ilp.node import Node
from planner.search.ilp.program import build, describe

NODES = [make(seed) for make in (random_node, recurring_node, interleaved_node) for seed in range(8)]
NODES += [replace(random_node(seed), bound="any_order", cutoff_s=30.0) for seed in range(4)]
NODES += [replace(interleaved_node(seed), bound="split_backward") for seed in range(4)]
TERM = re.compile(r"(?P<sign>[+−]?) ?(?:(?P<number>[0-9.e+−]+)(?:·|$))?(?P<name>[A-Za-z]\w*)?")


def sections(text: str) -> dict[str, list[str]]:
    """Lines of each section by its title; a title or a row that is wrapped is one line again."""
    blocks = (block.split("\n") for block in re.sub(r"\n {4,}", " ", text).strip().split("\n\n"))
    return {title: [line.strip() for line in lines] for title, *lines in blocks}


def printed_rows(text: str) -> dict[str, str]:
    numbered = [lines for title, lines in sections(text).items() if title[0].isdigit()]
    return dict(line.split(": ", 1) for lines in numbered for line in lines if line != "no rows")


def read_number(text: str) -> float:
    return float(text.replace("−", "-"))


def read_sum(text: str) -> tuple[dict[str, float], float]:
    """Coefficients and the constant of `2·x − 0.5·y + 3`."""
    coefficients, constant = {}, 0.0
    for part in re.sub(r" ([+−]) ", r" \1", text).split(" "):
        match = TERM.fullmatch(part)
        assert match is not None, part
        value = (-1 if match["sign"] == "−" else 1) * read_number(match["number"] or "1")
        if match["name"]:
            coefficients[match["name"]] = value
        else:
            constant = value
    return coefficients, constant


def read_row(text: str) -> tuple[dict[str, float], str, float]:
    """Coefficients, sign and right-hand side, with all variables on the left."""
    match = re.fullmatch(r"(.*) ([≤=≥]) (.*)", text)
    assert match is not None, text
    (left, moved), (right, limit) = read_sum(match[1]), read_sum(match[3])
    return left | {name: -c for name, c in right.items()}, match[2], limit - moved


def check_row(row: Row, text: str) -> None:
    coefficients, sign, limit = read_row(text)
    expected = {variable.name: c for variable, c in row.items() if c}
    assert coefficients == pytest.approx(expected, rel=1e-5)
    assert limit == pytest.approx(-row.constant, rel=1e-5, abs=0)
    assert sign == {-1: "≤", 0: "=", 1: "≥"}[row.sense]


@pytest.mark.parametrize("node", NODES, ids=range(len(NODES)))
def test_every_row_can_be_read_back(node: Node) -> None:
    rows = build(node).formulation.rows
    printed = printed_rows(describe(node))
    assert sorted(printed) == sorted(row.name for row in rows)
    for row in rows:
        check_row(row, printed[row.name])


@pytest.mark.parametrize("node", NODES, ids=range(len(NODES)))
def test_every_variable_has_a_range_and_a_meaning(node: Node) -> None:
    program = build(node).formulation
    lines = {line.split()[0]: line for line in sections(describe(node))["variables"]}
    assert set(lines) == {variable.name for variable in program.problem.variables()}
    for variable in program.variables:
        line = lines[variable.name]
        assert program.meanings[variable.name] in line
        assert (" whole, " in line or " 0 or 1 " in line) == (variable.cat == "Integer")
        if variable.upBound not in (None, 1):
            assert f" 0 … {variable.upBound:g} " in line


def test_the_objective_is_the_step() -> None:
    objective = sections(describe(random_node(1)))["minimise the seconds of a step"]
    assert objective == ["T + gradients + parameters + optimizer"]


def test_groups_are_those_of_the_module() -> None:
    """The sections have the numbers and names of the docstring, and every row stands in the section it belongs to."""
    documented = re.findall(r"^    (\d\. \w+)", program_module.__doc__ or "", re.MULTILINE)
    assert len(documented) == 7
    node = interleaved_node(3)
    titles = [title for title in sections(describe(node)) if title[0].isdigit()]
    assert [re.split(r"[:,]", title)[0] for title in titles] == documented
    text, groups = sections(describe(node)), build(node).formulation.groups
    for title in titles:
        names = [line.split(":")[0] for line in text[title] if line != "no rows"]
        assert names == [name for name, group in groups.items() if group == title.split()[1].strip(":,")]


def test_functions_that_the_module_points_to_exist() -> None:
    named = re.findall(r"\b(formulation|program)\.(_?add_\w+)", program_module.__doc__ or "")
    assert len(named) == 9
    for module, function in named:
        assert inspect.isfunction(getattr(import_module(f"planner.search.ilp.{module}"), function))


def test_numbers_are_those_of_the_node() -> None:
    """The memory row of one rank: GiB of a layer on the left, what the other parts leave on the right."""
    node = random_node(1, pp=1, placement=(0,), in_flight=[1.0], num_microbatches=4, whole="none")
    node = replace(node, runs=node.runs[:1], usable_bytes=50.0 * 2**30)
    layer, ends = node.layers[node.runs[0][0], "none"], (node.embedding, node.head)
    coefficients, sign, limit = read_row(printed_rows(describe(node))["memory_0"])
    per_layer = float(layer.static_bytes + layer.live_bytes) / 2**30
    fixed = sum(float(part.static_bytes + part.live_bytes) for part in ends) / 2**30
    transient = float(max(layer.transient_bytes, node.head.transient_bytes)) / 2**30
    assert coefficients == pytest.approx({"layers_0_0": per_layer}, rel=1e-5)
    assert (sign, limit) == ("≤", pytest.approx(50.0 - fixed - transient, rel=1e-5))
