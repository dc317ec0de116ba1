"""The cases beside a test file, in the `tables.yaml` of its folder."""

from pathlib import Path
from typing import Any

import yaml


def beside(test_file: str) -> Any:
    """What stands in the table of a test's folder, by the name of the test."""
    return yaml.safe_load((Path(test_file).parent / "tables.yaml").read_text())
