"""Charts by matplotlib: one palette, one way to a picture file, and SVG that follows a page's light and dark.

`figure()` makes an empty figure, `svg()` and `image()` write it. The same figure makes the same bytes, whatever the
user's own matplotlib settings are.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from threading import RLock
from typing import Any, Literal

from matplotlib import style
from matplotlib.figure import Figure

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
INK, SOFT, LINE, ALARM = "#1c2128", "#59636e", "#d5dae0", "#b3261e"
"""Text, its quieter form, grids, and what must be seen: in a page they are its own, light or dark."""
_OF_PAGE = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)", ALARM: "var(--alarm)"}
_SETTINGS = {
    "svg.hashsalt": "planner", "svg.fonttype": "none", "font.size": 9, "text.color": INK, "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "grid.color": LINE, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "system-ui", "sans-serif"],
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
    with drawing():
        drawn.savefig(file, format=kind, dpi=150, metadata=dates[kind])
    return file.getvalue()


def svg(drawn: Figure, label: str) -> Html:
    """The figure as part of a page: as wide as there is room, in the page's own colours, `label` read aloud."""
    with drawing():
        drawn.patch.set_alpha(0.0)
        for axes in drawn.axes:
            axes.patch.set_alpha(0.0)
    text = image(drawn, "svg").decode()
    for colour, of_page in _OF_PAGE.items():
        text = text.replace(colour, of_page)
    head, body = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL).split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return Html(f'{head} class="chart" role="img" aria-label="{escape(label)}">{body}')
