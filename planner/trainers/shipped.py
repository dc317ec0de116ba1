"""The names of the trainers that ship with the planner, and the day of its calibration: no file is parsed for them."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

DATA = Path(__file__).parent / "data"
"""The folder of the trainers' files."""
RUNTIMES = tuple(sorted(path.stem for path in DATA.glob("*.yaml")))
"""Names of the trainers that ship with the planner."""
FITS = Path(__file__).parent / "fits.yaml"
_DATE = re.compile(r"^  - date: (\S+)$", re.MULTILINE)


def calibration_date() -> datetime.date:
    """The day of the last fit, which the last row of the fits has."""
    return datetime.date.fromisoformat(_DATE.findall(FITS.read_text(encoding="utf-8"))[-1])
