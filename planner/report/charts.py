"""Charts by matplotlib, which is loaded where one is drawn (extra `plot`): one palette, one way to a picture file, and
SVG that follows a page's light and dark.

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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.answer import PricedLayout
from planner.report.format import gibibytes, seconds, unit_for
from planner.report.html import Html
from planner.report.rows import Entry
from planner.specs.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
"""Colours of text, quiet text, grids, alarms and background; a page has its own, light or dark."""
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
"""A lock, since all threads share matplotlib's settings."""


@contextmanager
def drawing() -> Iterator[None]:
    """A context with our matplotlib settings in place of the user's own."""
    from matplotlib import style

    with _LOCK, style.context(["default", _SETTINGS]):
        yield


def figure(width_in: float, height_in: float) -> Figure:
    """An empty figure. Draw on it inside `with drawing():`, which gives new axes our settings."""
    from matplotlib.figure import Figure

    with drawing():
        return Figure(figsize=(width_in, height_in), layout="constrained")


def image(drawn: Figure, kind: Literal["png", "svg", "pdf"]) -> bytes:
    """The figure as a file's bytes."""
    from matplotlib.text import Text

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
    """The gid that gives an artist the hint of that number in `svg`."""
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
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{mark}-{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{mark}-", text)
    head, body = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return Html(f'{head} class="chart" role="img" aria-label="{escape(label)}">{_packed(body)}')


def _packed(text: str) -> str:
    """The same drawing in fewer bytes: places to a hundredth of a point, no empty groups, nothing between tags."""
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r"font-family: [^;]*; ", "", text)
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><")
    text = re.sub(r"<g>(<text [^>]*>[^<]*</text>)</g>|<g></g>|<defs></defs>", r"\g<1>", text)
    return _RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", text)


WIDE_IN, HIGH_IN = 4.5, 3.1
"""Inches of a chart that stands beside another one, and whose words can be read on a phone."""
_LEAST_SLOTS = 5
"""Number of bars for which a chart has space at least: a single bar is not as wide as the chart."""


def stage_axis(axes: Any, num_stages: int) -> None:
    """An axis of whole numbers, with room on both sides of few stages."""
    room = max(0, _LEAST_SLOTS - num_stages) / 2
    axes.set_xlim(-0.6 - room, num_stages - 0.4 + room)
    axes.set_xlabel("stage")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if num_stages < _LEAST_SLOTS:
        axes.set_xticks(range(num_stages))
    axes.grid(axis="y")


def draw_capacity(axes: Any, capacity_bytes: int, most_bytes: float) -> None:
    """The line of the GPU's memory, and an axis of GiB that has room for it."""
    capacity = capacity_bytes / GIB
    axes.axhline(capacity, color=ALARM, linestyle="--", linewidth=1.1)
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "va": "bottom"}
    axes.annotate(f"GPU {capacity:.1f}", (1.0, capacity), xytext=(0, 2), color=ALARM, fontsize=8, **place)
    axes.set_ylim(0, 1.09 * max(capacity, most_bytes / GIB))
    axes.yaxis.get_major_locator().set_params(nbins=5)
    axes.set_ylabel("GiB")


def draw_stage_seconds(layout: PricedLayout) -> Html:
    """A bar per stage: its computing and its exchanges over all micro-batches, and the rest of the step."""
    step_s, stages, count = layout.step.step_s, layout.stages, layout.parallelism.num_microbatches
    factor, unit = unit_for(step_s)
    spent = {
        "forward": (ACTION_COLOURS["F"], [count * stage.forward_s for stage in stages]),
        "backward": (ACTION_COLOURS["B"], [count * stage.backward_s for stage in stages]),
        "exchanges": (PALETTE[1], [count * (stage.forward_comm_s + stage.backward_comm_s) for stage in stages]),
    }
    used = np.sum([values for _, values in spent.values()], axis=0)
    spent["waits and the rest"] = (LINE, np.maximum(step_s - used, 0.0).tolist())
    drawn, hints, below = figure(WIDE_IN, HIGH_IN), list[str](), np.zeros(len(stages))
    with drawing():
        axes = drawn.add_subplot()
        for name, (colour, values) in spent.items():
            sizes = np.array(values) * factor
            bars = axes.bar(
                range(len(stages)), sizes, 0.84, bottom=below, label=name, color=colour, edgecolor=PAPER, linewidth=0.4
            )
            for stage, value, bar in zip(stages, values, bars, strict=True):
                bar.set_gid(hint(len(hints)))
                hints.append(f"stage {stage.stage}, {name}: {seconds(value, step_s)}")
            below += sizes
        axes.axhline(step_s * factor, color=INK, linewidth=0.8)
        axes.set_ylim(0, 1.05 * float(below.max()))
        axes.set_ylabel(f"{unit} of a step")
        stage_axis(axes, len(stages))
        drawn.legend(loc="outside lower center", ncols=4, fontsize=8, handlelength=1, columnspacing=1.2)
    return svg(drawn, f"Seconds of each stage in a step of {seconds(step_s)}", hints)


FloatArray = npt.NDArray[np.float64]
COLUMNS = 240
"""Columns of a curve; of what happens within one, only the most and the least can be seen."""


class Envelope(NamedTuple):
    """The least and the most of a curve within each of its columns, and the times between columns."""

    edges_s: FloatArray
    low: FloatArray
    high: FloatArray


def envelope(times_s: FloatArray, values: FloatArray, columns: int = COLUMNS) -> Envelope:
    """A step function, `values[i]` from `times_s[i]` on, by columns of equal width from its first time to its last."""
    edges_s = np.linspace(times_s[0], times_s[-1], columns + 1)
    first = np.maximum(np.searchsorted(times_s, edges_s[:-1], "right") - 1, 0)
    end = np.maximum(np.searchsorted(times_s, edges_s[1:], "left"), first + 1)
    end[-1] = len(values)
    pairs = np.column_stack((first, end)).ravel()
    padded = np.append(values, values[-1])
    low, high = (extreme.reduceat(padded, pairs)[::2] for extreme in (np.minimum, np.maximum))
    return Envelope(edges_s, low, high)


BEST, OTHER = PALETTE[1], PALETTE[0]


def draw_steps(entries: Sequence[Entry]) -> Html:
    """The step of each layout with its 80% interval; the first of them is the best, whose interval is a band."""
    factor, unit = unit_for(entries[0].step_s)
    drawn, hints = figure(WIDE_IN, HIGH_IN), list[str]()
    with drawing():
        axes = drawn.add_subplot()
        for row, entry in enumerate(entries):
            colour, ends = OTHER if row else BEST, entry.step_s_interval
            if ends is not None:
                axes.plot([end * factor for end in ends], [row, row], color=colour, linewidth=2.2, alpha=0.45)
                if row == 0:
                    axes.axvspan(*(end * factor for end in ends), color=LINE, alpha=0.4, linewidth=0)
            marker = axes.plot([entry.step_s * factor], [row], "o" if row else "D", color=colour, markersize=5)
            marker[0].set_gid(hint(row))
            hints.append(f"{entry.name} {entry.sizes}: {entry.step}")
        axes.set_yticks(range(len(entries)), [entry.name for entry in entries], color=INK)
        axes.set_ylim(len(entries) - 0.5, -0.5)
        axes.set_xlabel(f"step, {unit}; bars are 80% intervals" if entries[0].step_s_interval else f"step, {unit}")
        axes.grid(axis="x")
    return svg(drawn, f"The step of the best layout and its {len(entries) - 1} alternatives with intervals", hints)


def front(entries: Sequence[Entry]) -> list[Entry]:
    """Those that no other one beats in both step and memory, the fastest first."""
    kept: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: (entry.step_s, entry.peak_bytes)):
        if not kept or entry.peak_bytes < kept[-1].peak_bytes:
            kept.append(entry)
    return kept


def draw_pareto(entries: Sequence[Entry], capacity_bytes: int) -> Html:
    """Step against memory of the fullest GPU, with its interval; a line joins those that none beats in both."""
    factor, unit = unit_for(entries[0].step_s)
    drawn, hints, best = figure(WIDE_IN, HIGH_IN), list[str](), front(entries)
    with drawing():
        axes = drawn.add_subplot()
        axes.plot(
            [entry.step_s * factor for entry in best], [entry.peak_bytes / GIB for entry in best], color=SOFT,
            linewidth=1, linestyle=":", drawstyle="steps-post",
        )  # fmt: skip
        for number, entry in enumerate(entries):
            at, peak, colour = entry.step_s * factor, entry.peak_bytes / GIB, OTHER if number else BEST
            if entry.peak_bytes_interval is not None:
                ends = [end / GIB for end in entry.peak_bytes_interval]
                axes.plot([at, at], ends, color=colour, linewidth=2.2, alpha=0.35)
            fill = colour if entry in best else "none"
            (mark,) = axes.plot([at], [peak], "o" if number else "D", color=colour, markersize=5, markerfacecolor=fill)
            mark.set_gid(hint(number))
            hints.append(f"{entry.name} {entry.sizes}: {entry.step}, {gibibytes(entry.peak_bytes)} GiB")
            # neighbours may lie on each other: one is named above and the other below
            below = (5, -10) if number % 2 == 0 and number else (5, 4)
            axes.annotate(entry.name.rstrip("."), (at, peak), xytext=below, textcoords="offset points", fontsize=8)
        capacity = capacity_bytes / GIB
        axes.axhline(capacity, color=ALARM, linestyle="--", linewidth=1.1)
        axes.annotate(
            f"GPU {capacity:.1f}", (0.0, capacity), xycoords=("axes fraction", "data"), xytext=(3, 2),
            textcoords="offset points", color=ALARM, fontsize=8, va="bottom",
        )  # fmt: skip
        axes.margins(x=0.08, y=0.12)
        axes.set_xlabel(f"step, {unit}")
        axes.set_ylabel("GiB of the fullest GPU")
        axes.grid()
    return svg(drawn, "Step against memory of the fullest GPU, for the best layout and its alternatives", hints)
