"""Charts by matplotlib: one palette, one way to a picture file, and SVG that follows a page's light and dark.

`figure()` makes an empty figure, `svg()` and `image()` write it. The same figure makes the same bytes, whatever the
user's own matplotlib settings are.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from html import escape
from threading import RLock
from typing import Any, Literal

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.text import Text

from planner.report.html.pieces import Html

logging.getLogger("matplotlib").setLevel(logging.WARNING)  # a first run would note that it looks for fonts
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999")
"""Okabe and Ito's palette, which colour-blind eyes tell apart."""
MEMORY_COLOURS = {
    "weights": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "logits": "#D55E00",
    "workspace": "#CC79A7",
    "reserved": "#999999",
}
"""Colour of each item of a stage's memory, in every chart."""
ACTION_COLOURS = {"F": "#0072B2", "B": "#009E73", "I": "#009E73", "W": "#E69F00"}
"""Colour of a forward, a backward, an input gradient and a weight gradient."""
INK, SOFT, LINE, ALARM, PAPER = "#1c2128", "#59636e", "#d5dae0", "#b3261e", "#fefefe"
"""Text, its quieter form, grids, what must be seen, and what is behind: a page has its own, light or dark."""
_OF_PAGE = {
    INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)", ALARM: "var(--alarm)", PAPER: "var(--page)",
}  # fmt: skip
_HINT = "hint-"
NUMBER = "number-"
"""The beginning of the gid of a text that a page hides until it is zoomed."""
_RECTANGLE = re.compile(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 (?:L \1 \2 )?z")
_SETTINGS = {
    "svg.hashsalt": "planner", "svg.fonttype": "none", "font.size": 9, "text.color": INK, "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "grid.color": LINE, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "system-ui", "sans-serif"], "text.parse_math": False,
}  # fmt: skip
_LOCK = RLock()
"""matplotlib's settings are one for all threads."""


@contextmanager
def drawing() -> Iterator[None]:
    """Our settings instead of the user's own, for as long as something is made or written."""
    with _LOCK, style.context(["default", _SETTINGS]):
        yield


def figure(width_in: float, height_in: float) -> Figure:
    """An empty figure. Draw on it inside `with drawing():`, which gives new axes our settings."""
    with drawing():
        return Figure(figsize=(width_in, height_in), layout="constrained")


def image(drawn: Figure, kind: Literal["png", "svg", "pdf"]) -> bytes:
    """The figure as a file's bytes."""
    file = io.BytesIO()
    dates: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    # matplotlib draws twice, for the layout and for the file: hundreds of numbers in bars are no part of the first
    inside = [text for text in drawn.findobj(Text) if text.get_visible() and not text.get_in_layout()]

    def show(visible: bool) -> None:
        for text in inside:
            text.set_visible(visible)

    show(False)
    link = drawn.canvas.mpl_connect("draw_event", lambda event: show(True))
    with drawing():
        drawn.savefig(file, format=kind, dpi=150, metadata=dates[kind])
    drawn.canvas.mpl_disconnect(link)
    return file.getvalue()


def hint(number: int) -> str:
    """The gid of an artist that has the text of that number among the `hints` of `svg`."""
    return f"{_HINT}{number}"


def svg(drawn: Figure, label: str, hints: Sequence[str] = ()) -> Html:
    """The figure as part of a page: as wide as there is room, in the page's own colours, `label` read aloud.

    An artist whose gid is `hint(n)` shows `hints[n]` when the pointer rests on it. Several figures may share a page: a
    name that a figure refers to begins with a mark of its own, and the other names are left out.
    """
    with drawing():
        drawn.patch.set_alpha(0.0)
        for axes in drawn.axes:
            axes.patch.set_alpha(0.0)
    text = image(drawn, "svg").decode()
    for colour, of_page in _OF_PAGE.items():
        text = text.replace(colour, of_page)
    mark = sha256((label + text).encode()).hexdigest()[:8]
    text = re.sub(rf'<g id="{_HINT}([0-9]+)">', lambda found: f"<g><title>{escape(hints[int(found[1])])}</title>", text)
    text = re.sub(rf'<g id="{NUMBER}[0-9]+">\s*(?:<!--.*?-->\s*)?<text', '<g><text class="number"', text)
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{mark}-{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{mark}-", text)
    head, body = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return Html(f'{head} class="chart" role="img" aria-label="{escape(label)}">{_packed(body)}')


def svg_file(drawn: Figure) -> str:
    """The figure as an SVG file, on white."""
    before, text = image(drawn, "svg").decode().split("<svg", 1)
    head, body = text.split(">", 1)
    return f'{before}<svg{head} font-family="DejaVu Sans, system-ui, sans-serif">{_packed(body)}\n'


def _packed(text: str) -> str:
    """The same drawing in fewer bytes: places to a hundredth of a point, no empty groups, nothing between tags."""
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r"font-family: [^;]*; ", "", text)
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><")
    text = re.sub(r"<g>(<text [^>]*>[^<]*</text>)</g>|<g></g>|<defs></defs>", r"\g<1>", text)
    return _RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", text)
