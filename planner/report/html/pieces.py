"""The pieces of an HTML report: escaped text, tables, key figures, drawings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from planner.report.html.style import STYLE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing is loaded and nothing runs, whatever the file's text says."""


_VOID = ("input",)
"""Elements that have no end."""


class Html(str):
    """Text that is HTML already; every other string is escaped where it is put into a page."""


def text(value: object) -> Html:
    """A value as HTML."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def tag(name: str, /, *inside: object, **attributes: object) -> Html:
    """`<name attributes>inside</name>`; `class_` is class, `text_anchor` is text-anchor, empty ones are left out."""
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value != "")
    given = "".join(f' {key}="{escape(str(value))}"' for key, value in pairs)
    if name in _VOID:
        return Html(f"<{name}{given}>")
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


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], align: str, bold_last: bool = False, folds: bool = False
) -> Html:
    """A table in a box that scrolls by itself; `align` says of each column l, r, or n: left and never wrapped.

    Without heads, the first cell of each row is what the others are about. One that `folds` shows on narrow screens the
    cells of a row one below the other, each with its head.
    """
    sides = [_SIDES[side] for side in align]
    lines, headless = [list(row) for row in rows], not any(heads)
    body = []
    for index, row in enumerate(lines):
        named = zip(row, sides, heads, strict=True)
        cells = [tag("td", cell, class_=side, data_head=head if folds else "") for cell, side, head in named]
        if headless:
            cells[0] = tag("th", row[0], class_=sides[0], scope="row")
        body.append(tag("tr", joined(cells, ""), class_="total" if bold_last and index == len(lines) - 1 else ""))
    top = [
        tag("th", name, class_=side, scope="col") if name else tag("td")
        for name, side in zip(heads, sides, strict=True)
    ]
    head = Html("") if headless else tag("thead", tag("tr", joined(top, "")))
    return tag(
        "div", tag("table", head, Html("\n"), tag("tbody", joined(body))), class_="wide folds" if folds else "wide"
    )


_SIDES = {"l": "", "r": "num", "n": "whole"}


class Card(NamedTuple):
    """A key figure: its name, its value, and what stands below it."""

    name: str
    value: str
    notes: tuple[str, ...] = ()


def cards(shown: Iterable[Card]) -> Html:
    """Key figures beside each other."""
    drawn = (
        tag("div", tag("dt", name), tag("dd", value), joined(tag("dd", note, class_="note") for note in notes))
        for name, value, notes in shown
    )
    return tag("dl", joined(drawn), class_="figures")


def bullets(lines: Iterable[object]) -> Html:
    """A list."""
    return tag("ul", joined(tag("li", line) for line in lines))


def facts(pairs: Mapping[str, object]) -> Html:
    """A table of names and values."""
    return table(("", ""), ((tag("code", name), value) for name, value in pairs.items()), "ll")


def folded(title: str, body: Html) -> Html:
    """Something long that opens on demand, and is left out on paper."""
    return tag("details", tag("summary", title), body)


def share_bar(fraction: float) -> Html:
    """A bar of a table's row."""
    wide = f"{100 * min(max(fraction, 0.0), 1.0):.2f}"
    rect = tag("rect", x="0", y="0", width=wide, height="10", class_="share")
    return tag("svg", rect, viewBox="0 0 100 10", preserveAspectRatio="none", class_="bar", aria_hidden="true")


def beside(*parts: Html) -> Html:
    """Parts beside each other where there is room, else one below the other."""
    return tag("div", joined(parts), class_="beside")


def picture(drawing: Html, caption: str = "", id_: str = "") -> Html:
    """A drawing with what it shows."""
    below = tag("figcaption", caption) if caption else Html("")
    return tag("figure", drawing, below, id_=id_)


ZOOMS = (1, 2, 4)


def zoomed(drawing: Html, name: str) -> Html:
    """A drawing that can be made wider, in a box that scrolls by itself; on paper it is as wide as the paper."""
    choices = (
        tag("input", type="radio", name=name, id=f"{name}-{zoom}", **({} if number else {"checked": "checked"}))
        + tag("label", f"{zoom}×", for_=f"{name}-{zoom}")
        for number, zoom in enumerate(ZOOMS)
    )
    box = tag("div", drawing, class_="scroll", tabindex="0", role="region", aria_label=f"{name}, scrolls sideways")
    return tag("div", tag("span", "zoom"), joined(map(Html, choices), " "), box, class_="zoom")
