"""A hook of mkdocs: code that a page names, `planner/…/module.py:function`, becomes a link to its source; the site says
its version in its name and its path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

CODE_PAGES = Path(__file__).parents[2] / "docs" / "reference" / "code"
INIT = Path(__file__).parents[2] / "planner" / "distribution.py"
CODE = re.compile(r"(?<![\[`])`(planner/[\w/]+)\.py(?::(\w+(?:\.\w+)*))?`(?!`)")
"""A module of ours and, behind a colon, what is in it."""
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)


def shown_packages() -> set[str]:
    """The packages whose source has a page."""
    pages = "\n".join(page.read_text() for page in CODE_PAGES.glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)", pages, re.MULTILINE))


def linked(markdown: str, shown: set[str]) -> str:
    """The page with a link at each name of code that has a page, outside of blocks of code."""
    parts = _FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else CODE.sub(lambda found: _link(found, shown), part) for part in parts
    )


def _link(found: re.Match[str], shown: set[str]) -> str:
    module = found[1].replace("/", ".").removesuffix(".__init__")
    if not any(module == package or module.startswith(f"{package}.") for package in shown):
        return found[0]
    return f"[{found[0]}][{module}{f'.{found[2]}' if found[2] else ''}]"


def on_config(config: Any) -> Any:
    """Called by mkdocs before it builds: `site/0.2.0/`, headed `planner 0.2.0`."""
    version = re.search(r'^__version__ = "(.+)"$', INIT.read_text(), re.MULTILINE)
    assert version is not None
    config["site_name"] = f"{config['site_name']} {version[1]}"
    config["site_dir"] = str(Path(config["site_dir"]) / version[1])
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page before it becomes HTML."""
    return linked(markdown, shown_packages())
