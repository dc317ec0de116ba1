"""Pieces of HTML that a report has no use for."""

from __future__ import annotations

from planner.report.html.pieces import Html, tag


def empty(name: str, **attributes: object) -> Html:
    """An element without an end tag, such as an input."""
    return Html(tag(name, **attributes).removesuffix(f"</{name}>"))
