"""The integer program of a node as text: its variables, its objective and every row, with the numbers of this node."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from planner.schedule.orders import Bound
from planner.search.ilp.formulation import Formulation, Group, Row, Variable
from planner.search.ilp.node import Node, recurring
from planner.search.ilp.program import build
from planner.specs.units import GIB

WIDTH = 120
_SIGNS = {-1: "≤", 0: "=", 1: "≥"}

_GROUPS: dict[Group, str] = {
    "layers": "1. layers: every layer is on one stage",
    "order": "2. order: a layer comes after the layers before it",
    "chunks": "3. chunks: only end stages may be empty; interleaved stages are equal, but for the first and the last",
    "recompute": "4. recompute: no more layers are recomputed whole than the rank holds",
    "time": "5. time, in seconds: T is at least every lower bound of the schedule on every rank",
    "memory": "6. memory, in GiB: every rank's static + in flight · live + transient bytes are at most what it can use",
    "ends": "7. ends, in seconds: exchanges that nothing hides, and the optimizer, of the rank where they take longest",
}

_BOUNDS: dict[Bound, str] = {
    "one_f_one_b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "any_order": "any order of passes",
    "split_backward": "any order of passes, with weight gradients apart",
}


def describe(node: Node, max_rows: int | None = None) -> str:
    """The integer program of a node with its numbers, in the groups of the docstring of `program`.

    A row is a line `name: 0.0123·filled_0_0 + … ≤ 76.2`, which is wrapped if it is long; numbers have six digits. With
    `max_rows` the list of variables and each group of rows end after that number of them.
    """
    program = build(node).formulation
    sections = [
        ("shape", list(_shape(node))),
        ("variables", _shortened(_variables(program), max_rows)),
        ("minimise the seconds of a step", [f"  {_sum(program.problem.objective.items())}"]),
    ]
    for group, title in _GROUPS.items():
        rows = [_row(row) for row in program.rows if program.groups[row.name] == group]
        sections.append((title, _shortened(rows, max_rows) if rows else ["  no rows"]))
    return "\n\n".join("\n".join((title, *lines)) for title, lines in sections) + "\n"


def _shape(node: Node) -> Iterator[str]:
    """Lines with the numbers of the node that several rows share."""
    yield _wrapped(f"{node.num_layers} layers: {_layers(node)}")
    stages = "1 stage" if node.vpp == 1 else f"{node.vpp} virtual stages"
    yield f"  {node.pp} ranks with {stages} each, {node.num_microbatches} micro-batches"
    yield f"  rows of time hold for {_BOUNDS[node.bound]}; a transfer takes {_number(float(node.p2p_s))} s"
    yield f"  recompute mode of a layer: {' or '.join(node.modes)}"
    in_flight = ", ".join(map(_number, node.in_flight))
    yield f"  a rank can use {_number(float(node.usable_bytes) / GIB)} GiB"
    yield _wrapped(f"micro-batches in flight where a rank holds most, ranks 0 … {node.pp - 1}: {in_flight}")


def _layers(node: Node) -> str:
    """The model's layers in order: as a pattern that repeats, or as runs of equal layers."""
    pattern = recurring(node.runs)
    if pattern is None:
        return ", ".join(f"run {number}: {length} {kind}" for number, (kind, length) in enumerate(node.runs))
    layers = [kind for kind, length in node.runs for _ in range(length)]
    return f"places 0 … {pattern.period - 1} of a pattern that repeats: {', '.join(map(str, layers[: pattern.period]))}"


def _variables(program: Formulation) -> list[str]:
    """Name, range and meaning of every variable, in columns."""
    cells = [(variable.name, _range(variable), program.meanings[variable.name]) for variable in program.variables]
    name_width, range_width = (max(len(cell[column]) for cell in cells) for column in (0, 1))
    return [f"  {name:<{name_width}}  {limits:<{range_width}}  {meaning}" for name, limits, meaning in cells]


def _range(variable: Variable) -> str:
    """The values that a variable may take."""
    least, most = variable.lowBound, variable.upBound
    if (variable.cat, least, most) == ("Integer", 0, 1):
        return "0 or 1"
    limits = "any number"
    if least is not None:
        limits = f"≥ {_number(least)}" if most is None else f"{_number(least)} … {_number(most)}"
    return f"whole, {limits}" if variable.cat == "Integer" else limits


def _row(row: Row) -> str:
    """A row as a line: variables on the left, the constant on the right; a definition as `variable = sum`."""
    terms = list(row.items())
    if row.name.startswith("is_"):
        (variable, _), *others = terms
        line = f"{row.name}: {variable.name} = {_sum([(other, -c) for other, c in others], -row.constant)}"
    else:
        line = f"{row.name}: {_sum(terms)} {_SIGNS[row.sense]} {_number(-row.constant)}"
    return _wrapped(line)


def _wrapped(line: str) -> str:
    """A line of a section; if it is too long, the lines after the first are indented further."""
    return textwrap.fill(
        line, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )


def _sum(terms: Iterable[tuple[Variable, float]], constant: float = 0.0) -> str:
    """A sum as text, such as `2·x − 0.5·y + 3`; terms with the coefficient 0 are left out."""
    parts = [(c, variable.name if abs(c) == 1 else f"{_number(abs(c))}·{variable.name}") for variable, c in terms if c]
    if constant or not parts:
        parts.append((constant, _number(abs(constant))))
    (first, text), *others = parts
    return ("−" if first < 0 else "") + text + "".join(f" {'−' if c < 0 else '+'} {part}" for c, part in others)


def _number(value: float) -> str:
    return f"{value:.6g}".replace("-", "−") if value else "0"


def _shortened(lines: Sequence[str], most: int | None) -> list[str]:
    """The first `most` lines, and a line with the number of those left out."""
    if most is None or len(lines) <= most:
        return list(lines)
    return [*lines[:most], f"  … and {len(lines) - most} more"]
