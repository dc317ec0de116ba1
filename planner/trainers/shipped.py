"""The names of the trainers that ship with the planner, and the day of its calibration: no file is parsed for them."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

DATA = Path(__file__).parent / "data"
"""The folder of the trainers' files."""
RUNTIMES = tuple(sorted(path.stem for path in DATA.glob("*.yaml")))
"""Names of the trainers that ship with the planner."""
_ARCHITECTURES = re.compile(r"^architectures: *\[(.*)\]", re.MULTILINE)
FITS = Path(__file__).parent / "fits.yaml"
_DATE = re.compile(r"^  - date: (\S+)$", re.MULTILINE)


def architectures_of(name: str) -> tuple[str, ...]:
    """The silicon that a trainer's own file names, by a scan of its lines; none where it names none."""
    match = _ARCHITECTURES.search((DATA / f"{name}.yaml").read_text(encoding="utf-8"))
    return tuple(word.strip() for word in match[1].split(",")) if match else ()


def calibration_date() -> datetime.date:
    """The day of the last fit, which the last row of the fits has."""
    return datetime.date.fromisoformat(_DATE.findall(FITS.read_text(encoding="utf-8"))[-1])
