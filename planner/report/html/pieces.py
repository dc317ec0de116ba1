"""The pieces of an HTML report: escaped text, tables, key figures, bars as inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from planner.report.html.style import STYLE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing is loaded and nothing runs, whatever the file's text says."""


class Html(str):
    """Text that is HTML already; every other string is escaped where it is put into a page."""


def text(value: object) -> Html:
    """A value as HTML."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def tag(name: str, *inside: object, **attributes: object) -> Html:
    """`<name attributes>inside</name>`; `class_` is class, `text_anchor` is text-anchor, empty ones are left out."""
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value != "")
    given = "".join(f' {key}="{escape(str(value))}"' for key, value in pairs)
    return Html(f"<{name}{given}>{''.join(map(text, inside))}</{name}>")


def joined(parts: Iterable[Html], between: str = "\n") -> Html:
    """Parts one after the other."""
    return Html(between.join(parts))


def page(title: str, *body: Html) -> str:
    """A whole file that needs nothing else."""
    head = tag(
        "head",
        Html('\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'),
        Html('<meta name="generator" content="planner">\n'),
        tag("title", title),
        Html(f"\n<style>{STYLE}</style>\n"),
    )
    main = tag("main", Html("\n"), joined(body), Html("\n"))
    document = f'<!doctype html>\n<html lang="en">\n{head}\n<body>\n{main}\n</body>\n</html>\n'
    return document.encode("utf-8", "replace").decode()


def section(title: str, *body: Html, id_: str = "") -> Html:
    """A heading and what it is the heading of."""
    return tag("section", Html("\n"), tag("h2", title), Html("\n"), joined(body), Html("\n"), id_=id_)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], align: str, bold_last: bool = False) -> Html:
    """A table in a box that scrolls by itself; `align` says of each column l, r, or n: left and never wrapped."""
    sides = [_SIDES[side] for side in align]
    lines = [list(row) for row in rows]
    body = []
    for index, row in enumerate(lines):
        cells = joined((tag("td", cell, class_=side) for cell, side in zip(row, sides, strict=True)), "")
        body.append(tag("tr", cells, class_="total" if bold_last and index == len(lines) - 1 else ""))
    head = joined((tag("th", name, class_=side, scope="col") for name, side in zip(heads, sides, strict=True)), "")
    top = tag("thead", tag("tr", head)) if any(heads) else Html("")
    return tag("div", tag("table", top, Html("\n"), tag("tbody", joined(body))), class_="wide")


_SIDES = {"l": "", "r": "num", "n": "whole"}


def figures(pairs: Iterable[tuple[str, str]]) -> Html:
    """Key figures: a name and a value each."""
    return tag("dl", joined(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="figures")


def bullets(lines: Iterable[object]) -> Html:
    """A list."""
    return tag("ul", joined(tag("li", line) for line in lines))


def facts(pairs: Mapping[str, object]) -> Html:
    """A table of names and values."""
    return table(("", ""), ((tag("code", name), value) for name, value in pairs.items()), "ll")


def folded(title: str, body: Html) -> Html:
    """Something long that opens on demand, and is open on paper."""
    return tag("details", tag("summary", title), body)


def share_bar(fraction: float) -> Html:
    """A bar of a table's row."""
    wide = f"{100 * min(max(fraction, 0.0), 1.0):.2f}"
    rect = tag("rect", x="0", y="0", width=wide, height="10", class_="share")
    return tag("svg", rect, viewBox="0 0 100 10", preserveAspectRatio="none", class_="bar", aria_hidden="true")


class Part(NamedTuple):
    """One piece of a stacked bar."""

    name: str
    size: float
    shown: str


_LABEL, _ROW, _BAR, _WIDE, _FIGURE = 70, 24, 18, 720, 110


def stacked_bars(rows: Sequence[tuple[str, Sequence[Part], str]], capacity: float, capacity_text: str) -> Html:
    """A row per stage: its parts one after the other on one scale, its figure beside, and a line at `capacity`."""
    most = max([capacity, *(sum(part.size for part in parts) for _, parts, _ in rows)])
    scale, height = _WIDE / (1.02 * most), _ROW * len(rows) + 22
    capacity_x = _LABEL + scale * capacity
    drawn = [piece for index, row in enumerate(rows) for piece in _stack(row, _ROW * index + 18, scale)]
    line = tag("line", x1=f"{capacity_x:.1f}", x2=f"{capacity_x:.1f}", y1="14", y2=height, class_="capacity")
    label = tag("text", capacity_text, x=f"{capacity_x:.1f}", y="10", text_anchor="end")
    names = dict.fromkeys(part.name for _, parts, _ in rows for part in parts if part.size > 0)
    keys = joined((tag("span", tag("i", class_=f"key {_class(name)}"), " ", name) for name in names), " ")
    box = f"0 0 {_LABEL + _WIDE + _FIGURE} {height}"
    svg = tag("svg", joined([*drawn, line, label]), viewBox=box, role="img", class_="stack", aria_label=capacity_text)
    return tag("figure", svg, tag("figcaption", keys))


def _stack(row: tuple[str, Sequence[Part], str], top: float, scale: float) -> Iterator[Html]:
    label, parts, figure = row
    yield tag("text", label, x=_LABEL - 8, y=top + 13, text_anchor="end")
    left = float(_LABEL)
    for part in parts:
        wide = scale * part.size
        if wide <= 0:
            continue
        hint = tag("title", f"{part.name}: {part.shown}")
        sizes = {"x": f"{left:.2f}", "y": top, "width": f"{wide:.2f}", "height": _BAR}
        yield tag("rect", hint, **sizes, class_=_class(part.name))
        if wide >= 9 * len(part.shown):
            middle = f"{left + wide / 2:.2f}"
            yield tag("text", part.shown, x=middle, y=top + 13, text_anchor="middle", class_="inside")
        left += wide
    yield tag("text", figure, x=_LABEL + _WIDE + 6, y=top + 13)


def _class(name: str) -> str:
    return f"part-{name.replace(' ', '-')}"
