"""Reads HTML pages in tests, stands in for their drawings, and prints what is rendered for a terminal."""

import io
from html.parser import HTMLParser
from typing import Any

from markupsafe import Markup as Html
from rich.console import Console

BLANK = Html('<svg xmlns="http://www.w3.org/2000/svg"></svg>')
DRAWN = {"stacks": BLANK, "curve": Html("<p>what is held</p>"), "timeline": Html("<p>what is drawn</p>")}
VOID = {"meta", "input"}


def printed(rendered: Any, width: int = 80, **console: Any) -> str:
    """What a terminal of that width shows."""
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, **console).print(rendered)
    return out.getvalue()


class Page(HTMLParser):
    """Elements, their attributes and the text of a page; fails where tags do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.said).split())
