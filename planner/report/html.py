"""The pieces of an HTML report: escaped text, tables, key figures, drawings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

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
    """A complete HTML file that loads nothing else."""
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
    """A heading and the parts below it."""
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
    """A part that opens on demand, and is not printed."""
    return tag("details", tag("summary", title), body)


def share_bar(fraction: float) -> Html:
    """A bar of a table's row."""
    wide = f"{100 * min(max(fraction, 0.0), 1.0):.2f}"
    rect = tag("rect", x="0", y="0", width=wide, height="10", class_="share")
    return tag("svg", rect, viewBox="0 0 100 10", preserveAspectRatio="none", class_="bar", aria_hidden="true")


def beside(*parts: Html) -> Html:
    """Parts side by side where the page is wide enough, else stacked."""
    return tag("div", joined(parts), class_="beside")


def picture(drawing: Html, caption: str = "", id_: str = "") -> Html:
    """A drawing with what it shows."""
    below = tag("figcaption", caption) if caption else Html("")
    return tag("figure", drawing, below, id_=id_)


PLOT_STYLE = """
svg.plot { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif; }
svg.plot text { fill: var(--soft); }
svg.plot text.title { font-size: 10.5px; }
svg.plot text.alarm { fill: var(--alarm); font-weight: 600; }
svg.plot text.on { fill: #fff; font-size: 9px; text-anchor: middle; }
svg.plot text.dark { fill: #000; font-size: 9px; text-anchor: middle; }
svg.plot path.grid { stroke: var(--line); stroke-width: 1; fill: none; }
svg.plot path.capacity { stroke: var(--alarm); stroke-width: 1.4; stroke-dasharray: 5 3; }
svg.plot path.action { stroke: var(--page); stroke-width: .5; }
svg.plot path.shade { opacity: .3; }
svg.plot path.turns { fill: var(--both); }
svg.plot path.hop { fill: #59636e; }
svg.plot path.whisker { stroke: var(--ink); stroke-width: 1.2; fill: none; }
svg.plot path.interval { stroke-width: 3; opacity: .45; }
svg.plot path.front { stroke: var(--soft); stroke-dasharray: 2 3; }
"""
"""The look of `planner.report.pictures`, with the colours of the page around it."""
STYLE = (
    PLOT_STYLE
    + """
:root {
  color-scheme: light dark;
  --page: #fff; --ink: #1c2128; --soft: #59636e; --line: #d5dae0; --card: #f5f7f9; --accent: #2f6f9f; --alarm: #b3261e;
  --shade: #0003; --offer: #8a5a00; --both: #7fb8b5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181d; --ink: #e3e7eb; --soft: #9aa5b1; --line: #343c45; --card: #1c2229; --accent: #6db3e0;
    --alarm: #ff8a80; --shade: #fff4; --offer: #f0c060; --both: #3c7472;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); overflow-wrap: break-word;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
header { overflow-wrap: anywhere; }
header p { max-width: none; }
header { border-bottom: 1px solid var(--line); padding-bottom: 1rem; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: .2rem 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
.layout { font-size: 1.15rem; font-weight: 600; margin: 0 0 .3rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft, figcaption { color: var(--soft); }
.alarm { color: var(--alarm); font-weight: 600; }
.offer { color: var(--offer); font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem; margin: 1rem 0 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem; }
.figures dt { color: var(--soft); font-size: .82rem; }
.figures dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.figures dd.note { font-size: .8rem; font-weight: 400; color: var(--soft); text-wrap: balance; }
.wide {
  overflow-x: auto;
  background: linear-gradient(to right, var(--page) 30%, transparent) 0 0 / 2.2rem 100% no-repeat local,
    linear-gradient(to left, var(--page) 30%, transparent) 100% 0 / 2.2rem 100% no-repeat local,
    linear-gradient(to right, var(--shade), transparent) 0 0 / .9rem 100% no-repeat scroll,
    linear-gradient(to left, var(--shade), transparent) 100% 0 / .9rem 100% no-repeat scroll;
}
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; color: var(--soft); font-weight: 500; }
tbody th { white-space: nowrap; }
th, td { padding: .22rem .7rem .22rem 0; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th, td.whole, td:first-child { white-space: nowrap; }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.total td { font-weight: 600; border-bottom: 0; }
code { font: .92em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
figure { margin: .6rem 0; overflow-x: auto; }
figcaption { font-size: .85rem; margin-top: .3rem; }
svg.chart { display: block; width: 100%; height: auto; stroke-linejoin: round; stroke-linecap: butt; }
svg.chart text { font-family: inherit !important; }
svg.bar { width: 100%; min-width: 5rem; height: .8em; display: block; margin-top: .35em; }
rect.share { fill: #0072b2; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 2rem; }
.beside > * { min-width: 0; }
.scroll { overflow-x: auto; }
.scroll svg.plot { min-width: 46rem; }
.glance .phone { display: none; }
.glance svg.plot text.on, .glance svg.plot text.dark { display: none; }
svg.key { display: inline-block; width: .75em; height: .75em; }
figcaption span { white-space: nowrap; margin-right: .9rem; }
@media screen and (max-width: 40rem) {
  .glance .broad { display: none; }
  .glance .phone { display: block; }
  main { padding: 1rem .9rem 3rem; }
  table { font-size: .82rem; }
  th, td { padding-right: .5rem; }
  .figures { grid-template-columns: 1fr 1fr; }
  svg.bar { min-width: 2rem; }
  .folds thead { display: none; }
  .folds table, .folds tbody, .folds tr, .folds td { display: block; }
  .folds tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .folds td, .folds td.num { border: 0; padding: 0; text-align: left; white-space: normal; }
  .folds td.num:not(:first-child) { display: inline-block; margin-right: .7rem; }
  .folds td:first-child { font-weight: 600; }
  .folds td:empty { display: none; }
  .folds td[data-head]:not(:first-child)::before { content: attr(data-head) ": "; color: var(--soft); }
}
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem; margin: .6rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; user-select: all; -webkit-user-select: all; }
details { border-top: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; font-weight: 500; }
ul { margin: .3rem 0; padding-left: 1.2rem; }
@media print {
  :root {
    color-scheme: light;
    --page: #fff; --ink: #000; --soft: #444; --line: #ccc; --card: #fff; --accent: #2f6f9f; --alarm: #b3261e;
  }
  @page { size: A4; margin: 10mm 12mm; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 8.5pt; line-height: 1.35; }
  main { max-width: none; padding: 0; }
  h1 { font-size: 14pt; }
  h2 { font-size: 10pt; margin: .8em 0 .2em; break-after: avoid; }
  p { max-width: none; }
  header { padding-bottom: .3rem; }
  figure, tr, .figures div { break-inside: avoid; }
  figure { margin: .2rem 0; }
  figcaption, p.soft { font-size: 7.5pt; margin-top: .1rem; }
  h3 { font-size: 9pt; margin: .6em 0 .2em; break-after: avoid; }
  .layout { font-size: 10.5pt; }
  pre { padding: .2rem .4rem; margin: .3rem 0; }
  .wide, .scroll, figure { overflow: visible; }
  .scroll svg.plot { min-width: 0; max-height: 115mm; }
  .beside svg { max-height: 50mm; }
  .figures { grid-template-columns: repeat(5, 1fr); gap: .3rem; margin-top: .5rem; }
  .figures div { padding: .2rem .4rem; }
  .figures dd { font-size: 10.5pt; }
  .figures dt, .figures dd.note { font-size: 7.5pt; }
  .beside { grid-template-columns: 1fr 1fr; gap: 0 1.2rem; }
  h3 + .wide { break-inside: avoid; }
  ul { margin: 0; font-size: 8pt; }
  table { font-size: 7.5pt; line-height: 1.25; }
  th, td { padding: .08rem .5rem .08rem 0; }
  details { display: none; }
}
"""
)
