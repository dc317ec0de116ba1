"""Runs that exist, read from their files; and where a user keeps them, for which nothing else is loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "PLANNER_HISTORY"


def folder_of(given: str | None) -> Path | None:
    """The folder that `given` names, else the user's own; None where there is neither."""
    return Path(given) if given else default_folder()


def default_folder() -> Path | None:
    """The folder that the environment names, else the platform's for a user's data; None for a user without a home."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        stated = os.environ.get("XDG_DATA_HOME", "")
        base = Path(stated) if os.path.isabs(stated) else home / ".local" / "share"
    return base / "planner" / "history"
