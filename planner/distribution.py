"""The name under which the planner is installed, which is another one than the package's: `planner` was taken."""

from __future__ import annotations

DISTRIBUTION = "trainplan"
__version__ = "0.2.0"
EXTRA_OF_MODULE = {"torch": "probe", "starlette": "serve", "uvicorn": "serve", "matplotlib": "plot"}
"""The extras that bring modules which the planner itself does without."""


def install_line(*extras: str) -> str:
    """The line that installs the planner with these extras, quoted as zsh wants it.

    Where the planner is installed already, pip takes that one and adds what the extras need.
    """
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'" if extras else f"pip install {DISTRIBUTION}"
