"""A chart is part of a page: its own names, the page's colours, hints, and the same bytes on every machine."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from matplotlib import rc_context
from matplotlib.figure import Figure

from tools.accuracy.scatter import INK, PAPER, drawing, figure, hint, svg


def drawn(right: float = 2.0, hinted: bool = False) -> Figure:
    made = figure(4, 3)
    with drawing():
        axes = made.add_subplot()
        (line,) = axes.plot([1, right], [0.123456789, 2], "o-", color=INK, markeredgecolor=PAPER)
        line.set_gid(hint(1) if hinted else None)
        axes.set_title("costs $5 <b> 0.123456789")
        axes.set_xlim(1, 1.5)
    return made


def names(text: str) -> set[str]:
    return set(re.findall(r' id="([^"]*)"', text))


def test_two_figures_in_a_page_share_no_names_and_find_their_own() -> None:
    one, other, labelled = svg(drawn(), "a"), svg(drawn(3.0), "a"), svg(drawn(), "b")
    assert not names(one) & names(other)
    assert not names(one) & names(labelled)
    for text in (one, other):
        assert set(re.findall(r'(?:url\(|href=")#([^")]*)', text)) == names(text) != set()


def test_it_has_the_colours_of_its_page_and_its_text_is_text() -> None:
    text = svg(drawn(), 'says "<what>"')
    assert "var(--ink)" in text
    assert "var(--page)" in text
    assert not re.search(r"#1c2128|#fefefe", text)
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-label"] == 'says "<what>"'
    assert "costs $5 <b> 0.123456789" in [
        "".join(found.itertext()) for found in root.iter() if found.tag.endswith("text")
    ]


def test_hints_appear_where_the_pointer_rests() -> None:
    root = ElementTree.fromstring(svg(drawn(hinted=True), "a", ["none", "<two> & 1.23456"]))
    titles = [found.text for found in root.iter() if found.tag.endswith("title")]
    assert titles == ["<two> & 1.23456"]


def test_the_users_own_settings_change_nothing() -> None:
    text = svg(drawn(), "a")
    with rc_context({"axes.facecolor": "red", "svg.fonttype": "path", "lines.linewidth": 9, "figure.dpi": 40}):
        assert svg(drawn(), "a") == text
