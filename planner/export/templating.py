"""Files of source from the templates in templates/; jinja2 is imported when one is written."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template


def rendered(name: str, **values: Any) -> str:
    """The text of a template. `python` writes a value as Python's literal, `g` a number as short as it is exact to six
    digits; whatever a template needs and is not given is an error.
    """
    return _template(name).render(values)


@cache
def _template(name: str) -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined, autoescape=False
    )
    environment.filters |= {"python": repr, "g": lambda number: format(number, "g")}
    source = files("planner.export").joinpath("templates", f"{name}.j2").read_text(encoding="utf-8")
    return environment.from_string(source)
