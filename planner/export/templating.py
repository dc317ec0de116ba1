"""Files of source from the templates in templates/; jinja2 is imported when one is written."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from planner.export.trainer_files import ShellText

if TYPE_CHECKING:
    from jinja2 import Environment


def rendered(name: str, **values: Any) -> str:
    """The text of a template; whatever it needs and is not given is an error.

    Filters: `python` writes a value as Python's literal, `g` a number in up to six digits, `quote` and `words` text and
    words as the shell reads them back.
    """
    return _environment().get_template(f"{name}.j2").render(values)


def shell_words(words: Iterable[str]) -> str:
    """Words joined by blanks, each quoted where the shell would read it otherwise."""
    return " ".join(word if isinstance(word, ShellText) else shlex.quote(word) for word in words)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("planner.export", "templates"), undefined=StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(python=repr, g=_short, quote=shlex.quote, words=shell_words)
    return environment


def _short(number: float) -> str:
    return format(number, "g")
