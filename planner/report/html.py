"""The pieces of HTML pages: macros of `page.html.j2`, in which all text is escaped, and the tags of drawings."""

from __future__ import annotations

from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from planner.report.format import LEAST_SHARE, MEMORY, gibibytes, large, percent, seconds
from planner.report.rows import STAGE_HEADS, chunks, mfu_name

_ENVIRONMENT = Environment(
    loader=PackageLoader("planner", "."), undefined=StrictUndefined, autoescape=True, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
_ENVIRONMENT.filters["gibibytes"] = gibibytes
_ENVIRONMENT.globals |= {
    "chunks": chunks, "large": large, "least_share": LEAST_SHARE, "memory_items": MEMORY, "mfu_name": mfu_name,
    "percent": percent, "seconds": seconds, "stage_heads": STAGE_HEADS,
}  # fmt: skip


def draw(macro: str, *given: object, path: str = "report/page.html.j2", **known: Any) -> Markup:
    """A piece of a page by its macro, of a file that may call functions of its own, which are `known`."""
    return Markup(getattr(_ENVIRONMENT.get_template(path, globals=known).module, macro)(*given))


def tag(name: str, /, *inside: Any, **attributes: object) -> Markup:
    """`<name attributes>inside</name>`; `class_` is class, `text_anchor` is text-anchor, empty ones are left out."""
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value != "")
    given = "".join(f' {key}="{escape(str(value))}"' for key, value in pairs)
    return Markup(f"<{name}{given}>{Markup().join(inside)}</{name}>")
